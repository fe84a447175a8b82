"""The MoE layer, its experts, and the losses of its router.

moe.py              the layers MoE, SoftMoE and SMEAR, and the dense feed-forward network of a shared expert
experts.py          experts with fused weights
expert_parallel.py  experts that are sharded over ranks
losses.py           balance and other losses of a `Routing`
"""

from holdfast.layers.experts import Experts as Experts
from holdfast.layers.moe import LAYERS as LAYERS
from holdfast.layers.moe import SMEAR as SMEAR
from holdfast.layers.moe import FeedForward as FeedForward
from holdfast.layers.moe import MoE as MoE
from holdfast.layers.moe import SoftMoE as SoftMoE
from holdfast.layers.moe import name_layers as name_layers
