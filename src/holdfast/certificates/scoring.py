"""What a router's score is, as geometry: which planes order the experts, how its logits depend on the token.

`planes` has the order of the logits, `values` the logits themselves. For a linear score they are one. For cosines the planes
are linear in x, z.(e_i - e_j) = 0 with z = Omega x, and the logits are linear in the point z/|z| of a sphere; a bound there
becomes one in x by how far a move of x can turn z:

    |dx| <= r  =>  |dz| <= s r, s the stretch of Omega  =>  the angle is at most asin(s r / |z|), and the chord is
    |dz'| <= 2 sin(angle / 2) for z' = z/|z|;  so r = |z| c sqrt(1 - c^2/4) / s  for a chord c up to sqrt(2)
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.certificates.affine import Affine, Scales
from holdfast.certificates.arithmetic import Arithmetic, representable, unit
from holdfast.routing import Clustered, Context, Cosine, Frozen, Linear, LinearScore, Score
from holdfast.routing.bounds import Norm
from holdfast.routing.scores import SHORTEST

PROBES = (2.0**-20, 1.0, 2.0**20)
FARTHEST = 0.9  # of the way at which z could become 0: nearer to it nothing is known about rounding


class NoBound(ValueError):
    """No exact radius and no lower bound is known for this router."""


@dataclass(frozen=True)
class Scoring(ABC):
    """A score at some tokens (abstract)."""

    planes: Affine
    matrix: Tensor  # (n,d): what the router multiplies tokens with
    inputs: int  # how many factors of that product were rounded to float32 first

    @property
    @abstractmethod
    def values(self) -> Affine:
        """Logits, linear in points in which radii are measured with `values.norm`."""

    @abstractmethod
    def outward(self, radius: Tensor) -> Tensor:
        """A radius around the points of `values`, as one around the tokens."""

    @property
    @abstractmethod
    def pace(self) -> Tensor:
        """(T,): moving the token by r moves its point of `values` by at most moved(r pace)."""

    @abstractmethod
    def moved(self, distance: Tensor) -> Tensor:
        """See `pace`; the same function for all tokens, increasing."""

    @abstractmethod
    def plane_errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        """(T,E): at most how far rounding can move the keys of `planes`, at any token within `reach (T,)`."""

    @abstractmethod
    def value_errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        """(T,E): the same for logits."""

    def product_errors(self, arithmetic: Arithmetic) -> Tensor:
        """(T,n): the error of the product with `matrix` at the tokens as they are.

        What rounding tokens and weights to the dtype does is known and taken as it is; the rest is at worst.
        """
        exact = self.planes.points * self.planes.factors
        features, matrix = (given.to(arithmetic.dtype).double() for given in (exact, self.matrix))
        added = self.added.to(arithmetic.dtype).double()
        products = features @ matrix.t()
        known = (products + added - exact @ self.matrix.t() - self.added).abs()
        summing = arithmetic.products(self.terms) * (features.abs() @ matrix.abs().t() + added.abs())
        stored = (products + added).abs() + summing
        if added.any():  # a bias may be added after the product is stored, and the sum is stored again
            stored = stored + products.abs() + summing
        errors = known + summing + arithmetic.output * stored + arithmetic.underflow(self.terms)
        return errors.nan_to_num(nan=torch.inf)  # too large for the dtype

    @property
    def added(self) -> Tensor:
        """(n,): what is added to the product before it is stored."""
        return torch.zeros_like(self.matrix[:, 0])

    @property
    def terms(self) -> int:
        """How many roundings a result of the product has gone through."""
        scales = self.planes.scales
        return self.matrix.shape[1] + (0 if scales is None else scales.table.shape[0] + 8)

    def _inputs(self, arithmetic: Arithmetic) -> int:
        """How many of tokens and weights are rounded to the dtype of the arithmetic. Tokens that an attacker moves too."""
        if arithmetic.dtype in (torch.float32, torch.float64):
            return self.inputs
        return sum(not representable(given, arithmetic.dtype) for given in (self.planes.points, self.matrix))

    def rows(self, rows: slice) -> "Scoring":
        """Some of the tokens."""
        return replace(self, planes=self.planes.rows(rows))


@dataclass(frozen=True)
class LinearScoring(Scoring):
    """l = (x * m) W^T + b."""

    @property
    def values(self) -> Affine:
        return self.planes

    def outward(self, radius: Tensor) -> Tensor:
        return radius

    @property
    def pace(self) -> Tensor:
        return torch.ones_like(self.planes.points[:, 0])

    def moved(self, distance: Tensor) -> Tensor:
        return distance

    @property
    def terms(self) -> int:
        return super().terms + bool(self.planes.bias.any())

    @property
    def added(self) -> Tensor:
        return self.planes.bias

    def plane_errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        sizes, growth = self.planes.magnitudes(self.matrix.abs())
        products = arithmetic.products(self.terms, self._inputs(arithmetic))
        far = reach.unsqueeze(1)
        stored = 2 * arithmetic.output * (self.planes.logits.abs() + self.planes.bias.abs() + far * self.planes.slopes)
        summed = products * (sizes + self.planes.bias.abs() + far * growth)
        lost = (growth > 0) * arithmetic.underflow(self.terms)  # sums of 0 are 0
        return summed * (1 + 2 * arithmetic.output) + stored + lost

    def value_errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        return self.plane_errors(arithmetic, reach)


@dataclass(frozen=True)
class CosineScoring(Scoring):
    """l = cos(Omega (x * m), e) / temperature."""

    units: Tensor  # (E,n): the embeddings, of length 1
    temperature: float

    @property
    def projected(self) -> Tensor:
        return (self.planes.points * self.planes.factors) @ self.matrix.t()

    @property
    def values(self) -> Affine:
        projected = self.projected
        points = projected / projected.norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
        weight = self.units / self.temperature
        return Affine(points, weight, torch.zeros_like(weight[:, 0]), "l2")

    def _lengths(self) -> tuple[Tensor, Tensor]:
        """|z|, and how far z moves for each unit that the token moves."""
        return self.projected.norm(dim=-1), self.planes.stretches(self.matrix)

    def outward(self, radius: Tensor) -> Tensor:
        length, speed = self._lengths()
        chord = radius.clamp(max=math.sqrt(2))
        # Shorter than SHORTEST, a projection is not normalised any more, and no chord.
        farthest = (length - SHORTEST).clamp_min(0).minimum(FARTHEST * length)
        return (length * chord * (1 - chord.square() / 4).sqrt()).minimum(farthest) / speed

    @property
    def pace(self) -> Tensor:
        length, speed = self._lengths()
        return speed / (length - SHORTEST).clamp_min(torch.finfo(torch.float64).tiny)

    def moved(self, distance: Tensor) -> Tensor:
        return (2 * torch.sin(torch.asin(distance.clamp(max=1)) / 2)).where(distance < 1, 2.0)

    def plane_errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        sizes, growth = self.planes.magnitudes(self.units.abs() @ self.matrix.abs())
        length, speed = self._lengths()
        far = reach.unsqueeze(1)
        summed = self._products(arithmetic) * (sizes + far * growth)
        return summed + (arithmetic.output * (length + reach * speed) + arithmetic.underflow(self.terms)).unsqueeze(1)

    def value_errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        length, speed = self._lengths()
        shortest = (length - reach * speed).clamp_min(torch.finfo(torch.float64).tiny)
        sizes, growth = self.planes.magnitudes(self.matrix.abs())
        of_length = self._products(arithmetic) * (sizes.norm(dim=-1) + reach * growth.norm(dim=-1)) / shortest
        of_length = of_length + arithmetic.output * (length + reach * speed) / shortest
        of_products = self.plane_errors(arithmetic, reach) / shortest.unsqueeze(1)
        return (of_products + (of_length + self.finishing * unit(torch.float32)).unsqueeze(1)) / self.temperature

    @property
    def finishing(self) -> int:
        """Roundings after the product: two normalisations, the cosines, the temperature."""
        return 3 * self.matrix.shape[0] + 16

    def _products(self, arithmetic: Arithmetic) -> float:
        after = (1 + unit(torch.float32)) ** self.finishing
        return (1 + arithmetic.products(self.terms, self._inputs(arithmetic))) * after - 1


def read_score(score: Score, tokens: Tensor, context: Context, norm: Norm) -> Scoring:
    """A score of a router at tokens (B,N,d); `NoBound` where it is neither linear nor a cosine."""
    scales = None
    rows = tokens.reshape(-1, tokens.shape[-1])
    if isinstance(score, Clustered):
        features = score.features(tokens, context)
        scales = None if features is None else Scales(*(part.detach().double() for part in features))
        score = score.base
    if not isinstance(score, LinearScore):
        raise NoBound(f"the score {type(score).__name__} is neither linear in the token nor a cosine")
    matrix = score.matrix.detach().to(rows.device).double()
    inputs = sum(given.dtype == torch.float64 for given in (tokens, score.matrix))
    if type(score) is Cosine:  # not a subclass, which may do anything with the product
        units = torch.nn.functional.normalize(score.embeddings.detach().double(), dim=-1)
        planes = Affine(rows.double(), units @ matrix, torch.zeros_like(units[:, 0]), norm, scales)
        return CosineScoring(planes, matrix, inputs, units, float(score.log_temperature.double().exp()))
    bias = _added(score, rows)
    return LinearScoring(Affine(rows.double(), matrix, bias.double(), norm, scales), matrix, inputs)


def linear_score(weight: Tensor, bias: Tensor | None, tokens: Tensor, norm: Norm) -> LinearScoring:
    """Plain weights (E,d) at tokens (T,d)."""
    matrix = weight.detach().to(tokens.device).double()
    added = torch.zeros_like(matrix[:, 0]) if bias is None else bias.detach().to(matrix)
    inputs = sum(given.dtype == torch.float64 for given in (tokens, weight))
    return LinearScoring(Affine(tokens.double(), matrix, added, norm), matrix, inputs)


def _added(score: LinearScore, rows: Tensor) -> Tensor:
    """b (E,) of a score whose `finish` adds b. A score that we do not know is asked at the tokens and far from them."""
    zeros = torch.zeros(1, 1, score.matrix.shape[0], device=rows.device)
    with torch.no_grad():
        bias = score.finish(zeros).flatten().detach()
        if type(score) not in (Linear, Frozen):
            projected = (rows.float() @ score.matrix.float().t()).unsqueeze(0)
            if bias.numel() != projected.shape[-1] or not all(
                torch.equal(score.finish(projected * times), projected * times + bias) for times in PROBES
            ):
                raise NoBound(f"the score {type(score).__name__} does more to its products than adding a bias")
    return bias
