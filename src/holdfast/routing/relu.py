"""ReLU routing (ReMoE, Wang et al. 2025): experts with a positive logit, and an L1 penalty that steers their number to k.

    g_te = relu(logit_te)                                   the weight of expert e; it is selected if g_te > 0
    penalty = l1 * 1/T sum_te f_e g_te                      f_e = 1, or the load E / (k T) * (number of tokens of expert e)
    l1 <- l1 * l1_rate^sign(mean number of experts - k)     after each batch

In the paper training has three stages: dense while l1 is small, then sparsifying, then sparse. A small start value of `l1`
gives them; `warmup` sets the length of the first one.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from holdfast.errors import unknown_name
from holdfast.kernels.operators import snapshot_for_backward, wait_for_side_stream
from holdfast.kernels.select import top
from holdfast.routing.conditions import keep_above
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
from holdfast.routing.parts import Noise, Part, Selector
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores, Selection
from holdfast.routing.selection import check_k
from holdfast.routing.state import StatefulPart, is_set, mean_over_ranks


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
        if penalty not in ("uniform", "load"):
            raise ValueError(unknown_name("penalty", penalty, ("uniform", "load")))
        if coefficient not in ("layer", "model"):
            raise ValueError(unknown_name("coefficient", coefficient, ("layer", "model")))
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

    @property
    def gate(self) -> GateFunction:
        return RELU

    def join_model(self, parts: Sequence[Part]) -> None:
        shared = [part for part in parts if isinstance(part, ReLU) and part.coefficient == "model" and part is not self]
        self._others = shared if self.coefficient == "model" else []

    def progress(self, fraction: float) -> None:
        if self.warmup > 0:
            self.enforced.fill_(float(fraction >= self.warmup))

    def new_state(self) -> dict[str, Tensor]:
        """Return the new coefficient, from the numbers of experts in this layer or in all that share the coefficient."""
        direction = (self._excess() if self.coefficient == "layer" else self._mean_excess()).sign()
        direction = direction * self.enforced if self.warmup > 0 else direction
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

    def _excess(self) -> Tensor:
        """Return by how much the last batch exceeded k experts per token, summed over its tokens."""
        return self.get_buffer("staged_active") - self.k * self.get_buffer("staged_tokens")

    def _mean_excess(self) -> Tensor:
        """Return the sum over layers of (experts per token - k) / E. Layers that ran no forward since do not count."""
        total = torch.zeros_like(self.l1)
        for layer in (self, *self._others):
            share = layer._excess() / (layer.get_buffer("staged_tokens").clamp_min(1) * layer.experts)
            total = total + share.where(is_set(layer.pending), 0.0).to(total.device)
        return total

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        experts = top(scores.key, self.experts)
        weights = scores.gates.gather(-1, experts)
        losses = {}
        if self.training and self.learning:
            real = context.real_tokens(tokens)
            self.stage_in_background(lambda: self._counts(scores.gates, weights, real))
            wait_for_side_stream(tokens)
            losses["l1"] = self._penalty(scores.gates, real)
        return Selection(experts.where(weights > 0, self.experts), weights, scores.gates, losses)

    def _penalty(self, gates: Tensor, real: Tensor) -> Tensor:
        # A recomputation stages nothing, and reads the counts of the first forward.
        count = snapshot_for_backward(self.get_buffer("staged_tokens"))
        count = count.where(count > 0, 1.0)
        if self.penalty == "load":
            loads = snapshot_for_backward(self.get_buffer("staged_loads")) * (self.experts / self.k) / count
            gates = gates * loads
        total = gates.sum(-1).where(real, 0.0).sum()
        coefficient = snapshot_for_backward(self.l1)
        if self.warmup > 0:
            coefficient = coefficient * snapshot_for_backward(self.enforced)
        # Divided by the mean number of tokens over ranks: the mean over ranks is then the loss of the whole batch.
        return coefficient * total / count

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
        in_use = experts < self.experts
        return live.weights_if_same_set(experts, scores.gates.gather(-1, experts.where(in_use, 0)).where(in_use, 0.0))

    def cost(self, sizes: LayerSizes) -> Cost:
        numbers = 2 if self.penalty == "uniform" else self.experts + 1
        return Cost("selection", kept=selection_bytes(sizes.experts, sizes), summed=numbers * FLOAT)

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts:
        return ActiveExperts(self.k, self.k, sizes.experts, "steered to k; more at the start")

    def snapshot(self) -> dict[str, Tensor]:
        return {"l1": self.l1}

    def conditions(self, scores: Scores) -> Conditions:
        return keep_above(scores.key, 0.0, scores.compares)
