"""What parts of a router declare about themselves, so that certificates and plans need not know their classes.

**For certificates.** `Order` and `Values` describe a score, `Mixing` a token-side informer, `Conditions` a selector.

    T tokens, E experts, d width of a token, M conditions per token. The index E is the threshold, not an expert.

**For plans.** `Cost` is what a part costs in one layer (`LayerSizes`), `ActiveExperts` how many experts a token uses.

FLOPs are those of the matrix products that the code runs; a multiply-add counts 2. Other operations (softmax, sorting,
scaling) are not counted, here or in the model. Parameters and state are counted from the part itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

import torch
from torch import Tensor

Compared = Literal["logits", "gates"]
# How a layer runs its experts: each on the tokens that selected it (MoE), on slots that are mixtures of tokens (SoftMoE), or
# merged into one expert for each sequence (SMEAR).
LayerKind = Literal["moe", "soft", "smear"]


class NoCertificate(ValueError):
    """No certificate is known. A part may raise it, with the reason, if it has no declaration for some of its options."""


@final
@dataclass(frozen=True)
class GateFunction:
    """The function from logits to gates. Certificates are known for "softmax", "sigmoid" and "relu"."""

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
    """The factors m of each token's features: mixture @ table, and 1 for a token whose mixture is 0."""

    mixture: Tensor  # (T,C)
    table: Tensor  # (C,d), not negative


@final
@dataclass(frozen=True)
class Order:
    """Keys that are affine in the token and ordered as its logits: keys = z combine^T + bias, z = (x * m) matrix^T.

    Keys also have the sign of the logits, unless `shifted`: then the logits are the keys plus a number that is the same for
    all experts of a token. It changes neither a top-k nor a softmax.
    """

    matrix: Tensor  # (n,d): the matrix that the score multiplies tokens with, in its own dtype
    bias: Tensor | None = None  # (E,)
    combine: Tensor | None = None  # (E,n) float64, rows of length 1; None: the products are the keys, n = E
    roundings: int = 0  # with `combine`: the number of float32 roundings of a logit after the product
    scales: Scales | None = None  # m; None is 1
    shifted: bool = False
    # A bound of the float32 rounding error of a key, besides the product and the bias: from the l2 lengths of tokens (T,1)
    # to errors (T,1) or (T,E), increasing.
    rounding: Callable[[Tensor], Tensor] | None = None
    # (T,): which block of columns of the matrix (n, blocks * d) a token is multiplied with; None: there is one. It excludes
    # `scales` and `combine`.
    block: Tensor | None = None


@final
@dataclass(frozen=True)
class Cosines:
    """logits = cosine(z, combine) / temperature."""

    temperature: float
    shortest: float  # a shorter z is divided by this number instead of by its length


@final
@dataclass(frozen=True)
class Values:
    """How logits follow from the keys of the order: they are the keys, or with `cosines` a function of the products z."""

    cosines: Cosines | None = None


@final
@dataclass(frozen=True)
class Mixing:
    """Tokens of a sequence share their gates: g_i = (1 - strength) p_i + strength sum_j W_ij p_j, with sum_j W_ij = 1.

    change  change(radius, rounded) returns (T,): a bound for the change of the logarithms of W_i, before W_i is normalised,
            if every token of the sequence is perturbed by up to `radius (T,)`. It increases with the radius. With `rounded`
            it includes float32 rounding. None: W does not depend on the router's input
    roundings   the number of float32 roundings of a gate besides those of the sum over j and of the mixture with `strength`
    """

    strength: float
    change: Callable[[Tensor, bool], Tensor] | None = None
    roundings: int = 0


