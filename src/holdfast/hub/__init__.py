"""Hugging Face models: put routers into them, trace them, save and load them."""

from holdfast.hub.checkpoint import load as load
from holdfast.hub.checkpoint import save as save
from holdfast.hub.convert import reroute as reroute
from holdfast.hub.convert import restore as restore
from holdfast.hub.convert import set_teacher as set_teacher
from holdfast.hub.convert import sparsify as sparsify
from holdfast.hub.disabling import disable as disable
from holdfast.hub.engines import calibrate as calibrate
from holdfast.hub.engines import router_loss_scale as router_loss_scale
from holdfast.hub.engines import shard_experts as shard_experts
from holdfast.hub.engines import trainer_callback as trainer_callback
from holdfast.hub.families import DENSE_FAMILIES as DENSE_FAMILIES
from holdfast.hub.families import MOE_FAMILIES as MOE_FAMILIES
from holdfast.hub.families import DenseFamily as DenseFamily
from holdfast.hub.families import GateRule as GateRule
from holdfast.hub.families import MoEFamily as MoEFamily
from holdfast.hub.layers import register_family as register_family
from holdfast.hub.parts import part_of as part_of
from holdfast.hub.tracing import RouterCall as RouterCall
from holdfast.hub.tracing import Trace as Trace
from holdfast.hub.tracing import has_routers as has_routers
from holdfast.hub.tracing import router_calls as router_calls
from holdfast.hub.tracing import trace as trace
