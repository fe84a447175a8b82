"""What each part of a router costs beyond the model around it, by its formulas: one function a part.

    d width of tokens, E experts, C clusters, n rows of the score's matrix, r width of what tokens are compared by, M tokens
    that a token is mixed with on average, D and D_v widths of a head's keys and values, H heads, b bytes a number

FLOPs are of matrix products only, a multiply-add counts 2, and they are of the products that our code runs. What is not one
(softmax, sorting, scaling) is not counted, here or in the model. Sizes are read off the part itself, which may be on `meta`.
"""

import math
from dataclasses import dataclass
from functools import singledispatch

from holdfast.kernels.statistics import DIGITS
from holdfast.routing import AttentionPosterior, Clustered, ExpertGraph, Router, Similarity
from holdfast.routing.noise import GaussianNoise
from holdfast.routing.parts import LinearScore, Part, Selector
from holdfast.routing.scores import Cosine, Frozen
from holdfast.routing.selection import ReLU, TopK, TopP
from holdfast.routing.smoothing import SmoothTopK
from holdfast.routing.token_graph import entropy_step

FLOAT = 4  # routing is float32 whatever the model is
INTEGER = 8


@dataclass(frozen=True)
class Place:
    """The layer a part works in."""

    dim: int
    experts: int
    length: int  # N
    mixed: float  # M
    heads: int
    key_width: int
    value_width: int
    number: int  # b


@dataclass(frozen=True)
class Cost:
    """Of one part in one layer. FLOPs and bytes are a token's, except the sums."""

    part: str
    forward: float = 0.0
    backward: float = 0.0
    disturbing: float = 0.0  # in training, in the forward and in a recomputation
    learning: float = 0.0  # in training, in the forward, not in a recomputation
    kept: float = 0.0  # bytes kept for the backward
    cached: float = 0.0  # bytes kept while decoding
    summed: int = 0  # bytes that every rank contributes to sums, each training forward
    summed_again: int = 0  # of these, in a recomputation
    known: bool = True

    @property
    def training(self) -> float:
        return self.forward + self.disturbing + self.learning + self.backward

    @property
    def again(self) -> float:
        """In a recomputation, which learns nothing."""
        return self.forward + self.disturbing


@dataclass(frozen=True)
class Active:
    """How many experts a token uses, and how many slots a layer makes room for."""

    training: float
    inference: float
    slots: int
    about: str = ""  # where the number is not certain


@singledispatch
def cost(part: Part, place: Place) -> Cost:
    """Of a part that we have no formulas for: its parameters and state are counted all the same, from the part."""
    return Cost(type(part).__name__, known=False)


@cost.register
def _(part: LinearScore, place: Place) -> Cost:
    forward = _projecting(part) + _finishing(part)
    backward = forward if isinstance(part, Frozen) else 2 * forward  # its weights ask for no gradient
    return Cost("score", forward, backward, kept=FLOAT * place.experts)


@cost.register
def _(part: Clustered, place: Place) -> Cost:
    """Beyond its base: scales are a product (T,C) by (C,d), made again in the backward; spreads take three such products."""
    if part.plain:
        return Cost("clusters")
    scaling = 2.0 * part.clusters * place.dim
    batch = part.stats == "batch"
    summed = FLOAT * (part.clusters + 2 * part.clusters * place.dim)
    return Cost(
        "clusters",
        forward=scaling + (3 * scaling if batch else 0),
        backward=scaling,
        learning=0 if batch else 3 * scaling,
        kept=FLOAT * part.clusters,
        summed=summed,
        summed_again=summed if batch else 0,
    )


@cost.register
def _(part: ExpertGraph, place: Place) -> Cost:
    """Gates times the graph, which has no gradient: 2 E^2 each way. Co-selections are a product of 0/1 matrices, another."""
    mix = 2.0 * place.experts**2
    return Cost(
        "expert graph", mix, mix, learning=mix, kept=FLOAT * place.experts, summed=FLOAT * place.experts * place.experts
    )


@cost.register
def _(part: Similarity, place: Place) -> Cost:
    if part.inert:
        return Cost("similarity")
    rank = place.dim if part.reduce is None else part.reduce.shape[0]
    reducing = 0.0 if part.reduce is None else 2.0 * place.dim * rank
    vector = place.number * place.dim if part.reduce is None else FLOAT * rank
    forward, backward = _mixing(rank, place)
    return Cost(
        "similarity",
        forward=reducing + forward,
        backward=2 * reducing + backward,
        kept=vector + FLOAT * (2 * place.experts + 1),
        cached=FLOAT * place.experts + vector + 1,
    )


