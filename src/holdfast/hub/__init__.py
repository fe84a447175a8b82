"""Hugging Face models: routers put into them, watched, saved and loaded."""

from holdfast.hub.auto_classes import register as register_auto_classes
from holdfast.hub.calls import Call as Call
from holdfast.hub.calls import calls as calls
from holdfast.hub.families import DENSE_FAMILIES as DENSE_FAMILIES
from holdfast.hub.families import MOE_FAMILIES as MOE_FAMILIES
from holdfast.hub.folder import load as load
from holdfast.hub.folder import save as save
from holdfast.hub.progress import progress_callback as progress_callback
from holdfast.hub.reroute import reroute as reroute
from holdfast.hub.reroute import restore as restore
from holdfast.hub.sharding import shard_experts as shard_experts
from holdfast.hub.sparsify import sparsify as sparsify
from holdfast.hub.trace import Routes as Routes
from holdfast.hub.trace import has_routers as has_routers
from holdfast.hub.trace import trace as trace

register_auto_classes()
