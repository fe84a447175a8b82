"""What a score declares, as geometry in float64: which planes order the experts, how logits depend on the token.

`planes` has the order of the logits, `values` the logits themselves. For a linear score they are one. For cosines the planes
are linear in x, z.(e_i - e_j) = 0 with z = Omega x, and the logits are linear in the point z/|z| of a sphere; a bound there
becomes one in x by how far a move of x can turn z:

    |dx| <= r  =>  |dz| <= s r, s the stretch of Omega  =>  the angle is at most asin(s r / |z|), and the chord is
    |dz'| <= 2 sin(angle / 2) for z' = z/|z|;  so r = |z| c sqrt(1 - c^2/4) / s  for a chord c up to sqrt(2)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, representable
from holdfast.routing.bounds import Norm, dual, dual_scaled, spans, stretch, unit
from holdfast.routing.declarations import Cosines, NoBound, Order, Values

FARTHEST = 0.9  # of the way at which z could become 0: nearer to it nothing is known about rounding
MOST_HELD = 2**22  # elements of a table that is worth keeping for all tokens: 32 MiB


@final
@dataclass(frozen=True)
class FeatureScales:
    """m of each token, as declared by `Scales`, in float64."""

    mixture: Tensor
    table: Tensor

    @cached_property
    def kinds(self) -> tuple[Tensor, Tensor]:
        """The different m there are (U,n), and which is whose (T,): tokens of one cluster share theirs."""
        mixtures, index = self.mixture.unique(dim=0, return_inverse=True)
        return self._factors(mixtures), index

    def _factors(self, mixture: Tensor) -> Tensor:
        return mixture @ self.table + (1 - mixture.sum(1, keepdim=True))

    def rows(self, rows: slice) -> "FeatureScales":
        return replace(self, mixture=self.mixture[rows])

    def stretches(self, matrix: Tensor, norm: Norm) -> Tensor:
        """(T,): at least the stretch of matrix * m; equal to it where m is that of one cluster, by convexity elsewhere."""
        used = self.mixture.any(0)
        each = torch.zeros_like(self.table[:, 0])
        for cluster in used.nonzero().flatten().tolist():
            each[cluster] = stretch(matrix * self.table[cluster], norm)
        plain = 1 - self.mixture.sum(1)
        return self.mixture @ each + (plain * stretch(matrix, norm) if plain.any() else 0)


@final
@dataclass(frozen=True)
class Affine:
    """Keys that are affine in a point: l = (x * m) W^T + b, and how fast they can change. The index E has weight 0."""

    points: Tensor  # (T,n)
    weight: Tensor  # (E,n)
    bias: Tensor  # (E,)
    norm: Norm  # of perturbations of the points
    scales: FeatureScales | None = None
    held: Tensor | None = None  # the spans of all kinds, where few

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @cached_property
    def _kinds(self) -> tuple[Tensor, Tensor]:
        if self.scales is None:
            return torch.ones_like(self.weight[:1]), torch.zeros(
                len(self.points), dtype=torch.int64, device=self.points.device
            )
        return self.scales.kinds

    @cached_property
    def factors(self) -> Tensor | float:
        """m (T,n), or 1."""
        return 1.0 if self.scales is None else self._kinds[0][self._kinds[1]]

    @cached_property
    def logits(self) -> Tensor:
        """(T,E)"""
        return (self.points * self.factors) @ self.weight.t() + self.bias

    @cached_property
    def spans(self) -> Tensor:
        """(U,E+1,E+1): how fast l_i - l_j can change, for each kind of token."""
        if self.held is not None:
            return self.held
        with_threshold = torch.cat([self.weight, torch.zeros_like(self.weight[:1])])
        return spans(with_threshold, self._kinds[0], self.norm)

    @property
    def kind(self) -> Tensor:
        """(T,): whose spans are whose."""
        return self._kinds[1]

    @cached_property
    def slopes(self) -> Tensor:
        """(T,E): how fast l_e can change."""
        return self.spans[:, : self.experts, self.experts][self.kind]

    @cached_property
    def diameters(self) -> Tensor:
        """(T,): how fast any difference between two logits can change."""
        return self.spans[:, : self.experts, : self.experts].flatten(1).amax(1)[self.kind]

    def between(self, one: Tensor, other: Tensor) -> Tensor:
        """(T, ...): the spans of pairs of experts, given by their indices."""
        return self.spans[self.kind.view(-1, *[1] * (one.dim() - 1)), one, other]

    def steepness(self, coefficients: Tensor) -> Tensor:
        """(T,R): how fast sum_e c_e l_e can change, for `coefficients (T,R,E)`."""
        combined = coefficients @ self.weight
        return dual(combined * (self.factors if isinstance(self.factors, float) else self.factors.unsqueeze(1)), self.norm)

    def magnitudes(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Of a matrix (E,n) of magnitudes, what the points make of it (T,E), and how fast that can grow (T,E).

        For rounding errors. Those of m itself are in it: its mixture is computed beside 1 - sum, so 1 is added.
        """
        kinds, kind = self._kinds
        widened = kinds if self.scales is None else kinds + 1
        return (self.points.abs() * widened[kind]) @ matrix.t(), dual_scaled(matrix, widened, self.norm)[kind]

    def stretches(self, matrix: Tensor) -> Tensor:
        """(T,): at least how far |matrix (x * m)|_2 can be moved."""
        if self.scales is not None:
            return self.scales.stretches(matrix, self.norm)
        return torch.full_like(self.points[:, 0], stretch(matrix, self.norm))

    def rows(self, rows: slice) -> "Affine":
        """Some of the tokens, with what is dear and few already computed."""
        if self.scales is None:
            return replace(self, points=self.points[rows], held=self.spans)
        few = len(self._kinds[0]) * (self.experts + 1) ** 2 <= MOST_HELD
        part = replace(self, points=self.points[rows], scales=self.scales.rows(rows), held=None)
        if few:
            # The part has its own, smaller list of kinds: look up where each of them is in this one's.
            first = torch.zeros(len(part._kinds[0]), dtype=torch.int64, device=self.points.device)
            first[part.kind] = self.kind[rows]
            part = replace(part, held=self.spans[first])
        return part


