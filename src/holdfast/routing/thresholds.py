"""Selectors in which the scores of a token decide how many experts it uses: every expert above a threshold.

    TopP        every expert whose gate exceeds p, and always the best
    ReLU        experts with a positive logit, and an L1 penalty that steers their number to k (ReMoE, Wang et al. 2025)
    Sparsemax   every expert in the support of sparsemax (Martins and Astudillo 2016)

**ReLU routing.**

    g_te = relu(logit_te)                                   the weight of expert e; it is selected if g_te > 0
    penalty = l1 * 1/T sum_te f_e g_te                      f_e = 1, or the load E / (k T) * (number of tokens of expert e)
    l1 <- l1 * l1_rate^sign(mean number of experts - k)     after each batch

In the paper training has three stages: dense while l1 is small, then sparsifying, then sparse. A small start value of `l1`
gives them; `warmup` sets the length of the first one.

**Sparsemax**, the Euclidean projection of the logits onto the simplex, is sparse.

    sparsemax(z) = argmin_p |p - z|^2  over p >= 0, sum p = 1
                 = max(z - tau, 0),    tau = (sum of z over the support - 1) / (size of the support)

The support is {i : 1 + i z_(i) > z_(1) + ... + z_(i)} for the sorted logits z_(1) >= z_(2) >= ... Within a support S the
Jacobian is I - 11^T / |S|, and 0 elsewhere.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.errors import require_known
from holdfast.kernels.operators import snapshot_for_backward, wait_for_side_stream
from holdfast.kernels.select import top
from holdfast.routing.declarations import (
    FLOAT,
    RELU,
    ActiveExperts,
    Conditions,
    Cost,
    GateFunction,
    NoCertificate,
    Shares,
    keep_above,
    selection_bytes,
)
from holdfast.routing.parts import Noise, Part, Selector, SelectorDeclarations, normalise
from holdfast.routing.records import Context
from holdfast.routing.rules import Rule, Scores, Selection, faded_gates, gather_slots
from holdfast.routing.selection import check_k
from holdfast.routing.state import StatefulPart, is_set, mean_over_ranks

NO_CONDITIONS = (
    "no certificate is known for sparsemax: its threshold is the sum of the selected logits minus 1, and conditions compare "
    "logits without such a constant"
)


class TopP(Selector):
    """Select every expert whose gate exceeds p, and always the best; weights are renormalised (ACMoE appendix C.10).

    p           the threshold, between 0 and 1
    learned     True: p is a parameter that starts at `p`. The forward uses the hard threshold, and the gradient is that of a
                soft mask, sigmoid((gate - p) / softness)
    softness    the width of that mask
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
        return Selection(experts.where(in_use, self.experts), weights.where(in_use, 0.0), scores.gates)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return live.weights_if_same_set(experts, normalise(gather_slots(scores.gates, experts)))

    @property
    def declares(self) -> SelectorDeclarations:
        # Fewer than 1 / p gates can exceed p if they sum to at most 1.
        most = min(self.experts, max(1, math.ceil(1 / self.fixed_p) - 1))
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.experts, sizes)),
            active=lambda sizes: ActiveExperts(most, most, self.experts, "depends on the data; an upper bound"),
            conditions=lambda scores: keep_above(scores.gates, float(self.threshold()), "gates", at_least_one=True),
            shares=lambda: Shares(None),
        )


