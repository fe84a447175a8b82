"""Smooth top-k: experts just below the k-th get a small weight, so that the output is continuous in the input.

    c the k-th largest logit, eps the width of the strip below it, u_i = (logit_i - c + eps) / eps
    S(u) = -inf for u <= 0, 0 for u >= 1, else log( u^a / (u^a + (1-u)^b) );   weights = softmax(logit_i + S(u_i))

Section 6 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts".

**Rows in training.** T tokens need k T rows for their k best experts, and rows for the experts in their strips. On a GPU the
host would have to wait to read the number of these, and rows for all experts take much memory. So in training there are rows
for X = ceil(2 budget T) experts in strips, twice the budget, and the strip ends where they end:

    eps = min(running width, g_X),   g_0 <= g_1 <= ... the gaps c - logit_j of all tokens and experts outside the k best

An expert is in use if its gap is below eps, so at most X are, also where gaps are equal. g_X is a continuous function of the
logits, and so are the weights, except in a batch with more than X gaps of 0. It is smaller than the running width only on
overflow: if more than X experts lie in strips. `overflow` is the share of them without a row; it is 0 while a batch needs at
most twice the budget. Batches of a few tokens need more now and then.

This is an exception to the rule that a forward uses the state from before its batch (`holdfast.routing.state`), in training
and on overflow only: there, the other tokens of the batch change the width of a token's strip. The width is the same on all
devices, and in a recomputation, because it depends only on the state and the batch. Real tokens and padding have separate
statistics and separate rows, so padding never changes a real token. Each rank has its own rows and its own g_X, without
communication: on overflow, ranks have strips of different widths, while the running width is that of one process with the
whole batch. In evaluation, and in training with `rows="all"`, all experts in the strip are in use.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.checked import as_ratio
from holdfast.errors import require_known
from holdfast.kernels.operators import snapshot_for_backward
from holdfast.kernels.select import POWERS, Limit, Powers, select_smooth_top_k, smooth_strip
from holdfast.kernels.statistics import DIGITS, midpoint, order_statistic, update_running_mean
from holdfast.routing.declarations import (
    INTEGER,
    ActiveExperts,
    Cost,
    LayerSizes,
    NoCertificate,
    Shares,
    selection_bytes,
)
from holdfast.routing.parts import Selector, SelectorDeclarations, normalise
from holdfast.routing.records import Context
from holdfast.routing.rules import Rule, Scores, Selection, Softmax
from holdfast.routing.selection import by_weight, check_k
from holdfast.routing.state import StatefulPart, flag, sum_over_ranks

MEMORY = 0.95  # weight of the old value in the running mean of the width
SPARE = 2  # in training, how many times the budget of extra experts have rows
INTERVALS = 2**17  # on which the slope of the factors in the strip is bounded
ETA_START = -9.0  # eta at the start of training, with eps = softplus(eta)


class SmoothTopK(Selector, StatefulPart):
    """Select the k best experts and those in the strip below the k-th, whose weights fall to 0 at the strip's lower edge.

    Without training, the width eps of the strip is fixed: 0.1 in logits, so that with softmax gates an expert is in the
    strip if its gate is less than about 10% below the k-th; 0.02 in gates where sigmoid gates plus a bias rank experts
    (deepseek_v3). The option `eps` sets another width. How many experts a token then runs depends on the model, not on the
    budget (only a budget of 0 has an effect: plain top-k). In training, and in `holdfast.calibrate`, the width follows from
    the budget, and the fixed width is only the start. A model with random weights starts with width 0, plain top-k.

    In training there is memory for k + 2 x budget experts per token, on average over a batch. If the strips of a batch have
    more, they end earlier, without a jump; `router.select.overflow` is the share of experts that this leaves out, usually 0.
    The paper has no such limit: its rule is `smooth[control=loss, rows=all]`.

    budget      the mean number of experts of a token besides its k best, in training and calibration; without either, the
                width eps is fixed
    control     how the width eps is set. "quantile": eps is the running quantile of the gaps c - logit_j at which the mean
                number of extra experts is the budget. "loss", as in the paper: eps = softplus(eta) is a parameter, and a
                boundary loss alpha eps (active - k - budget) steers it; from eta = -9 that takes tens of thousands of steps
    alpha       the coefficient of that loss
    anneal      keep the budget for half of the training, lower it to 0 over a quarter, and use hard top-k in evaluation
    most        the largest number of experts of a token; None: all experts. A token that would have more gets a narrower
                strip, which ends at the level of the first expert without a slot, so that the output stays continuous.
                On a GPU, memory is allocated for `most` slots per token in evaluation, and for k + 2 x budget in training,
                if that is less
    rows        the rows of experts in training. "budget": for k + 2 x budget experts per token, on average over a batch;
                "all": for `most` experts per token, so that every expert in the strip runs, whatever the batch is, as in
                the paper. `holdfast plan` says how much memory that takes
    eps         the width of the strip before the first training or calibration batch. The default is 0 with random weights.
                With trained weights (`reroute`, or `sparsify` with copies) it is None: 0.1 in logits, 0.02 in sigmoid gates
    eta         control="loss": eta at the start of training, eps = softplus(eta). It takes precedence over `eps`; None: -9,
                or the eta of a positive `eps`
    a           the exponent of S at the lower edge of the strip, positive: a factor grows from 0 as u^a. The output is
                continuous for every value; in float32 the smallest step of a factor is 2^(-24 a), so values far below 1
                are steps in practice
    b           the same at the upper edge, where a factor reaches 1 as 1 - (1-u)^b; the smallest step is 2^(-24 b)
    inference   what evaluation uses: "smooth", or "hard": top-k
    rule        the rule of the model that the router is built for; None: a softmax over the slots in use, as in the paper
    """

    pretrained_defaults: ClassVar[Mapping[str, Any]] = {"eps": None}  # a strip from the start: training is not needed
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
        rows: Literal["budget", "all"] = "budget",
        eps: float | None = 0.0,
        eta: float | None = None,
        a: float = POWERS.a,
        b: float = POWERS.b,
        inference: Literal["smooth", "hard"] = "smooth",
        rule: Rule | None = None,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        require_known("control", control, ("quantile", "loss"))
        require_known("inference", inference, ("smooth", "hard"))
        require_known("number of rows", rows, ("budget", "all"))
        if most is not None and not k <= most <= experts:
            raise ValueError(f"most is {most}; it must be between k, {k}, and the number of experts, {experts}.")
        if not budget >= 0:
            raise ValueError(f"budget is {budget}; a number of extra experts must not be negative.")
        self.rule = Softmax(renormalise=True) if rule is None else rule
        self.gate = self.rule.gate
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
        self.register_buffer("staged_overflow", torch.zeros(()), persistent=False)  # for users; no state depends on it
        # (numerator, denominator) of the rows for experts in the strip, per token; None: there is a row for every slot
        self.spare = as_ratio(SPARE * budget) if rows == "budget" and SPARE * budget < self.slots - k else None
        start = ETA_START if eps == 0 else eps + math.log(-math.expm1(-eps))  # the inverse of softplus
        start = start if eta is None else eta
        self.eta = nn.Parameter(torch.tensor([start])) if control == "loss" else None

    @property
    def declares(self) -> SelectorDeclarations:
        training = min(self.k + self.budget, self.slots)
        inference = self.k if self.inference == "hard" else training
        rows = self.slots if self.spare is None else self.k + self.spare[0] / self.spare[1]
        active = ActiveExperts(training, inference, self.slots, "k and the budget, on average", rows)
        return SelectorDeclarations(
            cost=self._cost,
            active=lambda sizes: active,
            conditions=lambda scores: self.rule.conditions(scores, self.k),
            shares=self._shares,
            core=self.k,  # experts in the strip enter and leave with weight 0, which does not count as a flip
            levels=self.rule.levels,
            overflow=self.overflow,
            snapshot=lambda: {"width": self.eps().detach(), "overflow": self.overflow.clone()},
            rule=self.rule.name,
            weights_option=self.rule.weights_option,
            not_limited="dropping an expert makes the output discontinuous",
        )

    def _shares(self) -> Shares | None:
        of_rule, width, unknown = self.rule.shares(self.k), float(self.eps()), "no bound of the output is known for"
        if of_rule is None or width == 0:
            return of_rule
        if self.slots < self.experts:
            raise NoCertificate(f"{unknown} smooth[most={self.slots}]: the width of a strip depends on the next expert")
        if of_rule.best is None:
            raise NoCertificate(f"{unknown} SmoothTopK under the rule {self.rule.name}: its strip is not one of logits")
        factor = partial(strip_factor, width=width, powers=self.powers)
        return replace(of_rule, width=width, factor=factor, slope=steepest(self.powers) / width)

    def ranks(self, scores: Scores) -> Tensor:
        return scores.rank_lost_last(self.rule.ranks(scores))

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return the live weights of the held experts: an expert that is no longer selected has faded to 0.

        If the rule renormalises, they are rescaled to the sum of the live weights; if all are 0, the sum is divided equally.
        Without a strip they are the held weights of top-k.
        """
        remaining = live.weights_of(experts)
        if self.rule.renormalise:
            total = live.weights.sum(-1, keepdim=True)
            equal = normalise((experts < self.experts).to(remaining.dtype))
            rescaled = total * normalise(remaining).where(remaining.sum(-1, keepdim=True) > 0, equal)
            remaining = live.weights_if_same_set(experts, rescaled, scaled=True)
        return remaining.where(self.eps() > 0, self.rule.held_weights(experts, scores, live))

    def replayed_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        """Return the weights that the rule gives the whole set: a recorded expert has not faded, whatever the live strip is.

        With a softmax rule this is the softmax of the live logits over the set, and every expert of it gets a gradient.
        """
        return self.rule.held_weights(experts, scores, live)

    def _cost(self, sizes: LayerSizes) -> Cost:
        """Return the cost. `control="quantile"` sums two histograms and two counts over ranks; "loss" sums only the counts.

        Both sum two counts more for `overflow`, if there are fewer rows than slots.
        The size of the histograms is that on a CPU; on a GPU they are smaller (16 KiB).
        """
        counts, kept = 2 * INTEGER, selection_bytes(sizes.experts, sizes)
        overflow = 0 if self.spare is None else 2 * INTEGER
        if self.control == "loss":
            return Cost("selection", kept=kept, summed=counts + overflow, summed_again=counts)
        histograms = 2 * sum(2**bits for _, bits in DIGITS) * INTEGER
        return Cost("selection", kept=kept, summed=histograms + counts + overflow)

    def most_rows(self, tokens: int) -> int | None:
        if self.spare is None or not self.sees_batch:
            return None
        return self.k * tokens + self._extra_rows(tokens)

    def _extra_rows(self, tokens: Any) -> Any:
        """Return the number of rows for experts in the strips of `tokens`, an integer or a tensor, rounded up."""
        assert self.spare is not None
        numerator, denominator = self.spare
        return -(-tokens * numerator // denominator)

    @property
    def overflow(self) -> Tensor:
        """The share of the experts in strips of the running width that had no row in the last training batch; usually 0."""
        return self.get_buffer("staged_overflow")

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
        eps, real = self.eps(), context.checked_mask(tokens) if self.training else None
        experts, weights, gaps = select_smooth_top_k(
            scores.key,
            amounts,
            self.k,
            eps,
            most=self.slots,
            informed=scores.informed,
            powers=self.powers,
            limit=self._limit(real),
        )
        if self.training:
            self.stage_in_background(lambda: self._statistics(self._gaps_of_all(scores, gaps), eps, real))
        return Selection(experts, weights, scores.gates)

    def _forward_reference(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        """Select step by step, without the kernel: for rules with their own ranks or weights, and for a learned width."""
        eps, real = self.eps(), context.checked_mask(tokens) if self.training else None
        ranks, levels = self.ranks(scores), self.rule.levels(scores)
        strip = smooth_strip(ranks, levels, self.k, eps, self.slots, self.powers, self._limit(real))
        experts, in_use = strip.experts, strip.in_use
        weights = self.rule.weigh(scores, experts, in_use, strip.fade, self.k)
        if scores.informed:
            in_use = strip.core | (in_use & (scores.gates.gather(-1, experts) > 0))
        losses = {}
        if self.training:
            self.stage_in_background(lambda: self._statistics(self._gaps_of_all(scores, strip.gaps), eps, real))
        if self.training and self.learning and self.eta is not None:
            # The boundary loss of the paper: alpha eps (active - k - budget), with a gradient to eps only.
            counted = context.real_tokens(tokens)
            active, count = sum_over_ranks(torch.stack([in_use.sum(-1).where(counted, 0).sum(), counted.sum()]))
            excess = active / count.clamp_min(1) - (self.k + self.budget_now)
            losses = {"boundary": self.alpha * eps * excess.detach()}
        experts = experts.where(in_use, self.experts)
        if not self.rule.ordered:
            experts, weights = by_weight(experts, weights)
        return Selection(experts, weights, scores.gates, losses)

    def _gaps_of_all(self, scores: Scores, gaps: Tensor) -> Tensor:
        """Return the gaps that the width is learned from: as if no expert was dropped, because evaluation drops none."""
        if scores.whole is None:
            return gaps
        ranks, levels = self.rule.ranks(scores.whole), self.rule.levels(scores.whole)
        return smooth_strip(ranks, levels, self.k, self.width, self.slots, self.powers).gaps

    def _limit(self, real: Tensor | None) -> Limit | None:
        """Return the function from gaps (B,N,E) and eps to the width for which there are rows; None: for all widths."""
        if self.spare is None or not self.sees_batch:
            return None

        def limit(gaps: Tensor, eps: Tensor) -> Tensor:
            if real is None:
                return _narrowed(eps, gaps, None, _scalar(self._extra_rows(gaps[..., 0].numel()), gaps))
            of_real = self._extra_rows(real.sum())
            of_padding = self._extra_rows(real.numel()) - of_real
            padded = _narrowed(eps, gaps, ~real, of_padding)
            return _narrowed(eps, gaps, real, of_real).where(real, padded)

        return limit

    def _statistics(self, gaps: Tensor, eps: Tensor, real: Tensor | None) -> dict[str, Tensor]:
        """Return the statistics of a batch: the width at which it would meet the budget, its tokens, and its overflow."""
        tokens = _scalar(gaps[..., 0].numel(), gaps) if real is None else real.sum()
        found = {}
        if self.spare is not None:
            in_strip = (gaps < eps) if real is None else (gaps < eps) & real.unsqueeze(-1)
            wanted = in_strip.sum()
            without_row = (wanted - self._extra_rows(tokens)).clamp_min(0)
            wanted, without_row = sum_over_ranks(torch.stack([wanted, without_row]))
            found["overflow"] = without_row / wanted.clamp_min(1)
        if self.eta is None:
            tokens = sum_over_ranks(tokens)
            allowed = (self.budget_now * tokens).round().long()  # extra experts that the whole batch may use
            found |= {"width": midpoint(gaps, real, allowed, sum_over_ranks), "tokens": tokens}
        return found


def strip_factor(gaps: Tensor, width: float, powers: Powers = POWERS) -> Tensor:
    """Return the factor exp(S(u)) of each gap c - logit in a strip of this width: 1 up to a gap of 0, 0 from `width` on."""
    u = (1 - gaps / width).clamp(0, 1)
    below, above = u**powers.a, (1 - u) ** powers.b
    return below / (below + above)


@lru_cache
def steepest(powers: Powers) -> float:
    """Return an upper bound of the slope of exp(S(u)), which is 17.76 for a = 1, b = 50; infinite if a < 1 or b < 1.

    With Q = u^a + (1-u)^b, the slope is (a u^(a-1) (1-u)^b + b u^a (1-u)^(b-1)) / Q^2. On a short interval every power is
    largest at one of its ends, and Q is at least the sum of the smallest ones. The bound is less than 0.1% too high for the
    default powers.
    """
    a, b = powers
    if min(a, b) < 1:
        return math.inf
    ends = torch.linspace(0, 1, INTERVALS + 1, dtype=torch.float64)
    low, high = ends[:-1], ends[1:]
    rising = a * high ** (a - 1) * (1 - low) ** b + b * high**a * (1 - low) ** (b - 1)
    return float((rising / (low**a + (1 - high) ** b).square()).max())


def _narrowed(eps: Tensor, gaps: Tensor, counted: Tensor | None, rows: Tensor) -> Tensor:
    """Return `eps`, or a smaller width: at most `rows` of the gaps (B,N,E) of `counted (B,N)` tokens are below it."""
    if gaps.device.type == "cpu" and not torch.compiler.is_compiling():
        in_strip = (gaps < eps) if counted is None else (gaps < eps) & counted.unsqueeze(-1)
        if int(in_strip.sum()) <= int(rows):  # usually so; reading a number is free on a CPU
            return eps
    return torch.minimum(eps, order_statistic(gaps, counted, rows))


def _scalar(value: int, like: Tensor) -> Tensor:
    return torch.full((), value, device=like.device)  # a fill: copying a number to a GPU would wait for it
