"""Selectors: which experts run for a token, and with which weights. Ties go to the lower index, everywhere.

    TopK    the k best experts, optionally with noise or a growing k in training
    TopP    all experts whose gate exceeds a threshold
    ReLU    all experts with a positive logit, and a penalty that steers their number

The smooth top-k is in `holdfast.routing.smoothing`. `Softmax` is the usual rule; rules of model families are in
`holdfast.hub.families`.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import unknown_name
from holdfast.kernels.backward import snapshot_for_backward
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.launching import wait_for_side_stream
from holdfast.kernels.select import Amounts, select_top_k, top, weigh
from holdfast.routing.conditions import keep_above, keep_best
from holdfast.routing.declarations import (
    FLOAT,
    RELU,
    ActiveExperts,
    Conditions,
    Cost,
    GateFunction,
    LayerSizes,
    selection_bytes,
)
from holdfast.routing.parts import TINY, Scores, Selection, Selector, normalise
from holdfast.routing.parts import Rule as Rule
from holdfast.routing.records import Context
from holdfast.routing.state import StatefulPart, mean_over_ranks


class TopK(Selector):
    """Select the k best experts.

    weights     "softmax": gates divided by their sum over the k; "switch": the raw gates (Fedus et al. 2022)
    noise       None, "gaussian" (Shazeer et al. 2017; `noise_std=None` learns it) or "gumbel" (with `noise_temperature`);
                added to the logits in training, before selection
    k_final     in training, k grows from `k` to this number or to "all" experts (SMoE-dropout), with `progress(fraction)`
    rule        the rule of the model that the router is built for; it replaces `weights`
    """

    active: Tensor
    rule: Rule

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        weights: Literal["softmax", "switch"] = "softmax",
        noise: Literal["gaussian", "gumbel"] | None = None,
        noise_std: float | None = None,
        noise_temperature: float = 1.0,
        k_final: int | Literal["all"] | None = None,
        rule: Rule | None = None,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        k_final = experts if k_final == "all" else k_final
        if weights not in ("softmax", "switch"):
            raise ValueError(unknown_name("kind of weights", weights, ("softmax", "switch")))
        if noise not in (None, "gaussian", "gumbel"):
            raise ValueError(unknown_name("noise", noise, ("gaussian", "gumbel")))
        if noise != "gaussian" and noise_std is not None:
            raise ValueError(f"noise_std is {noise_std}, but the noise is {noise}; add noise='gaussian'.")
        self.k, self.experts, self.weights, self.k_final = k, experts, weights, k_final
        self.rule = Softmax(renormalise=weights == "softmax") if rule is None else rule
        self.noise: GaussianNoise | GumbelNoise | None = None
        if noise == "gaussian":
            self.noise = GaussianNoise(dim, experts, std=noise_std)
        elif noise == "gumbel":
            self.noise = GumbelNoise(temperature=noise_temperature)
        if k_final is not None:
            check_k(k_final, experts, "k_final")
            # A tensor is saved with the model, and a change of its value needs neither recompilation nor synchronisation.
            self.register_buffer("active", torch.tensor(k))

    @property
    def ragged(self) -> bool:
        return self.k_final is not None

    @property
    def slots(self) -> int:
        return self.k if self.k_final is None else max(self.k, self.k_final)

    def progress(self, fraction: float) -> None:
        if self.k_final is not None:
            self.active.fill_(self.k + int(fraction * (self.k_final - self.k)))

    def _with_noise(self, scores: Scores, noisy: Tensor) -> Scores:
        """Return the scores with noise. Informed gates keep their sum, which need not be 1 and may be 0."""
        if not scores.informed:
            return Scores(noisy, self.gate(noisy), informed=False, raw=noisy)
        return Scores.from_gates(scores.gates.sum(-1, keepdim=True) * torch.softmax(noisy, dim=-1), scores.raw)

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        if self.training and self.noise is not None:
            scores = self._with_noise(scores, self.noise(scores.logits, tokens))
        amounts = self.rule.amounts(scores)
        if amounts is not None and self.k_final is None:
            experts, weights = select_top_k(scores.key, amounts, self.k)
            return Selection(experts, weights, scores.gates, {})
        experts = top(self.rule.ranks(scores), self.slots)
        in_use = torch.ones_like(experts, dtype=torch.bool)
        if self.k_final is not None:
            in_use = (torch.arange(self.slots, device=experts.device) < self.active).expand_as(experts)
        weights = self.rule.weigh(scores, experts, in_use, None, self.slots)
        experts = experts.where(in_use, self.experts)
        if not self.rule.ordered:
            experts, weights = by_weight(experts, weights)
        return Selection(experts, weights, scores.gates, {})

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return self.rule.held_weights(experts, scores, live)

    def cost(self, sizes: LayerSizes) -> Cost:
        noise = 0.0 if self.noise is None else self.noise.flops
        return Cost("selection", backward=2 * noise, noise=noise, kept=selection_bytes(self.slots, sizes))

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts:
        about = "" if self.k_final is None else f"grows from {self.k} in training; counted at its end"
        return ActiveExperts(self.slots, self.slots, self.slots, about)

    def conditions(self, scores: Scores) -> Conditions | None:
        return self.rule.conditions(scores, self.k if self.k_final is None else int(self.active))


class TopP(Selector):
    """Select every expert whose gate exceeds p, and always the best; weights are renormalised (ACMoE appendix C.10).

    With `learned=True`, p is a parameter: the forward uses the hard threshold, and the gradient is that of a soft mask,
    sigmoid((gate - p) / softness).
    """

    def __init__(self, experts: int, *, p: float = 0.05, learned: bool = False, softness: float = 0.01) -> None:
        super().__init__()
        if not 0 < p < 1:
            raise ValueError(f"p is {p}; the gate threshold must lie between 0 and 1.")
        if not softness > 0:
            raise ValueError(f"softness is {softness}; the width of the soft mask must be positive.")
        self.experts, self.softness = experts, softness
        start = torch.tensor([p]).logit()
        self.learned_p = nn.Parameter(start) if learned else None
        self.fixed_p = p

    def threshold(self) -> Tensor | float:
        return self.fixed_p if self.learned_p is None else self.learned_p.float().sigmoid()

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        experts = top(scores.key, self.experts)
        gates = scores.gates.gather(-1, experts)
        threshold = self.threshold()
        best = torch.arange(self.experts, device=gates.device) == 0
        in_use = (gates > threshold) | best
        selected = gates.where(in_use, 0.0)
        if self.learned_p is not None:
            soft = torch.sigmoid((gates - threshold) / self.softness)
            selected = selected + gates * (soft - soft.detach())
        weights = normalise(selected)
        return Selection(experts.where(in_use, self.experts), weights.where(in_use, 0.0), scores.gates, {})

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        in_use = experts < self.experts
        gates = scores.gates.gather(-1, experts.where(in_use, 0))
        return live.weights_if_same_set(experts, normalise(gates.where(in_use, 0.0)))

    def cost(self, sizes: LayerSizes) -> Cost:
        return Cost("selection", kept=selection_bytes(sizes.experts, sizes))

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts:
        """Declare an upper bound: fewer than 1 / p gates can exceed p if they sum to at most 1."""
        most = min(sizes.experts, max(1, math.ceil(1 / self.fixed_p) - 1))
        return ActiveExperts(most, most, sizes.experts, "depends on the data; an upper bound")

    def conditions(self, scores: Scores) -> Conditions:
        return keep_above(scores.gates, float(self.threshold()), "gates", at_least_one=True)


class ReLU(Selector, StatefulPart):
    """Select experts with a positive logit, weights = relu(logits) (ReMoE).

    An L1 penalty steers the mean number of selected experts to k: after each batch its coefficient is multiplied by
    `l1_rate` if more than k experts were selected on average, and divided by it if fewer were.
    """

    coefficients = ("l1",)
    l1: Tensor

    def __init__(self, experts: int, k: int, *, l1: float = 1e-8, l1_rate: float = 1.2) -> None:
        super().__init__()
        check_k(k, experts)
        if not l1 >= 0:
            raise ValueError(f"l1 is {l1}; the penalty must not be negative.")
        if not l1_rate >= 1:
            raise ValueError(f"l1_rate is {l1_rate}; it must be at least 1 (1 keeps the coefficient constant).")
        self.experts, self.k, self.l1_rate = experts, k, l1_rate
        self.register_buffer("l1", torch.tensor(l1, dtype=torch.float32))
        self.register_statistics(active=torch.zeros(()), tokens=torch.zeros(()))

    @property
    def gate(self) -> GateFunction:
        return RELU

    def new_state(self) -> dict[str, Tensor]:
        excess = self.get_buffer("staged_active") - self.k * self.get_buffer("staged_tokens")
        return {"l1": self.l1 * self.l1_rate ** excess.sign()}

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        experts = top(scores.key, self.experts)
        weights = scores.gates.gather(-1, experts)
        losses = {}
        if self.training and self.learning:
            real = context.real_tokens(tokens)
            self.stage_in_background(lambda: self._counts(weights, real))
            wait_for_side_stream(tokens)
            # A recomputation stages nothing, and reads the count of the first forward.
            count = snapshot_for_backward(self.get_buffer("staged_tokens"))
            total = scores.gates.sum(-1).where(real, 0.0).sum()
            # Divided by the mean number of tokens over ranks: the mean over ranks is then the loss of the whole batch.
            losses["l1"] = snapshot_for_backward(self.l1) * total / count.where(count > 0, 1.0)
        return Selection(experts.where(weights > 0, self.experts), weights, scores.gates, losses)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return the gates themselves: an expert that is no longer selected has gate 0."""
        in_use = experts < self.experts
        return live.weights_if_same_set(experts, scores.gates.gather(-1, experts.where(in_use, 0)).where(in_use, 0.0))

    def cost(self, sizes: LayerSizes) -> Cost:
        return Cost("selection", kept=selection_bytes(sizes.experts, sizes), summed=2 * FLOAT)

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts:
        return ActiveExperts(self.k, self.k, sizes.experts, "steered to k; more at the start")

    def snapshot(self) -> dict[str, Tensor]:
        return {"l1": self.l1}

    def conditions(self, scores: Scores) -> Conditions:
        return keep_above(scores.key, 0.0, scores.compares)

    def _counts(self, weights: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Return the number of selected experts and of tokens in the batch, as means over ranks."""
        active = ((weights > 0) & real.unsqueeze(-1)).sum()
        active, count = mean_over_ranks(torch.stack([active, real.sum()]).float())
        return {"active": active, "tokens": count}


class Softmax(Rule):
    """Gates are a softmax of the logits; weights are the gates, divided by their sum if `renormalise`."""

    def __init__(self, renormalise: bool) -> None:
        self.renormalise = renormalise
        self.weights_option = "softmax" if renormalise else "switch"

    def amounts(self, scores: Scores) -> Amounts:
        if self.renormalise and not scores.informed:
            return Amounts(scores.logits, "softmax")
        return Amounts(scores.gates, "shares" if self.renormalise else "raw")

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return weigh(self.amounts(scores), experts, in_use, fade)

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        return keep_best(scores.key, k, scores.compares)


def faded_gates(scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None) -> Tensor:
    """Return (B,N,K): the gates of the slots in use, times the factors exp(fade); 0 in other slots."""
    gates = scores.gates.gather(-1, experts)
    gates = gates if fade is None else gates * fade.exp()
    return gates.where(in_use, 0.0)


def by_weight(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots sorted by weight, descending, for rules whose ranks are not in the order of the weights."""
    order = top(weights, weights.shape[-1])
    return experts.gather(-1, order), weights.gather(-1, order)


class GaussianNoise(nn.Module):
    """logits + z * std with z standard normal (Shazeer et al. 2017).

    `std=None` learns a standard deviation for each token and expert, softplus(x W_noise^T).
    """

    def __init__(self, dim: int, experts: int, *, std: float | None = None) -> None:
        super().__init__()
        if std is not None and not std >= 0:
            raise ValueError(f"noise_std is {std}; a standard deviation must not be negative.")
        self.std = std
        self.weight = nn.Parameter(torch.zeros(experts, dim)) if std is None else None

    @property
    def flops(self) -> float:
        """FLOPs of the matrix product of one token."""
        return 0.0 if self.weight is None else 2.0 * self.weight.numel()

    def scale(self, tokens: Tensor) -> Tensor | float:
        if self.weight is not None:
            return F.softplus(linear_float32(tokens, self.weight))
        assert self.std is not None
        return self.std

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return logits + torch.randn_like(logits) * self.scale(tokens)


class GumbelNoise(nn.Module):
    """(logits + g) / temperature with Gumbel noise g: the top k are a sample without replacement from softmax(logits)."""

    def __init__(self, *, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it divides the logits and must be positive.")
        self.temperature = temperature

    @property
    def flops(self) -> float:
        """FLOPs of matrix products: none."""
        return 0.0

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        exponential = torch.empty_like(logits).exponential_().clamp_min(TINY)
        return (logits - exponential.log()) / self.temperature


def check_k(k: int, experts: int, name: str = "k") -> None:
    """Raise ValueError if `k` is not between 1 and the number of experts."""
    if not 1 <= k <= experts:
        raise ValueError(f"{name} is {k}; it must be between 1 and the number of experts, {experts}.")