class ReLU(Selector, StatefulPart):
    """Select experts with a positive logit, weights = relu(logits) (ReMoE).

    l1            the coefficient of the penalty at the start
    l1_rate       after each batch l1 is multiplied by it if more than k experts were selected on average, and divided by it
                  if fewer were
    penalty       "uniform": the mean L1 norm of the gates. "load", the paper's refined loss: each expert's gates are
                  multiplied by its load f_e, which is 1 at a balanced load of k: experts with many tokens pay more
    coefficient   "layer": each layer steers its own number of experts. "model", as in the paper: all layers have one l1,
                  steered by the mean over layers; `holdfast.routing.join_routers` connects the routers of a model, and
                  `reroute` and `sparsify` call it
    warmup        the share of training in which the penalty is off and l1 stays: dense training, as far as gates are
                  positive. Needs `progress(fraction)`, which Holdfast's trainer callback sets
    """

    coefficients = ("l1",)
    gate = RELU
    l1: Tensor
    enforced: Tensor  # 0 during the warm-up, then 1

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        l1: float = 1e-8,
        l1_rate: float = 1.2,
        penalty: Literal["uniform", "load"] = "uniform",
        coefficient: Literal["layer", "model"] = "layer",
        warmup: float = 0.0,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        if not l1 >= 0:
            raise ValueError(f"l1 is {l1}; the penalty must not be negative.")
        if not l1_rate >= 1:
            raise ValueError(f"l1_rate is {l1_rate}; it must be at least 1 (1 keeps the coefficient constant).")
        require_known("penalty", penalty, ("uniform", "load"))
        require_known("coefficient", coefficient, ("layer", "model"))
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup is {warmup}; a share of training without the penalty must be at least 0 and below 1.")
        self.experts, self.k, self.l1_rate = experts, k, l1_rate
        self.penalty, self.coefficient, self.warmup = penalty, coefficient, warmup
        self.register_buffer("l1", torch.tensor(l1, dtype=torch.float32))
        self.register_statistics(active=torch.zeros(()), tokens=torch.zeros(()))
        if penalty == "load":
            self.register_statistics(loads=torch.zeros(experts))
        if warmup > 0:
            # A tensor is saved with the model, and a change of its value needs neither recompilation nor synchronisation.
            self.register_buffer("enforced", torch.zeros(()))
        self._others: list[ReLU] = []  # those with the same coefficient; a list, so that they are not submodules

    def join_model(self, parts: Sequence[Part]) -> None:
        shared = [part for part in parts if isinstance(part, ReLU) and part.coefficient == "model" and part is not self]
        self._others = shared if self.coefficient == "model" else []

    def progress(self, fraction: float) -> None:
        if self.warmup > 0:
            self.enforced.fill_(float(fraction >= self.warmup))

    def new_state(self) -> dict[str, Tensor]:
        """Return the new coefficient, from the numbers of experts in this layer or in all that share the coefficient."""
        total = torch.zeros_like(self.l1)  # the sum over layers of (experts per token - k) / E
        for layer in (self, *self._others):
            tokens = layer.get_buffer("staged_tokens")
            share = (layer.get_buffer("staged_active") - layer.k * tokens) / (tokens.clamp_min(1) * layer.experts)
            # Layers that ran no forward since the last update do not count.
            total = total + share.where(is_set(layer.pending), 0.0).to(total.device)
        direction = total.sign() * self.enforced if self.warmup > 0 else total.sign()
        return {"l1": self.l1 * self.l1_rate**direction}

    def update_state_where(self, due: Tensor) -> None:
        """Update the coefficient, and give it to all layers that share it.

        The first layer whose forward begins commits the batch of all layers; the others then have nothing to commit.
        """
        super().update_state_where(due)
        for other in self._others:
            here = due.to(other.l1.device)
            other.l1.copy_(torch.where(here, self.l1.to(other.l1.device), other.l1))
            other.pending.copy_(is_set(other.pending) & ~here)

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        experts = top(scores.key, self.experts)
        weights = scores.gates.gather(-1, experts)
        losses = {}
        if self.training and self.learning:
            real = context.real_tokens(tokens)
            self.stage_in_background(lambda: self._counts(scores.gates, weights, real))
            wait_for_side_stream(tokens)
            # A recomputation stages nothing, and reads the counts of the first forward.
            count = snapshot_for_backward(self.get_buffer("staged_tokens"))
            count = count.where(count > 0, 1.0)
            gates, coefficient = scores.gates, snapshot_for_backward(self.l1)
            if self.penalty == "load":
                gates = gates * (snapshot_for_backward(self.get_buffer("staged_loads")) * (self.experts / self.k) / count)
            if self.warmup > 0:
                coefficient = coefficient * snapshot_for_backward(self.enforced)
            # Divided by the mean number of tokens over ranks: the mean over ranks is then the loss of the whole batch.
            losses["l1"] = coefficient * gates.sum(-1).where(real, 0.0).sum() / count
        return Selection(experts.where(weights > 0, self.experts), weights, scores.gates, losses)

    def _counts(self, gates: Tensor, weights: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Return the number of selected experts and of tokens in the batch, as means over ranks; for "load", by expert."""
        if self.penalty == "load":
            loads = ((gates > 0) & real.unsqueeze(-1)).flatten(0, 1).sum(0)
            means = mean_over_ranks(torch.cat([loads, real.sum().unsqueeze(0)]).float())
            return {"active": means[:-1].sum(), "tokens": means[-1], "loads": means[:-1]}
        active = ((weights > 0) & real.unsqueeze(-1)).sum()
        active, count = mean_over_ranks(torch.stack([active, real.sum()]).float())
        return {"active": active, "tokens": count}

    def with_noise(self, noise: Noise, scores: Scores, tokens: Tensor) -> Scores:
        """Return the scores with noise. An informed gate of 0 stays 0: else the expert would be selected."""
        noisy = super().with_noise(noise, scores, tokens)
        return Scores.from_gates(noisy.gates.where(scores.gates > 0, 0.0), noisy.raw) if scores.informed else noisy

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return the gates themselves: an expert that is no longer selected has gate 0."""
        return live.weights_if_same_set(experts, gather_slots(scores.gates, experts))

    @property
    def declares(self) -> SelectorDeclarations:
        numbers = 2 if self.penalty == "uniform" else self.experts + 1
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.experts, sizes), summed=numbers * FLOAT),
            active=lambda sizes: ActiveExperts(self.k, self.k, self.experts, "steered to k; more at the start"),
            conditions=lambda scores: keep_above(scores.key, 0.0, scores.compares),
            shares=lambda: Shares(self.experts, "nothing"),  # those that are not selected have the weight 0
            snapshot=lambda: {"l1": self.l1},
            refuses_dropout="has no next best expert for a token whose experts are all dropped",
        )


