"""Top-k: the k best experts run for a token. Ties go to the lower index, everywhere.

Thresholds are in `holdfast.routing.thresholds`, smooth top-k in `holdfast.routing.smoothing`. `Softmax` is the usual rule;
rules of model families are in `holdfast.hub.families`.
"""

from typing import Literal

import torch
from torch import Tensor

from holdfast.errors import require_known
from holdfast.kernels.select import select_top_k, top
from holdfast.routing.declarations import ActiveExperts, Cost, selection_bytes
from holdfast.routing.parts import Selector, SelectorDeclarations
from holdfast.routing.records import Context
from holdfast.routing.rules import Rule, Scores, Selection, Softmax


class TopK(Selector):
    """Select the k best experts: y = sum_i w_i FFN_i(x) over them, with w_i from their gates g_i.

    weights     "softmax": gates divided by their sum over the k; "switch": the raw gates (Fedus et al. 2022)
    k_final     in training, k grows from `k` to this number or to "all" experts (SMoE-dropout), with `progress(fraction)`
    rule        the rule of the model that the router is built for; it replaces `weights`
    """

    active: Tensor
    rule: Rule

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        weights: Literal["softmax", "switch"] = "softmax",
        k_final: int | Literal["all"] | None = None,
        rule: Rule | None = None,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        k_final = experts if k_final == "all" else k_final
        require_known("kind of weights", weights, ("softmax", "switch"))
        self.k, self.experts, self.weights, self.k_final = k, experts, weights, k_final
        self.rule = Softmax(renormalise=weights == "softmax") if rule is None else rule
        self.gate, self.ragged = self.rule.gate, k_final is not None
        if k_final is not None:
            check_k(k_final, experts, "k_final")
            # A tensor is saved with the model, and a change of its value needs neither recompilation nor synchronisation.
            self.register_buffer("active", torch.tensor(k))

    @property
    def declares(self) -> SelectorDeclarations:
        about = "" if self.k_final is None else f"grows from {self.k} in training; counted at its end"
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.slots, sizes)),
            active=lambda sizes: ActiveExperts(self.slots, self.slots, self.slots, about),
            conditions=lambda scores: self.rule.conditions(scores, self.in_use),
            shares=lambda: self.rule.shares(self.in_use),
            levels=self.rule.levels,
            rule=self.rule.name,
            weights_option=self.rule.weights_option,
            refuses_dropout=None if self.k_final is None else "changes its number of experts in training",
        )

    @property
    def in_use(self) -> int:
        """How many experts a token has now."""
        return self.k if self.k_final is None else int(self.active)

    @property
    def slots(self) -> int:
        return self.k if self.k_final is None else max(self.k, self.k_final)

    def progress(self, fraction: float) -> None:
        if self.k_final is not None:
            self.active.fill_(self.k + int(fraction * (self.k_final - self.k)))

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        amounts = self.rule.amounts(scores)
        if amounts is not None and self.k_final is None:
            experts, weights = select_top_k(scores.key, amounts, self.k)
            return Selection(experts, weights, scores.gates)
        experts = top(self.ranks(scores), self.slots)
        in_use = torch.ones_like(experts, dtype=torch.bool)
        if self.k_final is not None:
            in_use = (torch.arange(self.slots, device=experts.device) < self.active).expand_as(experts)
        weights = self.rule.weigh(scores, experts, in_use, None, self.slots)
        experts = experts.where(in_use, self.experts)
        if not self.rule.ordered:
            experts, weights = by_weight(experts, weights)
        return Selection(experts, weights, scores.gates)

    def ranks(self, scores: Scores) -> Tensor:
        return scores.rank_lost_last(self.rule.ranks(scores))

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return self.rule.held_weights(experts, scores, live)


def by_weight(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots sorted by weight, descending, for rules whose ranks are not in the order of the weights."""
    order = top(weights, weights.shape[-1])
    return experts.gather(-1, order), weights.gather(-1, order)


def check_k(k: int, experts: int, name: str = "k") -> None:
    """Raise ValueError if `k` is not between 1 and the number of experts."""
    if not 1 <= k <= experts:
        raise ValueError(f"{name} is {k}; it must be between 1 and the number of experts, {experts}.")