@cost.register
def _(part: AttentionPosterior, place: Place) -> Cost:
    """Two products a pair of tokens, D and D_v wide; in training the entropies of all heads' attention too, of some tokens.

    W^T W of the head's projection (2 d D_v^2), made once a forward for all tokens, is not counted.
    """
    if part.inert:
        return Cost("attention posterior")
    width = place.key_width + place.value_width
    projecting = 2.0 * place.dim * place.value_width + 2.0 * place.value_width**2  # what it saw; norms of what it would say
    forward, backward = _mixing(width, place)
    return Cost(
        "attention posterior",
        forward=projecting + forward,
        backward=2 * projecting + backward,
        learning=2.0 * place.heads * place.key_width * place.mixed / entropy_step(place.length),
        kept=place.number * (width + place.key_width) + FLOAT * (2 * place.value_width + 2 * place.experts + 2),
        cached=FLOAT * (place.experts + 1) + 1,
        summed=FLOAT * part.heads + INTEGER,
    )


@cost.register
def _(part: TopK, place: Place) -> Cost:
    learned_noise = isinstance(part.noise, GaussianNoise) and part.noise.weight is not None
    noise = 2.0 * place.dim * place.experts if learned_noise else 0.0
    return Cost("selection", backward=2 * noise, disturbing=noise, kept=_selecting(part.slots, place))


@cost.register
def _(part: TopP, place: Place) -> Cost:
    return Cost("selection", kept=_selecting(place.experts, place))


@cost.register
def _(part: ReLU, place: Place) -> Cost:
    return Cost("selection", kept=_selecting(place.experts, place), summed=2 * FLOAT)


@cost.register
def _(part: SmoothTopK, place: Place) -> Cost:
    """The strip's width is an order statistic: two of them, by histograms that are summed over ranks, and two counts.

    So on a CPU; on a GPU the histograms are of bytes and smaller (16 KiB). Of the boundary loss only two counts are summed.
    """
    counts = 2 * INTEGER
    if part.control == "loss":
        return Cost("selection", kept=_selecting(place.experts, place), summed=counts, summed_again=counts)
    bins = sum(2**bits for _, bits in DIGITS)
    return Cost("selection", kept=_selecting(place.experts, place), summed=2 * bins * INTEGER + counts)


def costs(router: Router, place: Place) -> tuple[Cost, ...]:
    """Of a router's parts in their order; a score that wraps another comes after it."""
    found = []
    for part in router.parts:
        if isinstance(part, Clustered):
            found.append(cost(part.base, place))
        found.append(cost(part, place))
    return tuple(found)


@singledispatch
def active(select: Selector, experts: int) -> Active:
    """Of a selector that we do not know, the most there can be."""
    return Active(experts, experts, experts, f"{type(select).__name__}: at most")


@active.register
def _(select: TopK, experts: int) -> Active:
    about = "" if select.k_final is None else f"grows from {select.k} in training; counted at its end"
    return Active(select.slots, select.slots, select.slots, about)


@active.register
def _(select: TopP, experts: int) -> Active:
    """Gates that exceed p and sum to at most 1 are fewer than 1 / p. How many there are only the data say."""
    most = min(experts, max(1, math.ceil(1 / select.fixed_p) - 1))
    return Active(most, most, experts, "depends on the data; counted at most")


@active.register
def _(select: ReLU, experts: int) -> Active:
    return Active(select.k, select.k, experts, "steered to k; more at first")


@active.register
def _(select: SmoothTopK, experts: int) -> Active:
    training = min(select.k + select.budget, select.slots)
    inference = select.k if select.inference == "hard" else training
    return Active(training, inference, select.slots, "k and the budget, on average")


def _projecting(score: LinearScore) -> float:
    rows, dim = score.matrix.shape
    return 2.0 * rows * dim


def _finishing(score: LinearScore) -> float:
    return 2.0 * score.embeddings.numel() if isinstance(score, Cosine) else 0.0


def _mixing(width: int, place: Place) -> tuple[float, float]:
    """Forward and backward of `token_mixing.softmax_mix` with vectors of `width` and gates of E for values, in blocks.

    The backward makes the scores again: 2 M (3 width + 2 E).
    """
    return 2.0 * place.mixed * (width + place.experts), 2.0 * place.mixed * (3 * width + 2 * place.experts)


def _selecting(slots: int, place: Place) -> float:
    """Gates, and for each slot an index and what its weight was made of. Rough."""
    return FLOAT * place.experts + (INTEGER + 3 * FLOAT) * slots
