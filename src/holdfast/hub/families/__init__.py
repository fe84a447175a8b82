"""The model families that Holdfast supports, and no branches on family names anywhere else.

moe             what Holdfast must know about an MoE family, the families with a row of their own, and the rules of gates
recognition     make the row of a family that follows the common contract of transformers, and check gates by measurement
dense           the dense families, and how a feed-forward network becomes an expert
lookup          find the family of a model and its layers, and what its config says about its inputs
"""

from holdfast.hub.families.dense import DENSE_FAMILIES as DENSE_FAMILIES
from holdfast.hub.families.dense import DenseFamily as DenseFamily
from holdfast.hub.families.dense import DenseLayer as DenseLayer
from holdfast.hub.families.dense import activation_of as activation_of
from holdfast.hub.families.dense import dense_weights as dense_weights
from holdfast.hub.families.dense import device_and_dtype as device_and_dtype
from holdfast.hub.families.dense import initial_std as initial_std
from holdfast.hub.families.dense import linear_shape as linear_shape
from holdfast.hub.families.dense import new_experts as new_experts
from holdfast.hub.families.lookup import as_token_ids as as_token_ids
from holdfast.hub.families.lookup import check_registered as check_registered
from holdfast.hub.families.lookup import dense_family as dense_family
from holdfast.hub.families.lookup import dense_layers as dense_layers
from holdfast.hub.families.lookup import find_submodule as find_submodule
from holdfast.hub.families.lookup import has_experts as has_experts
from holdfast.hub.families.lookup import image_tokens as image_tokens
from holdfast.hub.families.lookup import layers_of as layers_of
from holdfast.hub.families.lookup import mixer_of as mixer_of
from holdfast.hub.families.lookup import modality_of as modality_of
from holdfast.hub.families.lookup import moe_family as moe_family
from holdfast.hub.families.lookup import register_family as register_family
from holdfast.hub.families.lookup import text_config as text_config
from holdfast.hub.families.moe import MOE_FAMILIES as MOE_FAMILIES
from holdfast.hub.families.moe import GateRule as GateRule
from holdfast.hub.families.moe import GroupedSigmoid as GroupedSigmoid
from holdfast.hub.families.moe import MoEFamily as MoEFamily
from holdfast.hub.families.moe import detached_routing as detached_routing
from holdfast.hub.families.moe import routing_from_gate as routing_from_gate
