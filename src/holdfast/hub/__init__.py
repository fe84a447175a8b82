"""Hugging Face models: routers put into them, watched, saved and loaded."""

from holdfast.hub.auto_classes import register as register_auto_classes
from holdfast.hub.calls import Call as Call
from holdfast.hub.calls import calls as calls
from holdfast.hub.families import DENSE_FAMILIES as DENSE_FAMILIES
from holdfast.hub.families import MOE_FAMILIES as MOE_FAMILIES
from holdfast.hub.folder import load as load
from holdfast.hub.folder import save as save
from holdfast.hub.reroute import reroute as reroute
from holdfast.hub.reroute import restore as restore
from holdfast.hub.sharding import shard_experts as shard_experts
from holdfast.hub.sparsify import sparsify as sparsify
from holdfast.hub.trace import Routes as Routes
from holdfast.hub.trace import has_routers as has_routers
from holdfast.hub.trace import trace as trace
from holdfast.hub.trainer_callback import calibrate as calibrate
from holdfast.hub.trainer_callback import router_loss_scale as router_loss_scale
from holdfast.hub.trainer_callback import trainer_callback as trainer_callback

register_auto_classes()
