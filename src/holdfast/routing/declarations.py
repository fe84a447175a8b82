"""What parts of a router declare about themselves, so that certificates and other instruments need not know their classes.

T tokens, E experts, d features of a token, M conditions a token. The index E stands for no expert: its key is a threshold.


What a part of a router costs beyond the model around it, and how many experts a token uses: records that parts fill in.

    d width of tokens, E experts, C clusters, r width of what tokens are compared by, M tokens that a token is mixed with on
    average, D and D_v widths of a head's keys and values, H heads, b bytes a number

FLOPs are of matrix products only, a multiply-add counts 2, and they are of the products that our code runs. What is not one
(softmax, sorting, scaling) is not counted, here or in the model. Parameters and state are counted from the part itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

import torch
from torch import Tensor

Compared = Literal["logits", "gates"]


class NoBound(ValueError):
    """No certificate is known. A part may raise it with its reason, where it declares nothing for some options."""


@final
@dataclass(frozen=True)
class GateFunction:
    """How gates are made of logits. Certificates are known for "softmax", "sigmoid" and "relu"."""

    name: str
    function: Callable[[Tensor], Tensor]

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)


SOFTMAX = GateFunction("softmax", partial(torch.softmax, dim=-1))
SIGMOID = GateFunction("sigmoid", torch.sigmoid)
RELU = GateFunction("relu", torch.relu)


@final
@dataclass(frozen=True)
class Scales:
    """The factors m of each token's features: mixture times table, and 1 for a token whose mixture is 0."""

    mixture: Tensor  # (T,C)
    table: Tensor  # (C,d), positive


@final
@dataclass(frozen=True)
class Order:
    """Keys that are affine in the token and have the order of the logits: keys = z combine^T + bias, z = (x * m) matrix^T.

    They also have the sign of the logits, unless `shifted`: then the logits are the keys plus a number that is the same for
    all experts of a token, which neither a top k nor a softmax sees.
    """

    matrix: Tensor  # (n,d): what the score multiplies tokens with, in its own dtype
    bias: Tensor | None = None  # (E,)
    combine: Tensor | None = None  # (E,n) float64, rows of length 1; None: the products are the keys, n = E
    roundings: int = 0  # with `combine`: how many float32 roundings a logit goes through after the product
    scales: Scales | None = None  # m; None is 1
    shifted: bool = False
    # What float32 rounding outside of the product and the bias can do to a key, at most, of a token of this length in l2:
    # lengths (T,1) to errors (T,1) or (T,E), increasing.
    rounding: Callable[[Tensor], Tensor] | None = None


@final
@dataclass(frozen=True)
class Cosines:
    """logits = cosine(z, combine) / temperature."""

    temperature: float
    shortest: float  # a z that is shorter than this is divided by this instead of by its length


@final
@dataclass(frozen=True)
class Values:
    """The logits themselves: the keys of the order, or with `cosines` what these make of the products z."""

    cosines: Cosines | None = None


@final
@dataclass(frozen=True)
class Mixing:
    """Tokens of a sequence share their gates: g_i = (1 - strength) p_i + strength sum_j W_ij p_j, W_i a distribution.

    change  how far any logarithm of W_i, before W_i is normalised, can change when every token of the sequence is moved by
            up to `radius (T,)`: change(radius, rounded) to (T,), increasing. With `rounded` it includes what float32
            rounding can do. None: W does not depend on the router's input
    """

    strength: float
    change: Callable[[Tensor, bool], Tensor] | None = None


@final
@dataclass(frozen=True)
class Conditions:
    """What must hold for a token to keep its set: an AND of ORs of conditions sum(keys of ahead) > sum(keys of behind).

    All conditions of way 0 must hold; the ways 2a - 1 and 2a are alternatives: all conditions of one of the two must hold.
    A key is a logit or a gate (after informers, an informed gate) plus `bias`; that of the index E is `threshold`. Ties go
    to the lower index, and a threshold must be exceeded. `holdfast.routing.conditions` makes the usual ones.
    """

    ahead: Tensor  # (T,M,h)
    behind: Tensor  # (T,M,h)
    valid: Tensor  # (T,M) bool: which conditions there are
    way: Tensor  # (T,M)
    chosen: Tensor  # (T,E) bool: the set that they keep
    compares: Compared = "logits"
    threshold: float = 0.0
    bias: Tensor | None = None  # (E,)

    @property
    def experts(self) -> int:
        return self.chosen.shape[1]

    def sums(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides' sums (T,M) of `keys (T,E+1)`."""
        ahead, behind = (keys.gather(1, side.flatten(1)).view(side.shape).sum(-1) for side in (self.ahead, self.behind))
        return ahead, behind

    def sides(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two sides (T,R,h) of the conditions `which (T,R)`."""
        index = which.unsqueeze(-1).expand(-1, -1, self.ahead.shape[-1])
        return self.ahead.gather(1, index), self.behind.gather(1, index)

    def settled(self, radii: Tensor) -> Tensor:
        """Return radii (T,M) with infinity for conditions that need not hold: of two alternatives, those of the worse."""
        radii = radii.nan_to_num(nan=0.0, posinf=torch.inf).where(self.valid, torch.inf)
        alternatives = int(self.way.max() + 1) // 2 if self.way.numel() else 0
        if alternatives:
            best = radii.new_full((len(radii), 2 * alternatives + 1), torch.inf).scatter_reduce(1, self.way, radii, "amin")
            first_worse = best[:, 1::2] < best[:, 2::2]
            dropped = torch.stack([first_worse, ~first_worse], dim=2).flatten(1)
            dropped = torch.nn.functional.pad(dropped, (1, 0))  # what must hold in any case
            radii = radii.where(~dropped.gather(1, self.way), torch.inf)
        return radii

    @property
    def ties_hold(self) -> Tensor:
        """(T,M) bool: which conditions hold where their sides are equal."""
        ahead, behind = self.ahead[..., 0], self.behind[..., 0]
        return (ahead == self.experts) | ((ahead < behind) & (behind < self.experts))


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