def sparsemax(logits: Tensor) -> Tensor:
    """Return the projection of each row of `logits (..., E)` onto the simplex, exact up to float32 rounding."""
    # Subtracting the largest logit changes nothing, and a logit more than 1 below it is never in the support. So all numbers
    # are between -1 and 0, and sums of them lose no precision, however large the logits are.
    shifted = (logits - logits.detach().amax(-1, keepdim=True)).clamp_min(-1.0)
    ordered = shifted.detach().sort(dim=-1, descending=True).values
    place = torch.arange(1, shifted.shape[-1] + 1, device=shifted.device)
    above = ordered.cumsum(-1) - place * ordered  # the sum of z_(j) - z_(i) over j < i
    size = ((above < 1) | (place == 1)).sum(-1, keepdim=True)
    support = shifted.detach() >= ordered.gather(-1, size - 1)  # at least the best expert
    size = support.sum(-1, keepdim=True)
    threshold = (shifted.where(support, 0.0).sum(-1, keepdim=True) - 1) / size
    return (shifted - threshold).clamp_min(0.0).where(support, 0.0)


SPARSEMAX = GateFunction("sparsemax", sparsemax, shares=True)


class SparsemaxRule(Rule):
    """Gates are the sparsemax of the logits; weights are the gates of the k best experts, divided by their sum.

    Use it as `TopK(..., rule=SparsemaxRule())`: then a token uses at most k experts, and the other slots have weight 0.
    """

    gate = SPARSEMAX

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return normalise(faded_gates(scores, experts, in_use, fade))

    def conditions(self, scores: Scores, k: int) -> Conditions | None:
        return _no_conditions(scores)


class Sparsemax(Selector):
    """Select every expert in the support of sparsemax, with its sparsemax gate as weight; weights sum to 1.

    The number of experts depends on the token: 1 if a logit exceeds all others by 1, E if all are equal. Informers read the
    sparsemax gates p. After them the selector reads safe logarithms, weights = sparsemax(log g), and an expert with a gate
    of 0 is never selected.
    """

    gate = SPARSEMAX

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        weights = self._weights(scores)
        experts = top(scores.key, self.experts)
        weights = weights.gather(-1, experts)
        return Selection(experts.where(weights > 0, self.experts), weights, scores.gates)

    def _weights(self, scores: Scores) -> Tensor:
        """Return (B,N,E): the weight of each expert."""
        if not scores.informed:
            return scores.gates
        return sparsemax(scores.logits).where(scores.gates > 0, 0.0)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return the sparsemax of the logits of the held set alone."""
        in_use = experts < self.experts
        logits = scores.logits.gather(-1, experts.where(in_use, 0))
        lowest = logits.detach().amin(-1, keepdim=True) - 2
        weights = sparsemax(logits.where(in_use, lowest)).where(in_use, 0.0)
        if scores.informed:
            weights = weights.where(gather_slots(scores.gates, experts) > 0, 0.0)
        return live.weights_if_same_set(experts, weights)

    @property
    def declares(self) -> SelectorDeclarations:
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.experts, sizes)),
            active=lambda sizes: ActiveExperts(
                self.experts, self.experts, self.experts, "depends on the data; an upper bound"
            ),
            conditions=_no_conditions,
        )


def _no_conditions(scores: Scores) -> Conditions | None:
    raise NoCertificate(NO_CONDITIONS)
