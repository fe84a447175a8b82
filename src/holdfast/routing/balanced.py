"""Selectors that balance the load of experts in training, by looking at all tokens of the batch.

    ExpertChoice      each expert takes its best tokens
    Sinkhorn          top-k of logits plus a number for each expert, under which soft loads are equal; or sparse rows
    BaseAssignment    the best assignment in which every expert has equally many tokens

In training a token's experts depend on the other tokens of the batch, so these selectors are then neither causal nor
batch-invariant, and perplexities in training cannot be compared with those of other routers. In evaluation they select by
top-k, unless an option says otherwise. Padding takes no room: it is routed as in evaluation.

**Several ranks.** `Sinkhorn` and `BaseAssignment` balance the tokens of all ranks, `ExpertChoice` those of each rank.
`Sinkhorn` sums E numbers over ranks in each of its 50 steps; `BaseAssignment` gathers all scores on all ranks, and every
rank runs the same auction.

T tokens of a batch, E experts, s logits, g gates
"""

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.checked import as_ratio
from holdfast.errors import require_known
from holdfast.kernels.select import top
from holdfast.routing.declarations import (
    FLOAT,
    INTEGER,
    SIGMOID,
    ActiveExperts,
    Conditions,
    Cost,
    GateFunction,
    NoCertificate,
    Shares,
    keep_best,
    selection_bytes,
)
from holdfast.routing.parts import NOT_BY_GATES, Selector, SelectorDeclarations, Traits, normalise
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores, Selection, gather_slots
from holdfast.routing.selection import check_k
from holdfast.routing.state import StatefulPart, flag, is_set
from holdfast.routing.transport import ITERATIONS, assign_balanced, column_potentials, sparse_potentials, sparse_rows

BATCH_WIDE = Traits(causal=False, batch_invariant=False, cacheable=False)
BALANCES_ALL = "gives every expert its share of the batch"  # why these selectors refuse expert dropout
DOUBLE = 8  # bytes
MEMORY = 0.9  # weight of the old value in the running mean of the potentials


class ExpertChoice(Selector):
    """Each expert takes the c = min(T, ceil(factor T k / E)) tokens with the largest P[:, e], ties to the earlier token.

    P is the gates divided by their sum, and the weight of an expert is P[t, e] (Zhou et al. 2022). A token may get any
    number of experts; one that gets none is counted in `Routing.dropped`.

    factor      the mean number of experts of a token, over k
    evaluate    "top-k": each token takes its k best experts in evaluation, with the weights P; "same": experts choose among
                the tokens of the batch in evaluation, too, so that a model cannot generate
    """

    training_traits = BATCH_WIDE

    def __init__(self, experts: int, k: int, *, factor: float = 1.0, evaluate: Literal["top-k", "same"] = "top-k") -> None:
        super().__init__()
        check_k(k, experts)
        if not 0 < factor < math.inf:
            raise ValueError(f"factor is {factor}; the number of tokens of an expert must be positive and finite.")
        require_known("evaluation", evaluate, ("top-k", "same"))
        self.experts, self.k, self.factor, self.evaluate = experts, k, factor, evaluate
        self.ratio = as_ratio(factor)
        self.traits = BATCH_WIDE if evaluate == "same" else Traits()

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        shares = normalise(scores.gates)
        own = top(scores.key, self.k)
        if not (self.sees_batch or self.evaluate == "same"):
            return Selection(own, shares.gather(-1, own), scores.gates)
        real = context.real_tokens(tokens)
        is_own = torch.zeros_like(shares, dtype=torch.bool).scatter(-1, own, True)
        by_expert = shares.detach().where(real.unsqueeze(-1), -1.0).flatten(0, 1).t()  # (E,T)
        places = places_of_each(real.sum() * self.k, self.ratio, self.experts)
        taken = torch.arange(by_expert.shape[1], device=shares.device) < torch.minimum(places, real.sum())
        order = top(by_expert, by_expert.shape[1])
        chosen = torch.zeros_like(by_expert, dtype=torch.bool).scatter(1, order, taken.expand_as(order))
        chosen = chosen.t().view(shares.shape).where(real.unsqueeze(-1), is_own)
        return Selection.of_sets(chosen, shares, scores)._replace(dropped=(~chosen.any(-1)).long())

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return live.weights_if_same_set(experts, gather_slots(normalise(scores.gates), experts))

    @property
    def declares(self) -> SelectorDeclarations:
        training = min(self.factor * self.k, float(self.experts))
        inference = training if self.evaluate == "same" else float(self.k)
        active = ActiveExperts(training, inference, self.experts, "experts choose their tokens; on average")
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.experts, sizes)),
            active=lambda sizes: active,
            conditions=self._conditions,
            shares=lambda: Shares(self.k, "all"),
            equal_loads=True,
            refuses_dropout=BALANCES_ALL,
        )

    def _conditions(self, scores: Scores) -> Conditions:
        if self.evaluate == "same":
            raise NoCertificate(
                "no certificate is known for ExpertChoice(evaluate='same'): other tokens change the selection"
            )
        return keep_best(scores.key, self.k, scores.compares)


