"""Losses: pure functions of a `Routing` and the padding mask. Nothing is remembered between calls.

T tokens, E experts; padding (B,N) or (T,) bool, True where the token is real
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from holdfast.routing import Routing
from holdfast.routing.parts import TINY, shares


def balance(routing: Routing, padding: Tensor | None = None) -> Tensor:
    """E * sum_e f_e P_e, f the share of the selections, P the mean normalised gate (Fedus et al. 2022); 1 if uniform."""
    share = _counts(routing, padding)
    share = share / share.sum().clamp_min(1)
    return routing.gates.shape[-1] * (share * _mean(_distribution(routing), padding)).sum()


def importance(routing: Routing, padding: Tensor | None = None) -> Tensor:
    """CV^2 over experts of the gating mass, sum_t of the normalised gates (Shazeer et al. 2017; survey 2.3)."""
    return _squared_variation(_mean(_distribution(routing), padding))


def load(routing: Routing, padding: Tensor | None = None) -> Tensor:
    """CV^2 over experts of the number of tokens that chose each (survey 2.3).

    Counts have no gradient, so it is taken through the normalised gates (straight-through); the value is that of the counts.
    """
    mass = _mean(_distribution(routing), padding)
    counts = _counts(routing, padding) / _count(routing, padding)
    return _squared_variation(counts + mass - mass.detach())


def z(routing: Routing, padding: Tensor | None = None) -> Tensor:
    """mean_t logsumexp(logits_t)^2: keeps logits small (Zoph et al. 2022)."""
    return _mean(torch.logsumexp(routing.logits, dim=-1).square(), padding)


def entropy(routing: Routing, padding: Tensor | None = None) -> Tensor:
    """log E - mean entropy of the normalised gates: 0 when uniform, so that minimising it smooths the gates.

    The survey (4.2) prints the entropy itself as the loss and asks to maximise it; this is that, with the sign of a loss.
    """
    gates = _distribution(routing)
    entropies = -(gates * gates.clamp_min(TINY).log()).sum(-1)
    return math.log(gates.shape[-1]) - _mean(entropies, padding)


TERMS = {"balance": balance, "importance": importance, "load": load, "z": z, "entropy": entropy}


@dataclass(frozen=True)
class Losses:
    """How much of each loss a router adds in training. A coefficient of 0 costs nothing."""

    balance: float = 0.0
    importance: float = 0.0
    load: float = 0.0
    z: float = 0.0
    entropy: float = 0.0

    def __post_init__(self) -> None:
        for term in fields(self):
            if not math.isfinite(getattr(self, term.name)):
                raise ValueError(f"the coefficient of {term.name} is {getattr(self, term.name)}; it must be finite.")

    def __call__(self, routing: Routing, padding: Tensor | None = None) -> Mapping[str, Tensor]:
        """The weighted terms by name, as they enter the training loss."""
        weights = {name: getattr(self, name) for name in TERMS}
        return {name: weight * TERMS[name](routing, padding) for name, weight in weights.items() if weight != 0}


def _distribution(routing: Routing) -> Tensor:
    return shares(routing.gates)


def _real(routing: Routing, padding: Tensor | None) -> Tensor:
    if padding is None:
        return routing.gates.new_ones(routing.gates.shape[0])
    return padding.reshape(-1).to(routing.gates.dtype)


def _count(routing: Routing, padding: Tensor | None) -> Tensor:
    return _real(routing, padding).sum().clamp_min(1)


def _counts(routing: Routing, padding: Tensor | None) -> Tensor:
    """(E,) how many real tokens chose each expert."""
    if padding is None:
        return routing.chosen.sum(0, dtype=routing.gates.dtype)
    return (routing.chosen * _real(routing, padding).unsqueeze(1)).sum(0)


def _mean(values: Tensor, padding: Tensor | None) -> Tensor:
    """The mean over real tokens of `values (T, ...)`; 0 where there are none."""
    if padding is None:
        return values.sum(0) / max(values.shape[0], 1)
    real = padding.reshape(-1)
    mask = real.view(-1, *[1] * (values.dim() - 1))
    return values.where(mask, 0.0).sum(0) / real.sum().clamp_min(1)


def _squared_variation(amounts: Tensor) -> Tensor:
    """(standard deviation / mean)^2."""
    return amounts.var(correction=0) / amounts.mean().square().clamp_min(TINY)
