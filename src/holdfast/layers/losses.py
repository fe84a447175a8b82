"""Losses: pure functions of a `Routing` and a token mask; and `margin`, of a router and its tokens.

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
from typing import Annotated

import torch
from torch import Tensor

from holdfast.certificates.margins import shortfalls
from holdfast.checked import Limits
from holdfast.kernels.balance import OverRanks, balance_loss, means
from holdfast.routing import Context, Router, Routing
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
    (mean,) = means(token_mask, over_ranks, torch.logsumexp(routing.logits, dim=-1, keepdim=True).square())
    return mean.squeeze()


def entropy(routing: Routing, token_mask: Tensor | None = None, over_ranks: OverRanks = single_process_mean) -> Tensor:
    """Return log E - mean entropy of the normalised gates: 0 if uniform, so that minimising it smooths the gates.

    The survey (4.2) maximises the entropy; this has the sign of a loss.
    """
    gates = normalise(routing.gates)
    entropies = -(gates * gates.clamp_min(TINY).log()).sum(-1, keepdim=True)
    (mean,) = means(token_mask, over_ranks, entropies)
    return math.log(gates.shape[-1]) - mean.squeeze()


def margin(
    router: Router,
    tokens: Tensor,
    context: Context,
    radius: float,
    token_mask: Tensor | None = None,
    over_ranks: OverRanks = single_process_mean,
) -> Tensor:
    """Return the mean over tokens of relu(r0 - r) / r0, with r0 = `radius` and r the certificate's distance over |x|.

    It is 0 if every token keeps its experts under every change of up to r0 of its own length.
    """
    (mean,) = means(token_mask, over_ranks, shortfalls(router, tokens, context, radius).float().unsqueeze(1))
    return mean.squeeze()


def consistency(
    one: Routing,
    other: Routing,
    token_mask: Tensor | None = None,
    over_ranks: OverRanks = single_process_mean,
    *,
    other_mask: Tensor | None = None,
) -> Tensor:
    """Return the mean Jensen-Shannon divergence, in nats, between the normalised gates of two views of one input.

    0 if they are equal, log 2 if they share no expert (survey 4.2). Row t of `other` is the token of row t of `one`, and
    `token_mask` is of both. Views with different numbers of tokens are compared by the mean gates of their real tokens;
    `other_mask` is the mask of `other` there.
    """
    gates, others = normalise(one.gates), normalise(other.gates)
    if gates.shape == others.shape:
        (mean,) = means(token_mask, over_ranks, _jensen_shannon(gates, others))
        return mean.squeeze()
    (gates,), (others,) = means(token_mask, over_ranks, gates), means(other_mask, over_ranks, others)
    return _jensen_shannon(gates, others).squeeze()


def _jensen_shannon(one: Tensor, other: Tensor) -> Tensor:
    """Return (...,1): (KL(p || m) + KL(q || m)) / 2 of the rows p of `one` and q of `other`, with m = (p + q) / 2."""
    log_mean = ((one + other) / 2).clamp_min(TINY).log()
    differences = [p * (p.clamp_min(TINY).log() - log_mean) for p in (one, other)]
    return (differences[0] + differences[1]).sum(-1, keepdim=True) / 2


TERMS = {"balance": balance, "importance": importance, "load": load, "z": z, "entropy": entropy}


Amount = Annotated[float, Limits(0, math.inf, "a number of at least 0")]
Share = Annotated[float, Limits(0, 1, "a number between 0 and 1")]


@dataclass(frozen=True)
class Losses:
    """The coefficients of the losses that are added in training. A loss with coefficient 0 is not computed.

    balance, importance, load, z, entropy, margin   losses of a routing, which the router computes (this file)
    radius                      what `margin` trains tokens to be certified for, as a share of their own length
    diversity, distillation     losses of the experts' outputs, which the layer computes (expert_losses.py)
    consistency                 the loss between two forwards of one input, which a Hugging Face model computes
    word_noise                  the share of token ids that are others in the second of these forwards; 0: only dropout
                                makes the two differ
    """

    balance: Amount = 0.0
    importance: Amount = 0.0
    load: Amount = 0.0
    z: Amount = 0.0
    entropy: Amount = 0.0
    margin: Amount = 0.0
    radius: Amount = 0.0
    diversity: Amount = 0.0
    distillation: Amount = 0.0
    consistency: Amount = 0.0
    word_noise: Share = 0.0

    def __post_init__(self) -> None:
        for term in fields(self):
            value = getattr(self, term.name)
            # A negative coefficient would reward what the loss penalises.
            if isinstance(value, str) or not 0 <= value < math.inf:
                raise ValueError(f"{term.name} is {value!r}; a coefficient is a finite number that is not negative.")
        if self.word_noise > 1 or (self.word_noise and not self.consistency):
            raise ValueError(
                f"word_noise is {self.word_noise} with consistency={self.consistency}; it is the share of token ids, from 0 "
                "to 1, that the loss consistency replaces: give both, or leave word_noise out."
            )
        if self.margin and not self.radius:
            raise ValueError("margin needs a radius: how much of its own length a token may change, for example 0.02.")
        if self.radius and not self.margin:
            raise ValueError("radius is for the loss margin; give both, or leave radius out.")

    @property
    def reads_experts(self) -> bool:
        """Whether a loss reads outputs of experts, which a layer then computes for it."""
        return bool(self.diversity or self.distillation)

    def __call__(
        self,
        routing: Routing,
        token_mask: Tensor | None = None,
        over_ranks: OverRanks = mean_over_ranks,
        *,
        router: Router | None = None,
        tokens: Tensor | None = None,
        context: Context | None = None,
    ) -> Mapping[str, Tensor]:
        """Return the weighted losses of the tokens of all ranks by name, ready to be added to the training loss.

        `margin` reads the router and what it was called with; without these it is left out.
        """
        weights = {name: getattr(self, name) for name in TERMS if getattr(self, name) != 0}
        losses = {name: weight * TERMS[name](routing, token_mask, over_ranks) for name, weight in weights.items()}
        if self.margin and router is not None and tokens is not None and context is not None:
            losses["margin"] = self.margin * margin(router, tokens, context, self.radius, token_mask, over_ranks)
        return losses


def _mean_over_groups(
    loss: Callable[..., Tensor], routing: Routing, token_mask: Tensor | None, over_ranks: OverRanks, *values: Tensor
) -> Tensor:
    """Return the mean of `loss(*means of values)` over the balance groups that have tokens, on any rank; 0 if none has."""
    groups = routing.balance_groups
    if groups is None:
        return loss(*means(token_mask, over_ranks, *values))
    real = None if token_mask is None else token_mask.reshape(-1)
    total, present = values[0].new_zeros(()), values[0].new_zeros(())
    for member in groups.unbind(1):
        of_group = means(member if real is None else member & real, over_ranks, *values)
        has_tokens = (of_group[0].detach().sum() > 0).to(total.dtype)  # normalised gates of one token or more
        total, present = total + has_tokens * loss(*of_group), present + has_tokens
    return total / present.clamp_min(1.0)


def _squared_variation(values: Tensor) -> Tensor:
    """Return (standard deviation / mean)^2."""
    return values.var(correction=0) / values.mean().square().clamp_min(TINY)
