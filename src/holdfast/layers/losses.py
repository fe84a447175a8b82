"""Losses: pure functions of a `Routing` and the padding mask. Nothing is remembered between calls.

T tokens, E experts; padding (B,N) or (T,) bool, True where the token is real

Several processes see different tokens, and a term is one of all of them: the mean of each process's own balance is not the
balance of the whole. `over_ranks` takes a tensor to its mean over the processes, without a gradient (one process: itself).
Every process then has the whole batch's term, and the mean over processes of its gradients, which DDP and FSDP2 take, is
the gradient of the whole, also where the numbers of real tokens differ. Routers in training pass it (`Losses`). It is a
collective: whoever passes it calls the term on every process.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from holdfast.routing import Routing
from holdfast.routing.parts import TINY, shares
from holdfast.routing.state import mean_over_ranks

OverRanks = Callable[[Tensor], Tensor]


def alone(value: Tensor) -> Tensor:
    """The mean over one process."""
    return value


def balance(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = alone) -> Tensor:
    """E * sum_e f_e P_e, f the share of the selections, P the mean normalised gate (Fedus et al. 2022); 1 if uniform."""
    mass, chosen = _means(token_mask, over_ranks, _distribution(routing), routing.chosen)
    return routing.gates.shape[-1] * (shares(chosen) * mass).sum()


def importance(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = alone) -> Tensor:
    """CV^2 over experts of the gating mass, sum_t of the normalised gates (Shazeer et al. 2017; survey 2.3)."""
    (mass,) = _means(token_mask, over_ranks, _distribution(routing))
    return _squared_variation(mass)


def load(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = alone) -> Tensor:
    """CV^2 over experts of the number of tokens that chose each (survey 2.3).

    Counts have no gradient, so it is taken through the normalised gates (straight-through); the value is that of the counts.
    """
    mass, chosen = _means(token_mask, over_ranks, _distribution(routing), routing.chosen)
    return _squared_variation(chosen + mass - mass.detach())


def z(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = alone) -> Tensor:
    """mean_t logsumexp(logits_t)^2: keeps logits small (Zoph et al. 2022)."""
    (mean,) = _means(token_mask, over_ranks, torch.logsumexp(routing.logits, dim=-1, keepdim=True).square())
    return mean.squeeze()


def entropy(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = alone) -> Tensor:
    """log E - mean entropy of the normalised gates: 0 when uniform, so that minimising it smooths the gates.

    The survey (4.2) prints the entropy itself as the loss and asks to maximise it; this is that, with the sign of a loss.
    """
    gates = _distribution(routing)
    entropies = -(gates * gates.clamp_min(TINY).log()).sum(-1, keepdim=True)
    (mean,) = _means(token_mask, over_ranks, entropies)
    return math.log(gates.shape[-1]) - mean.squeeze()


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
            if not 0 <= getattr(self, term.name) < math.inf:  # a negative one would push routers to what it is against
                raise ValueError(
                    f"the coefficient of {term.name} is {getattr(self, term.name)}; it must be finite and not negative."
                )

    def __call__(
        self, routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = mean_over_ranks
    ) -> Mapping[str, Tensor]:
        """The weighted terms by name, as they enter the training loss: of the tokens of all processes."""
        weights = {name: getattr(self, name) for name in TERMS if getattr(self, name) != 0}
        return {name: weight * TERMS[name](routing, token_mask, over_ranks) for name, weight in weights.items()}


def _distribution(routing: Routing) -> Tensor:
    return shares(routing.gates)


def _means(token_mask: Tensor | None, over_ranks: OverRanks, *values: Tensor) -> tuple[Tensor, ...]:
    """The mean of each of `values (T,n)` over the real tokens of all processes; 0 where there are none.

    Divided by the mean number of tokens, not by this process's own, so that the mean over processes is the mean over tokens.
    The gradient is that of this process's part. All in one message.
    """
    rows = torch.cat([value.float() for value in values], dim=1)
    if token_mask is None:
        total, count = rows.sum(0), rows.new_full((1,), rows.shape[0])
    else:
        real = token_mask.reshape(-1, 1)
        total, count = rows.where(real, 0.0).sum(0), real.sum(0).to(rows.dtype)
    whole = over_ranks(torch.cat([total.detach(), count]))
    count = whole[-1:].where(whole[-1:] > 0, 1.0)
    mean = (whole[:-1] + (total - total.detach())) / count
    return mean.split([value.shape[1] for value in values])


def _squared_variation(amounts: Tensor) -> Tensor:
    """(standard deviation / mean)^2."""
    return amounts.var(correction=0) / amounts.mean().square().clamp_min(TINY)
