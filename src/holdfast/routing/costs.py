"""What a part of a router costs beyond the model around it, and how many experts a token uses: records that parts fill in.

    d width of tokens, E experts, C clusters, r width of what tokens are compared by, M tokens that a token is mixed with on
    average, D and D_v widths of a head's keys and values, H heads, b bytes a number

FLOPs are of matrix products only, a multiply-add counts 2, and they are of the products that our code runs. What is not one
(softmax, sorting, scaling) is not counted, here or in the model. Parameters and state are counted from the part itself.
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor

FLOAT = 4  # routing is float32 whatever the model is
INTEGER = 8


@final
@dataclass(frozen=True)
class Place:
    """The layer that a part works in."""

    dim: int  # d
    experts: int  # E
    length: int  # N, tokens of a sequence
    mixed: float  # M
    heads: int  # H
    key_width: int  # D
    value_width: int  # D_v
    number: int  # b


@final
@dataclass(frozen=True)
class Cost:
    """The cost of one part in one layer. FLOPs and bytes are those of one token, except the sums."""

    part: str  # the name under which a plan adds it up
    forward: float = 0.0
    backward: float = 0.0
    disturbing: float = 0.0  # of noise: in training, in the forward and in a recomputation
    learning: float = 0.0  # in training, in the forward, not in a recomputation
    kept: float = 0.0  # bytes kept for the backward
    cached: float = 0.0  # bytes kept while decoding
    summed: int = 0  # bytes that every rank contributes to sums, each training forward
    summed_again: int = 0  # of these, in a recomputation

    @property
    def training(self) -> float:
        """FLOPs of a training step."""
        return self.forward + self.disturbing + self.learning + self.backward

    @property
    def again(self) -> float:
        """FLOPs of a recomputation, which learns nothing."""
        return self.forward + self.disturbing


@final
@dataclass(frozen=True)
class Active:
    """How many experts a token uses on average, and how many slots a layer makes room for."""

    training: float
    inference: float
    slots: int
    about: str = ""  # why the numbers are not certain


def projection_flops(matrix: Tensor) -> float:
    """Return the FLOPs of one token times `matrix`, which may be on `meta`."""
    return 2.0 * matrix.numel()


def mixing_flops(width: int, place: Place) -> tuple[float, float]:
    """Return the FLOPs of `kernels.token_mixing` with vectors of `width` and gates as values: forward and backward.

    The backward computes the scores again: 2 M (3 width + 2 E).
    """
    return 2.0 * place.mixed * (width + place.experts), 2.0 * place.mixed * (3 * width + 2 * place.experts)


def selection_bytes(slots: int, place: Place) -> float:
    """Return roughly what a selector keeps: gates, and for each slot an index and what its weight was computed from."""
    return FLOAT * place.experts + (INTEGER + 3 * FLOAT) * slots
