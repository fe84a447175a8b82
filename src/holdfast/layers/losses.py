"""Losses: pure functions of a `Routing` and a token mask.

    T tokens, E experts; token_mask (B,N) or (T,) bool, True where the token is real

**Several ranks.** Each rank has other tokens, but a loss is that of the whole batch: the mean over ranks of each rank's
balance is not the balance of the batch. `over_ranks` returns the mean of a tensor over ranks, without a gradient. Then every
rank has the loss of the whole batch, and the mean over ranks of its gradients, which DDP and FSDP2 take, is the gradient of
the whole batch, also if ranks have different numbers of real tokens. `Losses` uses it in training. It is a collective
operation: every rank must call it.

**Groups.** If a routing has `balance_groups` (the modalities of its tokens), the losses that balance the load, `balance`,
`importance` and `load`, are the mean of the losses of the groups that have tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from holdfast.kernels.balance import OverRanks, balance_loss
from holdfast.routing import Routing
from holdfast.routing.parts import TINY, normalise
from holdfast.routing.state import mean_over_ranks, several_ranks


def single_process_mean(value: Tensor) -> Tensor:
    """Return `value`: the mean over one process."""
    return value


def balance(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = single_process_mean) -> Tensor:
    """Return E * sum_e f_e P_e, with f the share of selections and P the mean normalised gate; 1 if uniform.

    Selections are counted before a capacity limit, which would hide overload from the loss. Fedus et al. 2022.
    It is 1, without a gradient, if every token uses every expert, as in SoftMoE and SMEAR layers.
    """
    if routing.balance_groups is not None:
        return _mean_over_groups(_balance, routing, token_mask, over_ranks, normalise(routing.gates), routing.requested_sets)
    real = None if token_mask is None else token_mask.flatten()
    requested = routing.experts if routing.requested is None else routing.requested
    is_alone = over_ranks is single_process_mean or (over_ranks is mean_over_ranks and not several_ranks())
    return balance_loss(routing.gates, requested, real, None if is_alone else over_ranks)


def _balance(mass: Tensor, chosen: Tensor) -> Tensor:
    return mass.shape[0] * (normalise(chosen) * mass).sum()


def importance(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = single_process_mean) -> Tensor:
    """Return CV^2 over experts of the sum of the normalised gates (Shazeer et al. 2017; survey 2.3)."""
    return _mean_over_groups(_squared_variation, routing, token_mask, over_ranks, normalise(routing.gates))


def load(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = single_process_mean) -> Tensor:
    """Return CV^2 over experts of the number of their tokens, before a capacity limit (survey 2.3).

    Counts have no gradient: it is that of the normalised gates (straight-through), and the value is that of the counts.
    """

    def of_means(mass: Tensor, chosen: Tensor) -> Tensor:
        return _squared_variation(chosen + mass - mass.detach())

    return _mean_over_groups(of_means, routing, token_mask, over_ranks, normalise(routing.gates), routing.requested_sets)


def z(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = single_process_mean) -> Tensor:
    """Return mean_t logsumexp(logits_t)^2, which keeps logits small (Zoph et al. 2022)."""
    (mean,) = _means(token_mask, over_ranks, torch.logsumexp(routing.logits, dim=-1, keepdim=True).square())
    return mean.squeeze()


def entropy(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = single_process_mean) -> Tensor:
    """Return log E - mean entropy of the normalised gates: 0 if uniform, so that minimising it smooths the gates.

    The survey (4.2) maximises the entropy; this has the sign of a loss.
    """
    gates = normalise(routing.gates)
    entropies = -(gates * gates.clamp_min(TINY).log()).sum(-1, keepdim=True)
    (mean,) = _means(token_mask, over_ranks, entropies)
    return math.log(gates.shape[-1]) - mean.squeeze()


TERMS = {"balance": balance, "importance": importance, "load": load, "z": z, "entropy": entropy}


@dataclass(frozen=True)
class Losses:
    """The coefficients of the losses that a router adds in training. A loss with coefficient 0 is not computed."""

    balance: float = 0.0
    importance: float = 0.0
    load: float = 0.0
    z: float = 0.0
    entropy: float = 0.0

    def __post_init__(self) -> None:
        for term in fields(self):
            if not 0 <= getattr(self, term.name) < math.inf:  # a negative coefficient would reward what the loss penalises
                raise ValueError(
                    f"the coefficient of {term.name} is {getattr(self, term.name)}; it must be finite and not negative."
                )

    def __call__(
        self, routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = mean_over_ranks
    ) -> Mapping[str, Tensor]:
        """Return the weighted losses of the tokens of all ranks by name, ready to be added to the training loss."""
        weights = {name: getattr(self, name) for name in TERMS if getattr(self, name) != 0}
        return {name: weight * TERMS[name](routing, token_mask, over_ranks) for name, weight in weights.items()}


def _means(token_mask: Tensor | None, over_ranks: OverRanks, *values: Tensor) -> tuple[Tensor, ...]:
    """Return the mean of each of `values (T,n)` over the real tokens of all ranks; 0 if there are none.

    Sums are divided by the mean number of tokens over ranks, so that the mean over ranks is the mean over tokens. The
    gradient is that of this rank's tokens. All sums are exchanged in one message.
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


def _mean_over_groups(
    loss: Callable[..., Tensor], routing: Routing, token_mask: Tensor | None, over_ranks: OverRanks, *values: Tensor
) -> Tensor:
    """Return the mean of `loss(*means of values)` over the balance groups that have tokens, on any rank; 0 if none has."""
    groups = routing.balance_groups
    if groups is None:
        return loss(*_means(token_mask, over_ranks, *values))
    real = None if token_mask is None else token_mask.reshape(-1)
    total, present = values[0].new_zeros(()), values[0].new_zeros(())
    for member in groups.unbind(1):
        means = _means(member if real is None else member & real, over_ranks, *values)
        has_tokens = (means[0].detach().sum() > 0).to(total.dtype)  # normalised gates of one token or more
        total, present = total + has_tokens * loss(*means), present + has_tokens
    return total / present.clamp_min(1.0)


def _squared_variation(values: Tensor) -> Tensor:
    """Return (standard deviation / mean)^2."""
    return values.var(correction=0) / values.mean().square().clamp_min(TINY)
