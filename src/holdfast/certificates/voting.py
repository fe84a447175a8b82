"""Randomised smoothing (Cohen et al. 2019): a certificate for the majority vote of any router under Gaussian noise.

f(x) = the set that route(x + noise) selects most often, noise ~ N(0, sigma^2 I). `sampling` has the radius. This certifies
f, not the router, and each token's certificate is wrong with probability at most alpha.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from holdfast.certificates.certificates import Certificates
from holdfast.certificates.sampling import Smoothing, certified_radius, generator_of, lowest_chance
from holdfast.errors import require_extra
from holdfast.routing import Context, Router, Routing
from holdfast.routing.bounds import Norm, check_norm, lengths
from holdfast.routing.parts import TINY

Route = Callable[[Tensor], Routing]
BLOCK = 16  # samples drawn at a time; fixed, because a generator's numbers depend on the size of each draw
BITS = 62  # of a set that are packed into one integer


class MajorityVote:
    """The router that selects the set which `route` selects most often under noise. A probabilistic certificate is about it.

    route       a Router, with the `context` that it is called with, or any callable from tokens to a `Routing`
    joint       whether a perturbation of one token can flip another. By default what a Router's traits declare; True for a
                callable that receives sequences (B,N,d)

    Called with tokens it returns a `Routing`: the sets of the vote; gates and weights are means over the draws, so that a
    gradient attack can follow them. The noise depends only on the seed and the token's number: the same tokens get the same
    vote.
    """

    def __init__(
        self, route: Router | Route, smoothing: Smoothing, *, context: Context | None = None, joint: bool | None = None
    ) -> None:
        self.smoothing, self.context, self.joint = smoothing, context, joint
        self.router = route if isinstance(route, Router) else None
        if context is not None and self.router is None:
            raise ValueError("context= works only with a Router; a callable must provide its own context.")
        if context is not None and context.cache is not None:
            raise ValueError("the context has a cache of earlier tokens; vote on whole sequences without a cache.")
        self.route = cast(Route, partial(route, context=context)) if isinstance(route, Router) else route

    def __call__(self, tokens: Tensor) -> Routing:
        votes, gates, weights = [], torch.zeros((), device=tokens.device), torch.zeros((), device=tokens.device)
        for routing in self.draws(tokens, self.smoothing.samples):
            votes.append(pack_sets(routing.chosen))
            gates, weights = gates + routing.gates, weights + routing.dense_weights
        gates, weights = gates / len(votes), weights / len(votes)
        chosen = unpack_sets(majority(torch.stack(votes)), gates.shape[-1])
        slots = max(1, int(chosen.sum(1).max()))
        order = weights.where(chosen, -1.0).sort(dim=-1, descending=True, stable=True).indices[:, :slots]
        used = chosen.gather(1, order)
        return Routing(
            logits=gates.clamp_min(TINY).log(),
            gates=gates,
            experts=order.where(used, gates.shape[-1]),
            weights=weights.gather(1, order).where(used, 0.0),
        )

    def draws(self, tokens: Tensor, count: int, skip: int = 0) -> Iterator[Routing]:
        """Yield the routings of `count` noisy copies of the tokens; `skip` selects another stream of noise."""
        rows, smoothing = tokens.reshape(-1, tokens.shape[-1]), self.smoothing
        # A generator for each token, so that its noise does not depend on the others.
        sources = [generator_of(smoothing.seed, smoothing.first + number, skip) for number in range(len(rows))]
        for start in range(0, count, BLOCK):
            block = torch.stack([torch.randn(BLOCK, rows.shape[1], generator=source) for source in sources], dim=1)
            for sample in block[: count - start].to(rows.device) * smoothing.sigma:
                yield self.route((rows.float() + sample).to(tokens.dtype).view(tokens.shape))

    def coordinates(self, tokens: Tensor) -> int:
        """Return the number of features that a token's set depends on."""
        traits = None if self.router is None else self.router.traits
        if traits is not None and not traits.batch_invariant:
            return tokens.numel()
        by_default = tokens.dim() == 3 if traits is None else traits.sequence_aware
        if not (by_default if self.joint is None else self.joint):
            return tokens.shape[-1]
        return tokens[0].numel() if tokens.dim() == 3 else tokens.numel()


