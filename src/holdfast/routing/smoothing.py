"""Smooth top-k: experts just below the k-th get a small weight, so that the output is continuous in the input.

    c the k-th largest logit, eps the width of the strip below it, u_i = (logit_i - c + eps) / eps
    S(u) = -inf for u <= 0, 0 for u >= 1, else log( u^a / (u^a + (1-u)^b) );   weights = softmax(logit_i + S(u_i))

Section 6 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts".
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import unknown_name
from holdfast.kernels.backward import snapshot_for_backward
from holdfast.kernels.select import POWERS, Powers, select_smooth_top_k, smooth_strip
from holdfast.kernels.statistics import DIGITS, midpoint, update_running_mean
from holdfast.routing.declarations import INTEGER, ActiveExperts, Conditions, Cost, LayerSizes, selection_bytes
from holdfast.routing.parts import Selector, normalise
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores, Selection
from holdfast.routing.selection import Rule, Softmax, by_weight, check_k
from holdfast.routing.state import StatefulPart, flag, sum_over_ranks

MEMORY = 0.95  # weight of the old value in the running mean of the width
ETA_START = -9.0  # eta at the start of training, with eps = softplus(eta)


class SmoothTopK(Selector, StatefulPart):
    """Select the k best experts and those in the strip below the k-th, whose weights fall to 0 at the strip's lower edge.

    budget      the mean number of experts that a token may use besides its k best
    control     how the width eps is set. "quantile": eps is the running quantile of the gaps c - logit_j at which the mean
                number of extra experts is the budget. "loss", as in the paper: eps = softplus(eta) is a parameter, and a
                boundary loss alpha eps (active - k - budget) steers it; from eta = -9 that takes tens of thousands of steps
    anneal      keep the budget for half of the training, lower it to 0 over a quarter, and use hard top-k in evaluation
    most        the largest number of experts of a token; None: all experts. A token that would have more gets a narrower
                strip, which ends at the level of the first expert without a slot, so that the output stays continuous.
                On a GPU, memory is allocated for `most` slots per token, without synchronising with the host
    eps         the width before the first update, for a model that is not trained further; None: `rule.strip`
    eta         control="loss": eta at the start of training, eps = softplus(eta). It takes precedence over `eps`; None: -9,
                or the eta of a positive `eps`
    a, b        the exponents of S, positive: a factor grows from 0 as u^a at the lower edge of the strip, and reaches 1 as
                1 - (1-u)^b at its upper edge. The output is continuous for all of them; in float32 the smallest step of a
                factor is 2^(-24 a) at the lower and 2^(-24 b) at the upper edge, so values far below 1 are steps in practice
    inference   "smooth" or "hard"
    rule        the rule of the model that the router is built for; None: a softmax over the slots in use, as in the paper
    """

    pretrained_defaults: ClassVar[Mapping[str, Any]] = {"eps": None}  # a strip from the start: training is not needed
    not_limited = "dropping an expert makes the output discontinuous"
    width: Tensor  # running mean of the width eps
    seen: Tensor  # whether a batch has set the width
    budget_now: Tensor  # the budget, lowered by `anneal`
    rule: Rule

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        budget: float = 0.5,
        control: Literal["quantile", "loss"] = "quantile",
        alpha: float = 1.0,
        anneal: bool = False,
        most: int | None = None,
        eps: float | None = 0.0,
        eta: float | None = None,
        a: float = POWERS.a,
        b: float = POWERS.b,
        inference: Literal["smooth", "hard"] = "smooth",
        rule: Rule | None = None,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        if control not in ("quantile", "loss"):
            raise ValueError(unknown_name("control", control, ("quantile", "loss")))
        if inference not in ("smooth", "hard"):
            raise ValueError(unknown_name("inference", inference, ("smooth", "hard")))
        if most is not None and not k <= most <= experts:
            raise ValueError(f"most is {most}; it must be between k, {k}, and the number of experts, {experts}.")
        if not budget >= 0:
            raise ValueError(f"budget is {budget}; a number of extra experts must not be negative.")
        self.rule = Softmax(renormalise=True) if rule is None else rule
        eps = self.rule.strip if eps is None else eps
        if not eps >= 0:
            raise ValueError(f"eps is {eps}; the width of the strip must not be negative.")
        if not alpha > 0:
            raise ValueError(f"alpha is {alpha}; the weight of the boundary loss must be positive.")
        for name, power in (("a", a), ("b", b)):
            if not 0 < power < math.inf:
                raise ValueError(f"{name} is {power}; an exponent of the strip must be positive and finite.")
        if eta is not None and (control != "loss" or not math.isfinite(eta)):
            expected = "a finite number" if control == "loss" else "control='loss': only the boundary loss learns eta"
            raise ValueError(f"eta is {eta}; expected {expected}.")
        self.experts, self.k, self.budget, self.control = experts, k, budget, control
        self.powers = Powers(float(a), float(b))
        self.slots = experts if most is None else most
        self.alpha, self.anneal, self.inference = alpha, anneal, "hard" if anneal else inference
        self.coefficients = ("alpha",) if control == "loss" else ()
        self.register_buffer("budget_now", torch.tensor(float(budget)))
        self.register_buffer("width", torch.tensor(float(eps)))
        self.register_buffer("seen", flag())
        self.register_statistics(width=torch.zeros(()), tokens=torch.zeros(()))
        start = ETA_START if eps == 0 else eps + math.log(-math.expm1(-eps))  # the inverse of softplus
        start = start if eta is None else eta
        self.eta = nn.Parameter(torch.tensor([start])) if control == "loss" else None

    @property
    def core(self) -> int:
        """The size of the hard core: experts in the strip enter and leave with weight 0, which does not count as a flip."""
        return self.k

    def conditions(self, scores: Scores) -> Conditions | None:
        return self.rule.conditions(scores, self.k)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return the live weights of the held experts: an expert that is no longer selected has faded to 0.

        If the rule renormalises, they are rescaled to the sum of the live weights; if all are 0, the sum is divided equally.
        Without a strip they are the held weights of top-k.
        """
        return self._held_in_strip(experts, live).where(self.eps() > 0, self.rule.held_weights(experts, scores, live))

    def _held_in_strip(self, experts: Tensor, live: Selection) -> Tensor:
        remaining = live.weights_of(experts)
        if not self.rule.renormalise:
            return remaining
        total = live.weights.sum(-1, keepdim=True)
        equal = normalise((experts < self.experts).to(remaining.dtype))
        rescaled = total * normalise(remaining).where(remaining.sum(-1, keepdim=True) > 0, equal)
        return live.weights_if_same_set(experts, rescaled, scaled=True)

    def cost(self, sizes: LayerSizes) -> Cost:
        """Return the cost. `control="quantile"` sums two histograms and two counts over ranks; "loss" sums only the counts.

        The size of the histograms is that on a CPU; on a GPU they are smaller (16 KiB).
        """
        counts, kept = 2 * INTEGER, selection_bytes(sizes.experts, sizes)
        if self.control == "loss":
            return Cost("selection", kept=kept, summed=counts, summed_again=counts)
        return Cost("selection", kept=kept, summed=2 * sum(2**bits for _, bits in DIGITS) * INTEGER + counts)

    def active_experts(self, sizes: LayerSizes) -> ActiveExperts:
        training = min(self.k + self.budget, self.slots)
        inference = self.k if self.inference == "hard" else training
        return ActiveExperts(training, inference, self.slots, "k and the budget, on average")

    def snapshot(self) -> dict[str, Tensor]:
        return {"width": self.eps().detach()}

    def progress(self, fraction: float) -> None:
        if self.anneal:
            self.budget_now.fill_(self.budget * min(1.0, max(0.0, 3 - 4 * fraction)))

    def update_state_where(self, due: Tensor) -> None:
        batch = self.get_buffer("staged_width"), self.get_buffer("staged_tokens")
        # The first batch with a width above 0 sets it: while an expert graph is zero, all experts tie and all gaps are 0.
        update_running_mean(self.width, self.seen, *batch, due, memory=MEMORY, is_sum=False)

    def eps(self) -> Tensor:
        """Return the width of the strip in this forward; 0 is hard top-k."""
        if self.inference == "hard" and not self.training:
            return torch.zeros_like(self.width)
        eps = (
            snapshot_for_backward(self.width, self.training) if self.eta is None else F.softplus(self.eta.float()).squeeze(0)
        )
        return eps.where(self.budget_now > 0, 0.0)

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        amounts = self.rule.amounts(scores)
        if amounts is None or self.eta is not None:
            return self._forward_reference(scores, tokens, context)
        experts, weights, gaps = select_smooth_top_k(
            scores.key, amounts, self.k, self.eps(), most=self.slots, informed=scores.informed, powers=self.powers
        )
        if self.training:
            self.stage_in_background(lambda: self._width_from_batch(gaps, context.checked_mask(tokens)))
        return Selection(experts, weights, scores.gates, {})

    def _forward_reference(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        """Select step by step, without the kernel: for rules with their own ranks or weights, and for a learned width."""
        eps = self.eps()
        strip = smooth_strip(self.rule.ranks(scores), self.rule.levels(scores), self.k, eps, self.slots, self.powers)
        experts, in_use = strip.experts, strip.in_use
        weights = self.rule.weigh(scores, experts, in_use, strip.fade, self.k)
        if scores.informed:
            in_use = strip.core | (in_use & (scores.gates.gather(-1, experts) > 0))
        losses = {}
        if self.training and self.eta is None:
            self.stage_in_background(lambda: self._width_from_batch(strip.gaps, context.checked_mask(tokens)))
        elif self.training and self.learning:
            losses = {"boundary": self._boundary_loss(in_use, eps, context.real_tokens(tokens))}
        experts = experts.where(in_use, self.experts)
        if not self.rule.ordered:
            experts, weights = by_weight(experts, weights)
        return Selection(experts, weights, scores.gates, losses)

    def _boundary_loss(self, in_use: Tensor, eps: Tensor, real: Tensor) -> Tensor:
        """Return the boundary loss of the paper: alpha eps (active - k - budget), with a gradient to eps only."""
        active, count = sum_over_ranks(torch.stack([in_use.sum(-1).where(real, 0).sum(), real.sum()]))
        active = active / count.clamp_min(1)
        return self.alpha * eps * (active - (self.k + self.budget_now)).detach()

    def _width_from_batch(self, gaps: Tensor, real: Tensor | None) -> dict[str, Tensor]:
        """Return the statistics of a batch: the width at which it would meet the budget, and the number of tokens."""
        tokens_here = torch.full((), gaps[..., 0].numel(), device=gaps.device) if real is None else real.sum()
        tokens = sum_over_ranks(tokens_here)
        allowed = (self.budget_now * tokens).round().long()  # extra experts that the whole batch may use
        return {"width": midpoint(gaps, real, allowed, sum_over_ranks), "tokens": tokens}
