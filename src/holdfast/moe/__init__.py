"""Experts and the layer around them."""

from holdfast.moe.experts import Experts as Experts
from holdfast.moe.feed_forward import FeedForward as FeedForward
from holdfast.moe.layer import MoE as MoE
from holdfast.moe.layer import name_layers as name_layers
