"""Recipes, training on the Hugging Face Trainer, and comparisons of routers under equal conditions."""

from holdfast.train.cells import Cell as Cell
from holdfast.train.cells import Comparison as Comparison
from holdfast.train.contenders import Contender as Contender
from holdfast.train.contenders import contenders as contenders
from holdfast.train.loop import train as train
from holdfast.train.recipe import Recipe as Recipe
from holdfast.train.recipe import load_recipe as load_recipe
from holdfast.train.recipe import recipes as recipes
from holdfast.train.start import start as start
from holdfast.train.task import Task as Task
from holdfast.train.trained import Trained as Trained
from holdfast.train.trained import load_trained as load_trained
from holdfast.train.trained import make_task as make_task
from holdfast.train.trained import save_trained as save_trained