class Sinkhorn(Selector, StatefulPart):
    """Select the k largest s_e + v_e; weights are the gates, or sigmoid(s) if k = 1 (Clark et al. 2022).

    v are the column potentials of entropic optimal transport: with P = softmax_e(s + v), every column of P sums to T / E,
    up to a relative error of 1e-3 or 50 steps (`holdfast.routing.transport`). They have no gradient. With fewer than E
    tokens v = 0.

    Beside an informer, softmax(s + v) is the base gate that it mixes (SymphonySMoE): an expert graph gives
    g = softmax(s + v) A^T and counts the pairs of the k largest s + v. The k largest g are selected, and are the weights.

    bias        "none": v = 0 in evaluation; "running": v is a running mean of those of training, with factor 0.9, the first
                batch sets it
    sparsity    the largest number of experts in a row of the transport, at least 2: sparsity-constrained transport (Liu et
                al. 2023, transposed: they limit the tokens of an expert, and this limits the experts of a token). The row
                itself, the projection of its largest (s + v) / gamma onto the simplex, is then the base gate: a token uses
                its k largest entries that are not 0, with these weights. Beside an informer, gates jump where a token
                changes the experts of its row. None: entropic transport
    gamma       with `sparsity`, the weight of |X|^2 / 2 in the transport: the larger, the more equal a row
    """

    training_traits = BATCH_WIDE
    running: Tensor  # (E,)
    seen: Tensor  # whether a batch has set `running`

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        bias: Literal["none", "running"] | None = "none",
        sparsity: int | None = None,
        gamma: float = 1.0,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        bias = "none" if bias is None else bias
        require_known("bias", bias, ("none", "running"))
        if sparsity is None and gamma != 1:
            raise ValueError(f"gamma is {gamma}, but there is no sparsity; add sparsity={max(2, k)}.")
        if not 0 < gamma < math.inf:
            raise ValueError(f"gamma is {gamma}; it divides the logits and must be positive and finite.")
        if sparsity is not None and not 2 <= sparsity <= experts:
            raise ValueError(
                f"sparsity is {sparsity}; it must be between 2 and the number of experts, {experts} (a row with one entry "
                "has the gate 1, so that nothing would be learnt)."
            )
        self.experts, self.k, self.has_bias, self.sparsity = experts, k, bias == "running", sparsity
        self.gamma, self.ragged = gamma, sparsity is not None
        if sparsity is not None:
            self.gate = GateFunction(
                "sparse transport", partial(sparse_rows, sparsity=sparsity, gamma=gamma), continuous=False, shares=True
            )
            # For users; no state depends on it.
            self.register_buffer("staged_violation", torch.zeros(()), persistent=False)
        if self.has_bias:
            self.register_buffer("running", torch.zeros(experts))
            self.register_buffer("seen", flag())
            self.register_statistics(potentials=torch.zeros(experts), tokens=torch.zeros((), dtype=torch.int64))

    def new_state(self) -> dict[str, Tensor]:
        if not self.has_bias:
            return {}
        batch, enough = self.get_buffer("staged_potentials"), self.get_buffer("staged_tokens") >= self.experts
        mean = torch.where(is_set(self.seen), MEMORY * self.running + (1 - MEMORY) * batch, batch)
        return {
            "running": mean.where(enough, self.running),
            "seen": torch.where(enough, torch.ones_like(self.seen), self.seen),
        }

    def adjusted(self, logits: Tensor, tokens: Tensor, context: Context, informed: bool) -> Tensor:
        return logits + self._potentials(logits, tokens, context) if informed or self.sparsity is not None else logits

    def _potentials(self, logits: Tensor, tokens: Tensor, context: Context) -> Tensor | float:
        """Return v: in training that of the batch, which is staged, else the running mean or 0."""
        if not self.sees_batch:
            return self.running if self.has_bias else 0.0
        logits, real, staged = logits.detach(), context.real_tokens(tokens), {}
        if self.sparsity is None:
            potentials, count = column_potentials(logits, real)
        else:
            potentials, count, staged["violation"] = sparse_potentials(logits, real, self.sparsity, self.gamma)
        if self.has_bias:
            staged |= {"potentials": potentials, "tokens": count}
        if staged:
            self.stage_in_background(lambda: staged)
        return potentials

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        ranks = scores.key.detach()
        if self._is_plain(scores):
            ranks = ranks + self._potentials(scores.logits, tokens, context)
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, top(ranks, self.k), True)
        if self.sparsity is not None and not scores.informed:
            chosen = chosen & (scores.gates > 0)
        return Selection.of_sets(chosen, self._amounts(scores), scores, self.k)

    def _is_plain(self, scores: Scores) -> bool:
        """Return whether v is still to be added to the logits; `adjusted` has done it otherwise."""
        return self.sparsity is None and not scores.informed

    def _amounts(self, scores: Scores) -> Tensor:
        return exact_sigmoid(scores.logits) if self.k == 1 and self._is_plain(scores) else scores.gates

    def ranks(self, scores: Scores) -> Tensor:
        return self._levels(scores) if self._is_plain(scores) else scores.key

    def _levels(self, scores: Scores) -> Tensor:
        return scores.logits + self.running if self.has_bias and self._is_plain(scores) else scores.logits

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        amounts = self._amounts(scores)
        if self.sparsity is not None and not scores.informed:  # the row in which the held experts are among the best
            held = F.pad(torch.zeros_like(amounts, dtype=torch.bool), (0, 1)).scatter(-1, experts, True)[..., :-1]
            amounts = sparse_rows(scores.logits, self.sparsity, self.gamma, held)
        return live.weights_if_same_set(experts, gather_slots(amounts, experts))

    @property
    def declares(self) -> SelectorDeclarations:
        summed = INTEGER + ITERATIONS * FLOAT * self.experts
        active = ActiveExperts(self.k, self.k, self.k)
        if self.sparsity is not None:
            summed = DOUBLE * (2 + ITERATIONS * self.experts)
            active = replace(active, about="at most; a row of sparse transport may have fewer")
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.k, sizes), summed=summed, summed_again=summed),
            active=lambda sizes: active,
            conditions=self._conditions,
            shares=lambda: None if self.k == 1 or self.has_bias else Shares(self.k, "nothing"),
            levels=self._levels,
            snapshot=self._snapshot,
            refuses_dropout=BALANCES_ALL,
        )

    def _snapshot(self) -> dict[str, Tensor]:
        """Return the running potentials, and the violation of the column sums of the last batch's sparse transport."""
        found = {"potentials": self.running} if self.has_bias else {}
        return found if self.sparsity is None else {**found, "violation": self.get_buffer("staged_violation").clone()}

    def _conditions(self, scores: Scores) -> Conditions:
        if self.sparsity is not None:
            raise NoCertificate(
                "no certificate is known for Sinkhorn(sparsity=...): its gates are projections onto a simplex"
            )
        if not self.has_bias:
            return keep_best(scores.key, self.k, scores.compares)
        if scores.informed:
            raise NoCertificate(
                "no certificate is known for Sinkhorn(bias='running') beside an informer: it adds to the logits before that"
            )
        return keep_best(self._levels(scores), self.k, "logits", bias=self.running)


