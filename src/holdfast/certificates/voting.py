"""Randomised smoothing (Cohen et al. 2019): certificates for majority votes under Gaussian noise, of routes and of classes.

    f(x) = the set that route(x + noise) selects most often, noise ~ N(0, sigma^2 I)
    g(x) = the class that a classifier gives to x + noise most often

    p = Beta^-1(alpha; hits, n - hits + 1)      Clopper-Pearson: the chance of a hit is at least p, with confidence 1 - alpha
    r = sigma Phi^-1(p), if p > 1/2             within r in l2 the chance stays above 1/2; else nothing is certified

`selection` draws choose a set or a class, and `samples` other draws count its hits, as CERTIFY of the paper does. This
certifies the vote, not the router or the classifier, and the certificate of each token or input is wrong with probability at
most alpha. A classifier must give one copy the same class whatever other copies are in its batch, and noise must not be
clipped.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast, final

import torch
from torch import Tensor, nn

from holdfast.certificates.certificates import Certificates
from holdfast.errors import require_extra
from holdfast.routing import Context, Router, Routing
from holdfast.routing.bounds import ABOVE, Norm, check_norm, lengths
from holdfast.routing.parts import TINY

NUMBERS_AT_A_TIME = 2**23  # numbers drawn at a time; fixed, because a generator's numbers depend on the size of each draw
SAMPLES_AT_A_TIME = 16  # by `MajorityVote`; fixed for the same reason
BITS = 62  # of a set that are packed into one integer
BATCH = 256  # copies in a forward, by default

Route = Callable[[Tensor], Routing]
Classify = Callable[[Tensor], Tensor]  # inputs (n, ...) to logits (n, classes)


@dataclass(frozen=True)
class Smoothing:
    """The noise of a majority vote.

    sigma      standard deviation of the noise, in every feature
    samples    number of draws that estimate the probability of the set, or of the class
    selection  number of other draws that choose it
    alpha      probability that the certificate of one token, or of one input, is wrong
    first      number of the first token or input: `i` of a call has the noise of number `first + i`, in any batch
    """

    sigma: float
    samples: int = 1000
    selection: int = 100
    alpha: float = 0.001
    seed: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"sigma is {self.sigma}; the noise needs a positive standard deviation.")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; the probability of an error must be between 0 and 1.")
        if self.samples < 1 or self.selection < 1:
            raise ValueError(f"samples is {self.samples} and selection {self.selection}; both must be at least 1.")


def generator_of(*place: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose numbers depend only on `place`, the seed and what they are for, and on the kind of device."""
    digest = hashlib.blake2b(" ".join(map(str, place)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def noise_blocks(shape: Sequence[int], count: int, *place: object, device: torch.device) -> Iterator[Tensor]:
    """Yield `count` rows (n, *shape) of standard normal numbers, some at a time; each block has a generator of its own.

    They are drawn on the device: 10,000 copies of an image take a CPU longer to draw than a GPU to classify.
    """
    rows = max(1, NUMBERS_AT_A_TIME // max(1, torch.Size(shape).numel()))
    for number, start in enumerate(range(0, count, rows)):
        source = generator_of(*place, number, device=device)
        yield torch.randn(min(rows, count - start), *shape, generator=source, device=device)


def lowest_chance(hits: Tensor, samples: int, alpha: float) -> Tensor:
    """Return the lower Clopper-Pearson bound, float64 on the CPU, of the chance of a draw of which `hits` were counted."""
    from scipy.special import betaincinv

    counts = hits.double().cpu().numpy()
    found: Tensor = torch.as_tensor(betaincinv(counts, samples - counts + 1, alpha)).nan_to_num(0.0)  # NaN for no hit
    return found


def certified_radius(lowest: Tensor, sigma: float) -> Tensor:
    """Return the l2 radius within which the chance stays above 1/2; 0 if its lower bound is at most 1/2."""
    return sigma * torch.special.ndtri(lowest).clamp_min(0) / ABOVE


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
        for start in range(0, count, SAMPLES_AT_A_TIME):
            block = torch.stack(
                [torch.randn(SAMPLES_AT_A_TIME, rows.shape[1], generator=source) for source in sources], dim=1
            )
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


@final
@dataclass(frozen=True)
class PredictionCertificates:
    """The certificates of the smoothed classifier at some inputs."""

    classes: Tensor  # (B,) int64: the class that the draws of the selection gave most often
    hits: Tensor  # (B,) int64: how many of `samples` other draws gave it
    smoothing: Smoothing
    radius: Tensor = field(init=False)  # (B,) float64: the class stays at every l2 distance below it; 0 where it abstains

    def __post_init__(self) -> None:
        lowest = lowest_chance(self.hits, self.smoothing.samples, self.smoothing.alpha)
        object.__setattr__(self, "radius", certified_radius(lowest, self.smoothing.sigma))

    @property
    def abstained(self) -> Tensor:
        """(B,) bool: the lower bound of the chance of the class is at most 1/2, so that nothing is certified."""
        return self.radius == 0

    def accuracy(self, labels: Tensor, radius: float = 0.0) -> float:
        """Return the certified accuracy: the share of inputs with the right class and a radius above `radius`."""
        return float(((self.classes == labels.cpu()) & (self.radius > radius)).double().mean())


@torch.no_grad()
def certify_predictions(
    classify: Classify, inputs: Tensor, smoothing: Smoothing, *, batch: int = BATCH
) -> PredictionCertificates:
    """Return the radius of each of `inputs (B, ...)`, within which the majority vote of `classify` under noise is one class.

    classify    from copies of an input (n, ...) to logits (n, classes); a normalisation belongs inside it
    batch       copies in one forward: 1 if a copy's logits depend on the other copies
    """
    require_extra("certifying predictions", "scipy")
    if not inputs.is_floating_point() or not inputs.isfinite().all():
        raise ValueError(f"inputs are {inputs.dtype}; expected finite floating-point numbers, to which noise can be added.")
    if batch < 1:
        raise ValueError(f"batch is {batch}; a forward needs at least 1 copy.")
    if isinstance(classify, nn.Module) and classify.training:
        raise ValueError("the classifier is in training mode, where its outputs may be random; call eval() first.")
    classes, hits, sigma = [], [], smoothing.sigma
    for number, one in enumerate(inputs, smoothing.first):
        selected, counted = (
            count_classes(classify, one, sigma, count, smoothing.seed, purpose, number, batch=batch)
            for purpose, count in (("selection", smoothing.selection), ("samples", smoothing.samples))
        )
        classes.append(int(selected.argmax()))  # of several, the first
        hits.append(int(counted[classes[-1]]))
    return PredictionCertificates(torch.tensor(classes, dtype=torch.int64), torch.tensor(hits, dtype=torch.int64), smoothing)


@torch.no_grad()
def count_classes(classify: Classify, one: Tensor, sigma: float, count: int, *place: object, batch: int = BATCH) -> Tensor:
    """Return (classes,) int64 on the CPU: how many of `count` noisy copies of an input get each class.

    The noise depends only on `place`, the seed and what the copies are for, and on the kind of device. A copy with a logit
    that is NaN gets no class.
    """
    counts: Tensor | None = None
    for block in noise_blocks(one.shape, count, *place, device=one.device):
        for part in block.split(batch):
            logits = classify((one.float() + sigma * part).to(one.dtype))
            if logits.dim() != 2 or len(logits) != len(part):
                got = tuple(logits.shape)
                raise ValueError(f"the classifier returned shape {got} for {len(part)} inputs; expected (inputs, classes).")
            counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device) if counts is None else counts
            counts.scatter_add_(0, logits.argmax(1), (~logits.isnan().any(1)).long())
    assert counts is not None
    return counts.cpu()
