"""Near-ties: tokens whose k-th and (k+1)-th expert differ by less than a given width, so that a small change flips them.

See appendix C.4 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.metrics.accumulator import Accumulator, only_real
from holdfast.routing import Router, Routing, Scores
from holdfast.routing.parts import TINY
from holdfast.routing.rules import Rule

WIDTHS = (0.001, 0.01, 0.1)
GATES: tuple[Callable[[Tensor], Tensor], ...] = (partial(torch.softmax, dim=-1), torch.sigmoid, torch.relu)


def compared(routing: Routing) -> Tensor:
    """Return (T,E): what experts were ranked by, as far as a record shows it: the logits, or else the log gates.

    After an informer, or with noise, the gates are not a function of the scored logits, and selection read the gates.
    """
    for gate in GATES:
        if torch.allclose(gate(routing.logits), routing.gates, rtol=1e-3, atol=1e-6):
            return routing.logits
    return routing.gates.clamp_min(TINY).log()


@dataclass(frozen=True)
class Boundary:
    """The decision boundary of a router: between the k-th expert and the next, by `levels (T,E)` of a routing."""

    k: int | None = None  # None: the number of experts of the token. Smooth top-k uses more than its k, so it needs k
    levels: Callable[[Routing], Tensor] = compared


def boundary_of(router: Router) -> Boundary:
    """Return the boundary that a router's selector declares; in training, noise may change its levels."""
    declared = router.select.declares
    if router.fixed_sets and not router.training:
        return Boundary(declared.core, _far_apart)
    if router.training:
        return Boundary(declared.core)
    return Boundary(declared.core, partial(_levels, declared.levels, router.informed))


def _far_apart(routing: Routing) -> Tensor:
    """Return (T,E): 0 for the selected experts and minus infinity for others, if no score decides between them."""
    return torch.zeros_like(routing.gates).where(routing.chosen, -torch.inf)


def levels_of(rule: Rule) -> Callable[[Routing], Tensor]:
    """Return `Boundary.levels` for the rule of a native gate of a Hugging Face family."""
    return partial(_levels, rule.levels, False)


def _levels(levels: Callable[[Scores], Tensor], informed: bool, routing: Routing) -> Tensor:
    return levels(Scores.from_routing(routing, informed=informed)).squeeze(0)


@dataclass(frozen=True)
class NearTie:
    """Near-ties in the strip of this `width` below the k-th level."""

    width: float
    share: float  # of tokens with another expert in the strip
    experts: float  # per token, in the strip and not among the k best


@dataclass(frozen=True)
class NearTieMass:
    strips: list[NearTie]
    explained: float  # share of tokens whose k best experts by level were all selected; below 1, the levels are wrong


class NearTies(Accumulator[NearTieMass]):
    """Count near-ties for several widths eps: tokens with level_(k) - level_(k+1) < eps.

    Also the mean number of experts j beyond the k best with level_(k) - level_j < eps. Levels are logits; after an
    informer, log gates. A token that selects no expert, or all of them, is no near-tie.
    """

    def __init__(self, widths: Sequence[float] = WIDTHS, boundary: Boundary | None = None) -> None:
        super().__init__()
        self.widths, self.boundary = tuple(widths), boundary or Boundary()
        if not self.widths or not all(width > 0 for width in self.widths):
            raise ValueError(f"widths are {self.widths}; expected at least one, all positive.")
        if self.boundary.k is not None and self.boundary.k < 1:
            raise ValueError(f"k is {self.boundary.k}; it must be at least 1.")

    @property
    def settings(self) -> tuple[object, ...]:
        return (self.widths, self.boundary.k)

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        routing = only_real(routing, token_mask)
        levels = self.boundary.levels(routing)
        tokens, experts = levels.shape
        k = routing.used.sum(-1, keepdim=True)
        k = k if self.boundary.k is None else torch.full_like(k, self.boundary.k).clamp_max(experts)
        order = top(levels, int(k.max()) if tokens else 0)
        order = order.where(torch.arange(order.shape[1], device=levels.device) < k, experts)
        best = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=levels.device).scatter(1, order, True)[:, :experts]
        lowest = levels.where(best, torch.inf).amin(-1, keepdim=True)  # the k-th; infinity if there is none
        gaps = (lowest.double() - levels).where(~best, torch.inf)
        near = [gaps < width for width in self.widths]
        self._add(
            tokens=tokens,
            near=torch.stack([strip.any(1).sum() for strip in near]),
            experts=torch.stack([strip.sum() for strip in near]),
            explained=(routing.chosen | ~best).all(1).sum(),
        )

    def result(self) -> NearTieMass:
        tokens = self._per("tokens")
        shares, experts = (self._sums[name] / tokens for name in ("near", "experts"))
        rows = zip(self.widths, shares.tolist(), experts.tolist(), strict=True)
        return NearTieMass([NearTie(*row) for row in rows], self._mean("explained"))
