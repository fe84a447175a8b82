"""Recipes, training on the Hugging Face Trainer, and comparisons of routers under equal conditions."""

from holdfast.train.comparison import Cell as Cell
from holdfast.train.comparison import Comparison as Comparison
from holdfast.train.recipe import Contender as Contender
from holdfast.train.recipe import Recipe as Recipe
from holdfast.train.recipe import contenders as contenders
from holdfast.train.recipe import load_recipe as load_recipe
from holdfast.train.recipe import recipes as recipes
from holdfast.train.saved_model import Trained as Trained
from holdfast.train.saved_model import load_trained as load_trained
from holdfast.train.saved_model import make_task as make_task
from holdfast.train.saved_model import save_trained as save_trained
from holdfast.train.task import Task as Task
from holdfast.train.training import start as start
from holdfast.train.training import train as train
