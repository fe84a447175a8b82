"""Near-tie mass: how many tokens are about to switch experts.

Appendix C.4 of "Geometric and Stochastic Analysis of Discontinuities in Sparse Mixture-of-Experts".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.metrics.accumulator import Accumulator, only_real
from holdfast.routing import Router, Routing, Scores
from holdfast.routing.parts import TINY, Rule

WIDTHS = (0.001, 0.01, 0.1)
GATES: tuple[Callable[[Tensor], Tensor], ...] = (partial(torch.softmax, dim=-1), torch.sigmoid, torch.relu)


def compared(routing: Routing) -> Tensor:
    """(T,E) what experts were compared in, as far as a record tells: the logits, or log gates where these say otherwise.

    After an informer, or with noise, gates are no function of the logits as scored any more, and selection read the gates.
    """
    for gate in GATES:
        if torch.allclose(gate(routing.logits), routing.gates, rtol=1e-3, atol=1e-6):
            return routing.logits
    return routing.gates.clamp_min(TINY).log()


@dataclass(frozen=True)
class Boundary:
    """Where a router switches: between the k-th expert and the next, by `levels (T,E)` of a routing."""

    k: int | None = None  # None: as many as the token uses. Smooth top-k uses more than its k, so there k is needed
    levels: Callable[[Routing], Tensor] = compared


def boundary_of(router: Router) -> Boundary:
    """Return the boundary that a router's selector declares. In training, noise may have moved what the record holds."""
    core = router.select.core
    return Boundary(core) if router.training else Boundary(core, partial(_levels, router.select.levels, router.informed))


def levels_of(rule: Rule) -> Callable[[Routing], Tensor]:
    """Return `Boundary.levels` for the rule of a gate that is not ours, such as that of a Hugging Face family."""
    return partial(_levels, rule.levels, False)


def _levels(levels: Callable[[Scores], Tensor], informed: bool, routing: Routing) -> Tensor:
    return levels(Scores.recorded(routing, informed=informed)).squeeze(0)


@dataclass(frozen=True)
class NearTie:
    """Of one strip, `width` wide, below the k-th level."""

    width: float
    share: float  # of the tokens, with another expert in the strip
    experts: float  # in the strip and not among the k best, per token


@dataclass(frozen=True)
class NearTieMass:
    strips: list[NearTie]
    explained: float  # share of the tokens whose k best by level were all chosen; below 1, these are the wrong levels


class NearTies(Accumulator[NearTieMass]):
    """The share of tokens with level_(k) - level_(k+1) < eps, and the mean number of experts j beyond the k best with
    level_(k) - level_j < eps, for several eps. Levels are logits; after an informer, log gates.

    A token that uses no expert, or all of them, is far from any tie.
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
        lowest = levels.where(best, torch.inf).amin(-1, keepdim=True)  # the k-th; infinity where there is none
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
