"""Recipes, training, and comparisons of routers under equal conditions."""

from holdfast.train.building import build_model as build_model
from holdfast.train.cells import Cell as Cell
from holdfast.train.comparison import Comparison as Comparison
from holdfast.train.image_attack_table import attack_images as attack_images
from holdfast.train.recipe import Recipe as Recipe
from holdfast.train.recipe import RouterChoice as RouterChoice
from holdfast.train.recipe import load_recipe as load_recipe
from holdfast.train.recipe import parse_routers as parse_routers
from holdfast.train.recipe import recipes as recipes
from holdfast.train.route_attacks import attack_routers as attack_routers
from holdfast.train.saved_model import TrainedModel as TrainedModel
from holdfast.train.saved_model import load_trained as load_trained
from holdfast.train.saved_model import make_task as make_task
from holdfast.train.saved_model import save_trained as save_trained
from holdfast.train.task import Task as Task
from holdfast.train.training import train as train
