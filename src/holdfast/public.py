"""The names that `import holdfast` offers. The package imports this module, and torch with it, when a name is first used."""

from holdfast import geometry as geometry
from holdfast.attacks import register_attack as register_attack
from holdfast.auditing.geometry_run import measure_geometry as measure_geometry
from holdfast.auditing.layer_certificates import certify_model
from holdfast.auditing.pruning import prune as prune
from holdfast.auditing.run import audit as audit
from holdfast.comparing import compare as compare
from holdfast.data import register_dataset as register_dataset
from holdfast.hub import calibrate as calibrate
from holdfast.hub import disable as disable
from holdfast.hub import load as load
from holdfast.hub import register_family as register_family
from holdfast.hub import reroute as reroute
from holdfast.hub import restore as restore
from holdfast.hub import router_loss_scale as router_loss_scale
from holdfast.hub import save as save
from holdfast.hub import set_teacher as set_teacher
from holdfast.hub import shard_experts as shard_experts
from holdfast.hub import sparsify as sparsify
from holdfast.hub import trace as trace
from holdfast.hub import trainer_callback as trainer_callback
from holdfast.layers import SMEAR as SMEAR
from holdfast.layers import Experts as Experts
from holdfast.layers import FeedForward as FeedForward
from holdfast.layers import MoE as MoE
from holdfast.layers import SoftMoE as SoftMoE
from holdfast.layers.losses import Losses as Losses
from holdfast.metrics import register_metric as register_metric
from holdfast.mismatch import Rollout as Rollout
from holdfast.mismatch import measure_mismatch as measure_mismatch
from holdfast.planning import plan as plan
from holdfast.plugins import load_plugin as load_plugin
from holdfast.replaying import RolloutReplay as RolloutReplay
from holdfast.replaying import Routes as Routes
from holdfast.replaying import record as record
from holdfast.replaying import replay as replay
from holdfast.routing import Context as Context
from holdfast.routing import Router as Router
from holdfast.routing import Routing as Routing
from holdfast.routing import create_router as create_router
from holdfast.routing import list_routers as list_routers
from holdfast.routing import register as register

certify = certify_model
