"""What parts of a router declare about themselves, so that certificates and other instruments need not know their classes.

T tokens, E experts, d features of a token, M conditions a token. The index E stands for no expert: its key is a threshold.
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
