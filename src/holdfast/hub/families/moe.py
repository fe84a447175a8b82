"""The MoE families that have a row of their own, and the rules by which gates rank and weight experts.

Paths are relative to a transformer layer: a module that contains an attention and, after it, a feed-forward network. The
block of an MoE family contains a gate and experts; the gate returns router logits, weights (T,k) and expert indices (T,k).
A family without a row is recognised from its modules (recognition.py), or declared with `holdfast.register_family`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.hub.adapters import active_module
from holdfast.kernels.select import TINY, top
from holdfast.routing import Routing
from holdfast.routing.declarations import (
    HIGHEST_OF_GROUP,
    SIGMOID,
    SOFTMAX,
    Conditions,
    NoCertificate,
    Shares,
    keep_best,
    keep_best_in_groups,
)
from holdfast.routing.parts import normalise
from holdfast.routing.rules import Rule, Scores, Softmax, faded_gates

GROUPS, GROUPS_KEPT = "num_group", "topk_group"  # attributes of gates with groups of experts
RENORMALISES = "norm_topk_prob"  # the attribute of gates that says whether weights are divided by their sum


class BestGates(Rule):
    """The k largest gates, plus a correction bias if the family has one, within the best groups of experts if it has groups.

    Weights are the gates without the bias, divided by their sum if `renormalise`. Groups are selected by a top-k of their
    own, by the sum of their `counted` largest keys: `smooth` makes the selection within groups continuous, not that of
    groups.
    """

    ordered = False  # ranked with the bias, weighted without

    def __init__(self, declared: "GateRule", owner: Any, groups: int, groups_kept: int, renormalise: bool) -> None:
        """`owner` is the module that has the bias. It is looked up there at every use: offloading replaces it."""
        self.gate = SOFTMAX if declared.gates == "softmax" else SIGMOID
        self.owner, self.bias_name, self.counted = owner, declared.bias, declared.counted
        self.groups, self.groups_kept, self.renormalise = groups, groups_kept, renormalise
        # Levels are logits, as for a softmax, or gates between 0 and 1.
        self.strip = Rule.strip if declared.bias is None else 0.02

    def __deepcopy__(self, memo: dict[int, Any]) -> "BestGates":
        """Copy the rule with the copy of its owner; if the owner is not copied, share it."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, owner=memo.get(id(self.owner), self.owner))
        return copied

    @property
    def bias(self) -> Tensor | None:
        return None if self.bias_name is None else getattr(self.owner, self.bias_name)

    def ranks(self, scores: Scores) -> Tensor:
        return self._in_best_groups(scores, scores.key)

    def levels(self, scores: Scores) -> Tensor:
        return self._in_best_groups(scores, scores.logits)

    def _in_best_groups(self, scores: Scores, unbiased: Tensor) -> Tensor:
        """Return gates plus bias, or `unbiased` without a bias; -inf for experts of other groups."""
        bias = self.bias
        choice = scores.gates if bias is None else scores.gates + bias.float()
        keys = unbiased if bias is None else choice
        if self.groups_kept >= self.groups:
            return keys
        grouped = choice.unflatten(-1, (self.groups, -1))
        worth = grouped.topk(min(self.counted, grouped.shape[-1]), dim=-1).values.sum(-1)
        if scores.lost is not None:  # a group with a large bias may have no expert left
            worth = worth.where(~scores.lost.expand_as(choice).unflatten(-1, (self.groups, -1)).all(-1), -torch.inf)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, top(worth, self.groups_kept), True)
        return keys.unflatten(-1, (self.groups, -1)).where(kept.unsqueeze(-1), -torch.inf).flatten(-2)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        gates = faded_gates(scores, experts, in_use, fade)
        return normalise(gates) if self.renormalise else gates

    def shares(self, k: int) -> Shares | None:
        return Shares(None, "set" if self.renormalise else "nothing")

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        has_groups = self.groups_kept < self.groups
        if self.bias_name is None and not has_groups:
            return keep_best(scores.key, k, scores.compares)
        if self.gate.name != SIGMOID.name or (has_groups and self.counted != HIGHEST_OF_GROUP):
            return None
        bias = None if self.bias is None else self.bias.detach().to(scores.gates)
        keys = scores.gates if bias is None else scores.gates + bias
        if not has_groups:
            return keep_best(keys, k, "gates", bias)
        in_groups = self.groups_kept * (keys.shape[-1] // self.groups)
        if k > in_groups:
            raise NoCertificate(f"no certificate is known for {self.name}: it selects {k} experts of {in_groups} in groups")
        return keep_best_in_groups(keys, k, self.groups, self.groups_kept, "gates", bias)


@dataclass(frozen=True)
class GateRule:
    """A rule of the common kinds, as a function of a gate, and of the block if that has the bias.

    Gates are a softmax or sigmoids of the logits. The k largest are selected; `bias` is the name of a bias that is added
    only for that. If the experts are `grouped`, by the gate's `num_group` and `topk_group`, the best groups are first.
    """

    gates: Literal["softmax", "sigmoid"]
    renormalise: bool | None  # whether weights are divided by their sum; None: the gate's `norm_topk_prob` says it
    bias: str | None = None
    grouped: bool = False
    counted: int = 2  # experts whose keys are the value of a group

    def __call__(self, gate: Any, block: Any = None) -> Rule:
        groups = int(getattr(gate, GROUPS)) if self.grouped else 1
        kept = int(getattr(gate, GROUPS_KEPT)) if self.grouped else 1
        renormalise = bool(getattr(gate, RENORMALISES)) if self.renormalise is None else self.renormalise
        if self.gates == "softmax" and self.bias is None and kept >= groups:
            return Softmax(renormalise)
        return BestGates(self, gate if block is None else block, groups, kept, renormalise)


class SparseMixer(Rule):
    """Phi-MoE in evaluation: an expert's weight is its softmax share among the experts close to it and not yet selected.

    "Close" is a logit within 2 * tolerance, relative. Weights are near 1 each and need not sum to 1. In training the family
    samples; a rerouted model does not.
    """

    ordered = False

    def __init__(self, gate: Any) -> None:
        self.tolerance = float(gate.router_jitter_noise)  # relative: a shift of all logits changes the weights

    def levels(self, scores: Scores) -> Tensor:
        if not scores.informed:
            return scores.logits
        assert scores.raw is not None  # the logarithm of informed gates, shifted back to the scale of the logits
        return scores.logits + torch.logsumexp(scores.raw, dim=-1, keepdim=True)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        levels = self.levels(scores).gather(-1, experts)
        left, weights = self.levels(scores), []
        for slot in range(k):
            best = levels[..., slot : slot + 1]
            largest = left.abs().maximum(best).clamp_min(TINY)  # logits that are all 0 are near each other
            near = ((best - left) / largest).detach() <= 2 * self.tolerance
            # Not -inf: of an unused slot, which reads expert 0, nothing may be near, and the gradient would be NaN.
            close = left.where(near, torch.finfo(left.dtype).min)
            weights.append(torch.softmax(close, dim=-1).gather(-1, experts[..., slot : slot + 1]))
            left = left.scatter(-1, experts[..., slot : slot + 1], -torch.inf)
        # An expert in a strip below the k-th is weighted as if it were the k-th.
        strip = weights[-1] * (levels - levels[..., k - 1 : k]).exp()
        chosen = torch.cat([*weights, strip[..., k:]], dim=-1)
        chosen = chosen if fade is None else chosen * fade.exp()
        return chosen.where(in_use, 0.0)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        return keep_best(scores.key, k, scores.compares)


def routing_from_gate(output: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Routing:
    """Return the output of a family's gate as a `Routing`: float32, slots sorted by weight, ties by the lower index."""
    logits, weights, experts = output if output[0].is_floating_point() else output[::-1]
    logits, weights = logits.flatten(0, -2).float(), weights.flatten(0, -2).float()
    experts = experts.flatten(0, -2).long()
    by_index = experts.argsort(dim=-1)
    experts, weights = experts.gather(1, by_index), weights.gather(1, by_index)
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return Routing(logits, rule.gate(logits), experts.gather(1, order), weights.gather(1, order))


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
    samples_in_training: bool = False  # in training its gate is random; a rerouted model does not sample
    usual_order_since: str = "5.17"  # its gate returns (logits, weights, indices); in older versions the reverse

    @property
    def usual_order(self) -> bool:
        import transformers

        return as_version(transformers.__version__) >= as_version(self.usual_order_since)

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


RENORMALISED, AS_CONFIGURED = GateRule("softmax", renormalise=True), GateRule("softmax", renormalise=None)
# DeepSeek-V3: the k largest sigmoids plus a correction bias, within the best groups of experts.
GROUPED_SIGMOID = GateRule("sigmoid", renormalise=None, bias="e_score_correction_bias", grouped=True)
GRANITE: Any = {"gate": "router", "rule": RENORMALISED, "block": "block_sparse_moe", "usual_order_since": "5.18"}

MOE_FAMILIES = {
    family.model_type: family
    for family in (
        MoEFamily("mixtral", gate="gate", rule=RENORMALISED),
        MoEFamily("olmoe", gate="gate", rule=AS_CONFIGURED),
        MoEFamily("qwen2_moe", gate="gate", rule=AS_CONFIGURED),
        MoEFamily("qwen3_moe", gate="gate", rule=AS_CONFIGURED),
        MoEFamily("deepseek_v3", gate="gate", rule=GROUPED_SIGMOID, scale="routed_scaling_factor"),
        MoEFamily("glm4_moe", gate="gate", rule=GROUPED_SIGMOID, scale="routed_scaling_factor"),
        MoEFamily("gpt_oss", gate="router", rule=RENORMALISED, bias="bias"),
        MoEFamily("phimoe", gate="router", rule=SparseMixer, samples_in_training=True),
        MoEFamily("granitemoe", **GRANITE),
        MoEFamily("qwen3_next", gate="gate", rule=AS_CONFIGURED, recurrent="linear_attn"),
        MoEFamily("qwen3_5_moe_text", gate="gate", rule=RENORMALISED, recurrent="linear_attn"),
        MoEFamily("granitemoehybrid", **GRANITE, recurrent="mamba"),
    )
}


def as_version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2])


def text_config(model: Any) -> Any:
    """Return the config of the model's text part, which is the config itself in most models."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