@dataclass(frozen=True)
class Scoring(ABC):
    """A score at some tokens (abstract)."""

    name: str  # of the score, for messages
    planes: Affine
    matrix: Tensor  # (n,d): what the router multiplies tokens with
    inputs: int  # how many factors of that product were rounded to float32 first
    has_values: bool  # are the logits declared, or only their order?
    shifted: bool  # do logits have a part that is the same for all experts and not known?
    rounding: Callable[[Tensor], Tensor] | None  # as the order declares it

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

    @abstractmethod
    def plane_errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        """(T,E): how far rounding can move the keys of `planes` at the tokens as they are."""

    @abstractmethod
    def value_errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        """(T,E): the same for logits."""

    def require_values(self) -> None:
        if not self.has_values:
            raise NoBound(f"no certificate is known for {self.name}: it declares no values")

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


@final
@dataclass(frozen=True)
class LinearScoring(Scoring):
    """l = (x * m) W^T + b."""

    @property
    def values(self) -> Affine:
        self.require_values()
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
        return summed * (1 + 2 * arithmetic.output) + stored + lost + self._other_errors(reach)

    def value_errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        return self.plane_errors(arithmetic, reach)

    def plane_errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        return self.product_errors(arithmetic) + self._other_errors(torch.zeros_like(self.planes.points[:, 0]))

    def value_errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        return self.plane_errors_in_place(arithmetic)

    def _other_errors(self, reach: Tensor) -> Tensor | float:
        """What the score declares about rounding outside of the product, at any token within `reach (T,)`."""
        if self.rounding is None:
            return 0.0
        widest = reach if self.planes.norm == "l2" else reach * math.sqrt(self.planes.points.shape[1])
        return self.rounding((self.planes.points.norm(dim=-1) + widest).unsqueeze(1)).double()