@final
@dataclass(frozen=True)
class Conditions:
    """Conditions under which a token keeps its set: an AND of ORs of sum(keys of ahead) > sum(keys of behind).

    All conditions of way 0 must be true. The ways 2a - 1 and 2a are alternatives: all conditions of one of the two must be
    true. A key is a logit or a gate (after informers, an informed gate) plus `bias`; the key of index E is `threshold`. Ties
    go to the lower index, and a threshold must be exceeded. `holdfast.routing.conditions` builds the usual ones.
    """

    ahead: Tensor  # (T,M,h)
    behind: Tensor  # (T,M,h)
    valid: Tensor  # (T,M) bool: False where a token has fewer conditions than others
    way: Tensor  # (T,M)
    chosen: Tensor  # (T,E) bool: the selected set
    compares: Compared = "logits"
    threshold: float = 0.0
    bias: Tensor | None = None  # (E,)

    @property
    def experts(self) -> int:
        return self.chosen.shape[1]

    def sums(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums (T,M) of `keys (T,E+1)` on both sides of each condition."""
        ahead, behind = (keys.gather(1, side.flatten(1)).view(side.shape).sum(-1) for side in (self.ahead, self.behind))
        return ahead, behind

    def sides(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two sides (T,R,h) of the conditions `which (T,R)`."""
        index = which.unsqueeze(-1).expand(-1, -1, self.ahead.shape[-1])
        return self.ahead.gather(1, index), self.behind.gather(1, index)

    def required_radii(self, radii: Tensor) -> Tensor:
        """Return `radii (T,M)`, with infinity for those that are not needed: of the alternative that fails first."""
        radii = radii.nan_to_num(nan=0.0, posinf=torch.inf).where(self.valid, torch.inf)
        alternatives = int(self.way.max() + 1) // 2 if self.way.numel() else 0
        if alternatives:
            best = radii.new_full((len(radii), 2 * alternatives + 1), torch.inf).scatter_reduce(1, self.way, radii, "amin")
            first_worse = best[:, 1::2] < best[:, 2::2]
            dropped = torch.stack([first_worse, ~first_worse], dim=2).flatten(1)
            dropped = torch.nn.functional.pad(dropped, (1, 0))  # way 0 is always needed
            radii = radii.where(~dropped.gather(1, self.way), torch.inf)
        return radii

    @property
    def ties_hold(self) -> Tensor:
        """(T,M) bool: which conditions are true if their sides are equal."""
        ahead, behind = self.ahead[..., 0], self.behind[..., 0]
        return (ahead == self.experts) | ((ahead < behind) & (behind < self.experts))


FLOAT = 4  # bytes: routing is float32, whatever the dtype of the model
INTEGER = 8  # bytes


@final
@dataclass(frozen=True)
class LayerSizes:
    """The sizes of the layer that a cost is declared for."""

    dim: int  # width of a token
    experts: int
    length: int  # tokens of a sequence
    mixed: float  # tokens that a token is mixed with, on average
    heads: int  # of the attention before the layer
    key_width: int  # of a head
    value_width: int  # of a head
    number: int  # bytes of a number of the model
    expert_parameters: int = 0  # of one expert


@final
@dataclass(frozen=True)
class Cost:
    """The cost of one part in one layer: FLOPs and bytes per token, except `summed` and `summed_again`."""

    part: str  # the name of the row in a plan
    forward: float = 0.0
    backward: float = 0.0
    noise: float = 0.0  # FLOPs of noise: in training, in the forward and in a recomputation
    state_update: float = 0.0  # FLOPs in training, in the forward, not in a recomputation
    kept: float = 0.0  # bytes kept for the backward
    cached: float = 0.0  # bytes kept in the cache while decoding
    summed: int = 0  # bytes that each rank contributes to sums over ranks in a training forward
    summed_again: int = 0  # of these bytes, those that a recomputation sums again
    gathered: float = 0.0  # bytes per token that each rank sends to all others in a training forward and a recomputation

    @property
    def training(self) -> float:
        """FLOPs of a training step."""
        return self.forward + self.noise + self.state_update + self.backward

    @property
    def again(self) -> float:
        """FLOPs of a recomputation, which updates no state."""
        return self.forward + self.noise


@final
@dataclass(frozen=True)
class ActiveExperts:
    """How many experts a token uses on average, and how many slots a layer allocates for it.

    In a layer of another kind than "moe" these are the rows that experts compute, divided by the number of tokens.
    """

    training: float
    inference: float
    slots: float
    about: str = ""  # why the numbers are estimates
    rows: float | None = None  # rows of experts that a layer allocates for a token in training; None: one for each slot

    @property
    def training_rows(self) -> float:
        """Rows of experts that a layer allocates for a token in training."""
        return self.slots if self.rows is None else self.rows


def projection_flops(matrix: Tensor) -> float:
    """Return the FLOPs of the product of one token and `matrix`, which may be on `meta`."""
    return 2.0 * matrix.numel()


def mixing_flops(width: int, sizes: LayerSizes) -> tuple[float, float]:
    """Return the FLOPs per token of `kernels.token_mixing` for vectors of `width`: of the forward and of the backward.

    The backward computes the scores again: 2 M (3 width + 2 E), for M mixed tokens and E gates.
    """
    return 2.0 * sizes.mixed * (width + sizes.experts), 2.0 * sizes.mixed * (3 * width + 2 * sizes.experts)


def selection_bytes(slots: int, sizes: LayerSizes) -> float:
    """Return about how many bytes per token a selector keeps: gates, and an index and three numbers for each slot."""
    return FLOAT * sizes.experts + (INTEGER + 3 * FLOAT) * slots
