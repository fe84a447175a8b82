"""Hugging Face models: where their routers sit, and what they do."""

from holdfast.hub.families import FAMILIES as FAMILIES
from holdfast.hub.families import MoEFamily as MoEFamily
from holdfast.hub.trace import Routes as Routes
from holdfast.hub.trace import trace as trace
