"""The MoE layer, its experts, and the losses of its router.

moe.py              the layer, and the dense feed-forward network of a shared expert
soft.py             layers in which every token uses every expert: SoftMoE and SMEAR
experts.py          experts with fused weights
expert_parallel.py  experts that are sharded over ranks
losses.py           balance and other losses of a `Routing`
"""

from holdfast.layers.experts import Experts as Experts
from holdfast.layers.moe import FeedForward as FeedForward
from holdfast.layers.moe import MoE as MoE
from holdfast.layers.moe import name_layers as name_layers
from holdfast.layers.soft import LAYERS as LAYERS
from holdfast.layers.soft import SMEAR as SMEAR
from holdfast.layers.soft import SoftMoE as SoftMoE
