"""Recipes, training on the Hugging Face Trainer, and comparisons of routers under equal conditions."""

from holdfast.train.cells import Cell as Cell
from holdfast.train.cells import Comparison as Comparison
from holdfast.train.cells import Contender as Contender
from holdfast.train.evaluation import score as score
from holdfast.train.loop import train as train
from holdfast.train.recipe import Recipe as Recipe
from holdfast.train.recipe import load_recipe as load_recipe
from holdfast.train.recipe import recipes as recipes
from holdfast.train.start import start as start
from holdfast.train.text_task import TextTask as TextTask