@final
@dataclass(frozen=True)
class CosineScoring(Scoring):
    """l = cos(Omega (x * m), e) / temperature."""

    units: Tensor  # (E,n): the embeddings, of length 1
    roundings: int  # after the product
    cosines: Cosines

    @property
    def temperature(self) -> float:
        return self.cosines.temperature

    @property
    def projected(self) -> Tensor:
        return (self.planes.points * self.planes.factors) @ self.matrix.t()

    @property
    def values(self) -> Affine:
        self.require_values()
        projected = self.projected
        points = projected / projected.norm(dim=-1, keepdim=True).clamp_min(self.cosines.shortest)
        weight = self.units / self.temperature
        return Affine(points, weight, torch.zeros_like(weight[:, 0]), "l2")

    def _lengths(self) -> tuple[Tensor, Tensor]:
        """|z|, and how far z moves for each unit that the token moves."""
        return self.projected.norm(dim=-1), self.planes.stretches(self.matrix)

    def outward(self, radius: Tensor) -> Tensor:
        length, speed = self._lengths()
        chord = radius.clamp(max=math.sqrt(2))
        # Shorter than `shortest`, a projection is not normalised any more, and no chord.
        farthest = (length - self.cosines.shortest).clamp_min(0).minimum(FARTHEST * length)
        return (length * chord * (1 - chord.square() / 4).sqrt()).minimum(farthest) / speed

    @property
    def pace(self) -> Tensor:
        length, speed = self._lengths()
        return speed / (length - self.cosines.shortest).clamp_min(torch.finfo(torch.float64).tiny)

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
        return (of_products + (of_length + self.roundings * unit(torch.float32)).unsqueeze(1)) / self.temperature

    def plane_errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        return self.product_errors(arithmetic) @ self.units.abs().t()

    def value_errors_in_place(self, arithmetic: Arithmetic) -> Tensor:
        length = self.projected.norm(dim=-1, keepdim=True)
        errors = self.product_errors(arithmetic)
        turned = self.plane_errors_in_place(arithmetic) + errors.norm(dim=-1, keepdim=True)
        left = (length - errors.norm(dim=-1, keepdim=True)).clamp_min(torch.finfo(torch.float64).tiny)
        return (turned / left + self.roundings * unit(torch.float32)) / self.temperature

    def _products(self, arithmetic: Arithmetic) -> float:
        after = (1 + unit(torch.float32)) ** self.roundings
        return (1 + arithmetic.products(self.terms, self._inputs(arithmetic))) * after - 1


def score_geometry(name: str, order: Order, values: Values | None, tokens: Tensor, norm: Norm) -> Scoring:
    """What a score declares, at `tokens (..., d)`, in float64."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    matrix = order.matrix.detach().to(rows.device).double()
    inputs = sum(given.dtype == torch.float64 for given in (tokens, order.matrix))
    weight = matrix if order.combine is None else order.combine.detach().to(matrix) @ matrix
    bias = torch.zeros_like(weight[:, 0]) if order.bias is None else order.bias.detach().to(weight)
    scales = None
    if order.scales is not None:
        scales = FeatureScales(order.scales.mixture.detach().double(), order.scales.table.detach().double())
    planes = Affine(rows.double(), weight, bias, norm, scales)
    cosines = None if values is None else values.cosines
    shared = (name, planes, matrix, inputs, values is not None, order.shifted, order.rounding)
    if order.combine is None and cosines is None:
        return LinearScoring(*shared)
    if order.combine is None or order.bias is not None or order.rounding is not None or order.shifted:
        raise NoBound(f"no certificate is known for {name}: cosines are known of products that are combined, without a bias")
    unknown = Cosines(temperature=1.0, shortest=0.0)
    return CosineScoring(*shared, order.combine.detach().to(matrix), order.roundings, cosines or unknown)