class BaseAssignment(Selector):
    """Assign k experts to each token so that sum s_te is the largest, with at most ceil(T k / E) tokens for each expert.

    Weights are sigmoid(s) (BASE layers, Lewis et al. 2021). No expert gets more tokens than that, so loads are equal if E
    divides T k. The sum is within (T k + E) eps of the largest, in each group of at most 2,048 tokens; eps is 2^-12 of the
    range of s, 2^-8 for more than 256 tokens (`holdfast.routing.transport`). In evaluation each token takes its k best
    experts. It compares the scores of different tokens, which gates do not keep, so it takes no informer.
    """

    training_traits = BATCH_WIDE
    ragged = False

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        check_k(k, experts)
        self.experts, self.k = experts, k

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        experts = top(scores.key, self.k)
        if self.sees_batch:
            real = context.real_tokens(tokens)
            assigned = assign_balanced(scores.key.detach().flatten(0, 1), real.flatten(), self.k).view(experts.shape)
            assigned = assigned.where(real.unsqueeze(-1), experts)
            chosen = torch.zeros_like(scores.gates, dtype=torch.bool).scatter(-1, assigned, True)
            return Selection.of_sets(chosen, exact_sigmoid(scores.logits), scores, self.k)
        return Selection(experts, exact_sigmoid(scores.logits).gather(-1, experts), scores.gates)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return live.weights_if_same_set(experts, gather_slots(exact_sigmoid(scores.logits), experts))

    @property
    def declares(self) -> SelectorDeclarations:
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.k, sizes), gathered=FLOAT * self.experts),
            active=lambda sizes: ActiveExperts(self.k, self.k, self.k),
            conditions=lambda scores: keep_best(scores.key, self.k, scores.compares),
            shares=lambda: Shares(self.k, "nothing", gate=SIGMOID),
            refuses_informers=NOT_BY_GATES,
            refuses_dropout=BALANCES_ALL,
        )


def exact_sigmoid(logits: Tensor) -> Tensor:
    """Return sigmoid(logits). Its gradient, unlike that of `torch.sigmoid`, has no rounding error of 1 - sigmoid."""
    return F.logsigmoid(logits).exp()


def places_of_each(slots: Tensor, ratio: tuple[int, int] | tuple[Tensor, ...], experts: int) -> Tensor:
    """Return ceil(ratio * slots / E) in whole numbers, (E,) if experts have ratios of their own.

    slots   an integer on the device
    ratio   numerator and denominator, or those of each expert (E,)
    """
    numerator, denominator = ratio
    return -(-slots * numerator // (experts * denominator))