@torch.no_grad()
def certify_vote(vote: MajorityVote, tokens: Tensor, norm: Norm = "l2") -> Certificates:
    """Return the radius of each token's majority vote; 0 if the majority is too small to certify.

    For "linf" it is the l2 radius divided by the square root of the number of features that may be perturbed. Where tokens
    share gates, it bounds the norm of the perturbations of all tokens of a sequence together.
    """
    require_extra("certifying a majority vote", "scipy")
    check_norm(norm)
    if vote.router is not None and vote.router.training:
        raise ValueError("the router is in training mode, where it updates state and may add noise; call eval() first.")
    got = f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}"
    if tokens.dim() not in (2, 3) or not tokens.is_floating_point():
        raise ValueError(f"{got}; expected floating point, (B, N, d) or (T, d).")
    smoothing, lead = vote.smoothing, tokens.shape[:-1]
    real = (vote.context or Context()).real_tokens(tokens if tokens.dim() == 3 else tokens.unsqueeze(0)).view(lead)
    if not tokens[real].isfinite().all():
        raise ValueError(f"{got} and contain NaN or infinite numbers, so they cannot be certified.")
    votes = [pack_sets(routing.chosen) for routing in vote.draws(tokens, smoothing.selection, skip=1)]
    chosen = majority(torch.stack(votes))
    hits = torch.zeros(len(chosen), dtype=torch.int64, device=tokens.device)
    experts, keys = 0, torch.zeros((), device=tokens.device)
    for routing in vote.draws(tokens, smoothing.samples):
        hits += (pack_sets(routing.chosen) == chosen).all(1)
        experts, keys = routing.gates.shape[-1], keys + routing.chosen
    lowest = lowest_chance(hits, smoothing.samples, smoothing.alpha)
    radius = certified_radius(lowest, smoothing.sigma)
    if norm == "linf":
        radius = radius / vote.coordinates(tokens) ** 0.5
    radius = radius.to(tokens.device).view(lead).where(real, 0.0)
    voted, shares = unpack_sets(chosen, experts), keys.double() / smoothing.samples
    # The expert of the set with the fewest votes, and the other expert with the most.
    leaving = shares.where(voted, 2.0).argmin(1).where(voted.any(1), experts)
    entering = shares.where(~voted, -1.0).argmax(1).where(~voted.all(1), experts)
    return Certificates(
        radius=radius,
        distance=radius,
        lengths=lengths(tokens.double(), norm),
        margin=(2 * lowest.to(tokens.device) - 1).view(lead),
        pair=torch.stack([leaving, entering], dim=1).view(*lead, 2),
        real=real,
        kind="probabilistic",
        norm=norm,
        about=f"the majority vote of the router under Gaussian noise of standard deviation {smoothing.sigma:g}",
        confidence=1 - smoothing.alpha,
    )


def pack_sets(chosen: Tensor) -> Tensor:
    """Return sets (T,E) bool as bits of integers, (T,W) int64."""
    padded = torch.nn.functional.pad(chosen.long(), (0, -chosen.shape[1] % BITS))
    powers = 2 ** torch.arange(BITS, device=chosen.device)
    return (padded.unflatten(1, (-1, BITS)) * powers).sum(-1)


def unpack_sets(sets: Tensor, experts: int) -> Tensor:
    """Return the sets (T,E) bool that `pack_sets` packed."""
    bits = sets.unsqueeze(-1) >> torch.arange(BITS, device=sets.device)
    return (bits & 1).bool().flatten(1)[:, :experts]


def majority(votes: Tensor) -> Tensor:
    """Return the most frequent set (T,W) of `votes (n,T,W)`; of several, the first in sorted order."""
    names, numbers = votes.flatten(0, 1).unique(dim=0, return_inverse=True)
    ordered = numbers.view(votes.shape[:2]).sort(dim=0).values
    runs = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long().cumsum(0)])
    counts = torch.zeros_like(runs).scatter_add(0, runs, torch.ones_like(runs))
    longest = counts.argmax(0, keepdim=True)
    return names[ordered.where(runs == longest, len(names)).amin(0)]
