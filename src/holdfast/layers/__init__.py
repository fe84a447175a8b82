"""Experts and the layer around them."""

from holdfast.layers.experts import Experts as Experts
from holdfast.layers.feed_forward import FeedForward as FeedForward
from holdfast.layers.layer import MoE as MoE
from holdfast.layers.layer import name_layers as name_layers
