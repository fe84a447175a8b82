"""Experts and the layer around them."""

from holdfast.layers.experts import Experts as Experts
from holdfast.layers.moe import FeedForward as FeedForward
from holdfast.layers.moe import MoE as MoE
from holdfast.layers.moe import name_layers as name_layers
