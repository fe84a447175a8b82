"""What Holdfast must know about an MoE family (`MoEFamily`), and the families that have a row of their own.

Paths are relative to a transformer layer: a module that contains an attention and, after it, a feed-forward network. The
block of an MoE family contains a gate and experts; the gate returns router logits, weights (T,k) and expert indices (T,k).
A family without a row is recognised from its modules (recognition.py), or declared with `holdfast.register_family`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.hub.adapters import active_module
from holdfast.hub.families.rules import GroupedSigmoid, SparseMixer
from holdfast.routing.rules import Rule
from holdfast.routing.selection import Softmax


@dataclass(frozen=True)
class MoEFamily:
    """The paths of an MoE layer's modules, and the rule by which its gate weights experts."""

    model_type: str
    gate: str  # in the block
    rule: Callable[[Any], Rule]  # of the gate; with `block_bias`, of gate and block
    block: str = "mlp"
    experts: str = "experts"  # in the block
    weight: str = "weight"  # of the gate; "wg.weight" is that of a linear map inside it
    bias: str | None = None
    scale: str | None = None  # the gate's attribute that weights are multiplied by
    block_bias: str | None = None  # the block's tensor that the gate gets as its second argument, to rank experts
    attention: str = "self_attn"
    projection: str = "self_attn.o_proj"
    recurrent: str | None = None  # the module in the place of attention in some layers (linear attention, Mamba)
    since: str = "5.17"  # the first transformers with this layout
    samples_in_training: bool = False  # in training its gate is random; a rerouted model does not sample
    usual_order_since: str = "5.17"  # its gate returns (logits, weights, indices); in older versions the reverse

    @property
    def usual_order(self) -> bool:
        return installed_transformers() >= as_version(self.usual_order_since)

    def gate_of(self, block: nn.Module) -> Any:
        """Return the gate of a block; PEFT may run a copy of it."""
        return active_module(block.get_submodule(self.gate))

    def rule_of(self, block: nn.Module) -> Rule:
        """Return the rule of a block's gate."""
        gate = self.gate_of(block)
        return self.rule(gate) if self.block_bias is None else self.rule(gate, block)  # type: ignore[call-arg]

    def scale_of(self, block: nn.Module) -> float:
        """Return the number that the gate multiplies weights by."""
        return 1.0 if self.scale is None else float(getattr(self.gate_of(block), self.scale))


def _renormalised(gate: nn.Module) -> Rule:
    return Softmax(renormalise=True)


def _as_configured(gate: nn.Module) -> Rule:
    return Softmax(renormalise=bool(gate.norm_topk_prob))


def _sparse_mixer(gate: Any) -> Rule:
    return SparseMixer(float(gate.router_jitter_noise))


MOE_FAMILIES = {
    family.model_type: family
    for family in (
        MoEFamily("mixtral", gate="gate", rule=_renormalised),
        MoEFamily("olmoe", gate="gate", rule=_as_configured),
        MoEFamily("qwen2_moe", gate="gate", rule=_as_configured),
        MoEFamily("qwen3_moe", gate="gate", rule=_as_configured),
        MoEFamily("deepseek_v3", gate="gate", rule=GroupedSigmoid, scale="routed_scaling_factor"),
        MoEFamily("glm4_moe", gate="gate", rule=GroupedSigmoid, scale="routed_scaling_factor"),
        MoEFamily("gpt_oss", gate="router", rule=_renormalised, bias="bias"),
        MoEFamily("phimoe", gate="router", rule=_sparse_mixer, samples_in_training=True),
        MoEFamily("granitemoe", gate="router", rule=_renormalised, block="block_sparse_moe", usual_order_since="5.18"),
        MoEFamily("qwen3_next", gate="gate", rule=_as_configured, recurrent="linear_attn"),
        MoEFamily("qwen3_5_moe_text", gate="gate", rule=_renormalised, recurrent="linear_attn"),
        MoEFamily(
            "granitemoehybrid",
            gate="router",
            rule=_renormalised,
            block="block_sparse_moe",
            recurrent="mamba",
            usual_order_since="5.18",
        ),
    )
}


def as_version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2])


def installed_transformers() -> tuple[int, ...]:
    """Return the first two numbers of the version of transformers."""
    import transformers

    return as_version(transformers.__version__)
