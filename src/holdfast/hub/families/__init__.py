"""The model families that Holdfast supports, and no branches on family names anywhere else.

moe             what Holdfast must know about an MoE family, the families with a row of their own, and the rules of gates
recognition     make the row of a family that follows the common contract of transformers, and check gates by measurement
dense           the dense families, and how a feed-forward network becomes an expert
vision_language the parts of vision-language models: tower, connector and language model
"""

from holdfast.hub.families.dense import DENSE_FAMILIES as DENSE_FAMILIES
from holdfast.hub.families.dense import PARTS as PARTS
from holdfast.hub.families.dense import VISION_LANGUAGE_FAMILIES as VISION_LANGUAGE_FAMILIES
from holdfast.hub.families.dense import DenseFamily as DenseFamily
from holdfast.hub.families.dense import DenseLayer as DenseLayer
from holdfast.hub.families.dense import Part as Part
from holdfast.hub.families.dense import VisionLanguageFamily as VisionLanguageFamily
from holdfast.hub.families.dense import dense_weights as dense_weights
from holdfast.hub.families.dense import device_and_dtype as device_and_dtype
from holdfast.hub.families.dense import initial_std as initial_std
from holdfast.hub.families.dense import linear_shape as linear_shape
from holdfast.hub.families.dense import new_experts as new_experts
from holdfast.hub.families.dense import rows_of_part as rows_of_part
from holdfast.hub.families.dense import without_dropout as without_dropout
from holdfast.hub.families.moe import GROUPED_SIGMOID as GROUPED_SIGMOID
from holdfast.hub.families.moe import MOE_FAMILIES as MOE_FAMILIES
from holdfast.hub.families.moe import GateRule as GateRule
from holdfast.hub.families.moe import MoEFamily as MoEFamily
from holdfast.hub.families.moe import routing_from_gate as routing_from_gate
from holdfast.hub.families.moe import text_config as text_config
