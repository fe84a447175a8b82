"""The geometry of a score in float64, from its declarations: which planes order the experts, how logits depend on the token.

`planes` has the order of the logits, `values` the logits themselves. For a linear score they are the same. For cosines the
planes are linear in x, z.(e_i - e_j) = 0 with z = Omega x, and the logits are linear in the point z/|z| of a sphere. A bound
there is converted to x by how far a perturbation of x can turn z:

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
from holdfast.routing.declarations import DIVISION, Cosines, NoCertificate, Order

FARTHEST = 0.9  # of the perturbation at which z could become 0, near which rounding errors are unbounded
MOST_HELD = 2**22  # elements of a table that is computed once for all tokens: 32 MiB


@final
@dataclass(frozen=True)
class FeatureScales:
    """The factors m of each token's features, as declared by `Scales`, in float64."""

    mixture: Tensor
    table: Tensor
    static: bool = False  # see `Scoring`

    @cached_property
    def distinct(self) -> tuple[Tensor, Tensor]:
        """Return the distinct m (U,n), and the index (T,) of each token's: tokens of one cluster share the same m.

        If shapes are static, there is one for each token.
        """
        if self.static:
            mixtures, index = self.mixture, torch.arange(len(self.mixture), device=self.mixture.device)
        else:
            mixtures, index = self.mixture.unique(dim=0, return_inverse=True)
        return mixtures @ self.table + (1 - mixtures.sum(1, keepdim=True)), index

    def rows(self, rows: slice) -> "FeatureScales":
        return replace(self, mixture=self.mixture[rows])

    def stretches(self, matrix: Tensor, norm: Norm) -> Tensor:
        """Return an upper bound (T,) of the stretch of matrix * m, by convexity; exact if m is that of one cluster."""
        each = stretch(matrix * self.table.unsqueeze(1), norm)
        return self.mixture @ each + (1 - self.mixture.sum(1)) * stretch(matrix, norm)


@final
@dataclass(frozen=True)
class Affine:
    """Keys that are affine in a point, l = (x * m) W^T + b, with their speeds. Index E, the threshold, has weight 0."""

    points: Tensor  # (T,n)
    weight: Tensor  # (E,n)
    bias: Tensor  # (E,)
    norm: Norm  # of perturbations of the points
    scales: FeatureScales | None = None
    held_spans: Tensor | None = None  # the spans of all distinct m, if they are few

    @property
    def experts(self) -> int:
        return self.weight.shape[0]

    @cached_property
    def distinct_factors(self) -> tuple[Tensor, Tensor]:
        """Return the distinct m (U,n), and the index (T,) of each token's."""
        if self.scales is None:
            return torch.ones_like(self.weight[:1]), torch.zeros_like(self.points[:, 0], dtype=torch.int64)
        return self.scales.distinct

    @cached_property
    def factors(self) -> Tensor | float:
        """Return m (T,n), or 1."""
        return 1.0 if self.scales is None else self.distinct_factors[0][self.distinct_factors[1]]

    @cached_property
    def logits(self) -> Tensor:
        """Return the keys (T,E)."""
        return (self.points * self.factors) @ self.weight.t() + self.bias

    @cached_property
    def spans(self) -> Tensor:
        """Return how fast l_i - l_j can change, (U,E+1,E+1), for each distinct m."""
        if self.held_spans is not None:
            return self.held_spans
        with_threshold = torch.cat([self.weight, torch.zeros_like(self.weight[:1])])
        return spans(with_threshold, self.distinct_factors[0], self.norm)

    @property
    def factor_index(self) -> Tensor:
        """Return the index (T,) of each token's m."""
        return self.distinct_factors[1]

    @cached_property
    def slopes(self) -> Tensor:
        """Return how fast l_e can change, (T,E)."""
        return self._per_token(self.spans[:, : self.experts, self.experts])

    @cached_property
    def diameters(self) -> Tensor:
        """Return how fast any difference between two logits can change, (T,)."""
        return self._per_token(self.spans[:, : self.experts, : self.experts].flatten(1).amax(1))

    def _per_token(self, values: Tensor) -> Tensor:
        """Return (T, ...) from `values (U, ...)` of each distinct m."""
        if self.scales is None:
            return values.expand(len(self.points), *values.shape[1:])
        return values[self.factor_index]

    def expert_spans(self) -> Tensor:
        """Return the spans (T,E,E) between experts; (1,E,E) if they are the same for all tokens."""
        experts = self.spans[:, : self.experts, : self.experts]
        return experts if self.scales is None else experts[self.factor_index]

    def spans_between(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the spans (T,M) of pairs of experts, given by their indices."""
        if one.shape[1] == 1:  # one pair a token needs no table of all pairs
            experts = torch.arange(self.experts, device=one.device)
            signs = (one.unsqueeze(2) == experts).to(self.weight) - (other.unsqueeze(2) == experts).to(self.weight)
            return self.change_rate(signs)
        return self.spans[self.factor_index.unsqueeze(1), one, other]

    def change_rate(self, coefficients: Tensor) -> Tensor:
        """Return how fast sum_e c_e l_e can change, (T,R), for `coefficients (T,R,E)`."""
        combined = coefficients @ self.weight
        return dual(combined * (self.factors if isinstance(self.factors, float) else self.factors.unsqueeze(1)), self.norm)

    def magnitudes(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return |points| times a matrix (E,n) of magnitudes, (T,E), and how fast it can grow, (T,E).

        Used for rounding errors. To include those of m itself, 1 is added to m, which is computed as mixture + 1 - sum.
        """
        distinct, index = self.distinct_factors
        widened = distinct if self.scales is None else distinct + 1
        return (self.points.abs() * widened[index]) @ matrix.t(), dual_scaled(matrix, widened, self.norm)[index]

    def stretches(self, matrix: Tensor) -> Tensor:
        """Return an upper bound (T,) of how fast matrix (x * m) can change in l2."""
        if self.scales is not None:
            return self.scales.stretches(matrix, self.norm)
        return stretch(matrix, self.norm).expand(len(self.points))

    def rows(self, rows: slice) -> "Affine":
        """Return some of the tokens, with the spans already computed if they are few."""
        if self.scales is None:
            return replace(self, points=self.points[rows], held_spans=None if torch.is_grad_enabled() else self.spans)
        few = len(self.distinct_factors[0]) * (self.experts + 1) ** 2 <= MOST_HELD
        part = replace(self, points=self.points[rows], scales=self.scales.rows(rows), held_spans=None)
        if few:
            # The part has its own, shorter list of distinct m: find the index of each in the list of all tokens.
            first = torch.zeros(len(part.distinct_factors[0]), dtype=torch.int64, device=self.points.device)
            first[part.factor_index] = self.factor_index[rows]
            part = replace(part, held_spans=self.spans[first])
        return part


@dataclass(frozen=True)
class Scoring(ABC):
    """The geometry of a score at some tokens (abstract). The logits are the keys of `planes` if nothing else is stated."""

    name: str  # of the score, for messages
    planes: Affine
    matrix: Tensor  # (n,d): by which the router multiplies tokens
    inputs: int  # how many of the two factors are rounded to float32 first
    has_values: bool  # whether the logits are declared, or only their order
    shifted: bool  # whether logits have an unknown part that is the same for all experts
    rounding: Callable[[Tensor], Tensor] | None  # as the order declares it
    static: bool  # shapes and the number of steps do not depend on values, which the host never reads (for CUDA graphs)

    @property
    def values(self) -> Affine:
        """Return the logits, affine in points; radii around the points are measured in `values.norm`.

        Raise NoCertificate if the score declares only an order.
        """
        if not self.has_values:
            raise NoCertificate(f"no certificate is known for {self.name}: it declares no values")
        return self._values

    @property
    def _values(self) -> Affine:
        return self.planes

    def to_token_radius(self, radius: Tensor) -> Tensor:
        """Convert a radius around the points of `values` to one around the tokens."""
        return radius

    @property
    def point_speed(self) -> Tensor:
        """Return s (T,): a perturbation r of a token changes its point of `values` by at most point_distance(r s)."""
        return torch.ones_like(self.planes.points[:, 0])

    def point_distance(self, distance: Tensor) -> Tensor:
        """Return how far a point can move (see `point_speed`); an increasing function, the same for all tokens."""
        return distance

    @abstractmethod
    def plane_errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        """Return the largest rounding errors (T,E) of the keys of `planes`, at any token within `reach (T,)`.

        `reach=None` means the unperturbed tokens, where rounding of tokens and weights has a known effect.
        """

    @abstractmethod
    def value_errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        """Return the same for logits."""

    def product_errors(self, arithmetic: Arithmetic) -> Tensor:
        """Return the error (T,n) of the product with `matrix` at the unperturbed tokens.

        The effect of rounding tokens and weights to the dtype is computed; all other errors are bounded by the worst case.
        """
        exact = self.planes.points * self.planes.factors
        features, matrix = (given.to(arithmetic.dtype).double() for given in (exact, self.matrix))
        added = self.added.to(arithmetic.dtype).double()
        products = features @ matrix.t()
        known = (products + added - exact @ self.matrix.t() - self.added).abs()
        summing = arithmetic.products(self.terms) * (features.abs() @ matrix.abs().t() + added.abs())
        stored = (products + added).abs() + summing
        if added.any():  # the product may be stored, and stored again after the bias is added
            stored = stored + products.abs() + summing
        errors = known + summing + arithmetic.output * stored + arithmetic.underflow(self.terms)
        return errors.nan_to_num(nan=torch.inf)  # NaN: an overflow of the dtype

    @property
    def added(self) -> Tensor:
        """Return what is added to the product before it is stored, (n,)."""
        return torch.zeros_like(self.matrix[:, 0])

    @property
    def terms(self) -> int:
        """Return the number of terms of the product, roundings of m and of the bias included."""
        scales = self.planes.scales
        return self.matrix.shape[1] + bool(self.planes.bias.any()) + (0 if scales is None else scales.table.shape[0] + 8)

    def _inputs(self, arithmetic: Arithmetic) -> int:
        """Return how many of tokens and weights are rounded to the dtype of the arithmetic; perturbed tokens are as well."""
        if arithmetic.dtype in (torch.float32, torch.float64):
            return self.inputs
        return sum(not representable(given, arithmetic.dtype) for given in (self.planes.points, self.matrix))

    def rows(self, rows: slice) -> "Scoring":
        """Return the geometry of some of the tokens."""
        return replace(self, planes=self.planes.rows(rows))


@final
@dataclass(frozen=True)
class LinearScoring(Scoring):
    """l = ((x * m) W^T + b) / temperature."""

    temperature: float = 1.0

    @property
    def added(self) -> Tensor:
        return self.planes.bias * self.temperature

    def plane_errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        if reach is None:
            nowhere = torch.zeros_like(self.planes.points[:, 0])
            return self._divided(self.product_errors(arithmetic) + self._other_errors(nowhere), self.planes.logits.abs())
        sizes, growth = self.planes.magnitudes(self.matrix.abs())
        products = arithmetic.products(self.terms, self._inputs(arithmetic))
        far, added = reach.unsqueeze(1), self.added.abs()
        largest = self.planes.logits.abs() + far * self.planes.slopes  # of each logit
        stored = 2 * arithmetic.output * (self.temperature * largest + added)
        summed = products * (sizes + added + far * growth)
        lost = (growth > 0) * arithmetic.underflow(self.terms)  # sums of zeros have no error
        return self._divided(summed * (1 + 2 * arithmetic.output) + stored + lost + self._other_errors(reach), largest)

    def value_errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        return self.plane_errors(arithmetic, reach)

    def _divided(self, errors: Tensor, largest: Tensor) -> Tensor:
        """Return the errors of logits up to `largest`, after a division by the temperature of numbers with `errors`."""
        if self.temperature == 1:
            return errors
        errors = errors / self.temperature
        return errors + DIVISION * unit(torch.float32) * (largest + errors)

    def _other_errors(self, reach: Tensor) -> Tensor | float:
        """Return the declared rounding errors outside of the product, at any token within `reach (T,)`."""
        if self.rounding is None:
            return 0.0
        widest = reach if self.planes.norm == "l2" else reach * math.sqrt(self.planes.points.shape[1])
        return self.rounding((self.planes.points.norm(dim=-1) + widest).unsqueeze(1)).double()


@final
@dataclass(frozen=True)
class CosineScoring(Scoring):
    """l = cos(Omega (x * m), e) / temperature."""

    units: Tensor  # (E,n): the embeddings, normalised to length 1
    roundings: int  # number of roundings after the product
    cosines: Cosines

    @property
    def projected(self) -> Tensor:
        return (self.planes.points * self.planes.factors) @ self.matrix.t()

    @property
    def _values(self) -> Affine:
        projected = self.projected
        points = projected / projected.norm(dim=-1, keepdim=True).clamp_min(self.cosines.shortest)
        weight = self.units / self.cosines.temperature
        return Affine(points, weight, torch.zeros_like(weight[:, 0]), "l2")

    def _lengths(self) -> tuple[Tensor, Tensor]:
        """Return |z| (T,), and how fast z changes with the token (T,)."""
        return self.projected.norm(dim=-1), self.planes.stretches(self.matrix)

    def to_token_radius(self, radius: Tensor) -> Tensor:
        length, speed = self._lengths()
        chord = radius.clamp(max=math.sqrt(2))
        # A projection shorter than `shortest` is not normalised, so the bound does not apply.
        farthest = (length - self.cosines.shortest).clamp_min(0).minimum(FARTHEST * length)
        return (length * chord * (1 - chord.square() / 4).sqrt()).minimum(farthest) / speed

    @property
    def point_speed(self) -> Tensor:
        length, speed = self._lengths()
        return speed / (length - self.cosines.shortest).clamp_min(torch.finfo(torch.float64).tiny)

    def point_distance(self, distance: Tensor) -> Tensor:
        return (2 * torch.sin(torch.asin(distance.clamp(max=1)) / 2)).where(distance < 1, 2.0)

    def plane_errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        if reach is None:
            return self.product_errors(arithmetic) @ self.units.abs().t()
        sizes, growth = self.planes.magnitudes(self.units.abs() @ self.matrix.abs())
        length, speed = self._lengths()
        far = reach.unsqueeze(1)
        summed = self._products(arithmetic) * (sizes + far * growth)
        return summed + (arithmetic.output * (length + reach * speed) + arithmetic.underflow(self.terms)).unsqueeze(1)

    def value_errors(self, arithmetic: Arithmetic, reach: Tensor | None) -> Tensor:
        length, speed = self._lengths()
        if reach is None:
            errors = self.product_errors(arithmetic).norm(dim=-1, keepdim=True)
            turned = self.plane_errors(arithmetic, None) + errors
            left = (length.unsqueeze(1) - errors).clamp_min(torch.finfo(torch.float64).tiny)
            return (turned / left + self.roundings * unit(torch.float32)) / self.cosines.temperature
        shortest = (length - reach * speed).clamp_min(torch.finfo(torch.float64).tiny)
        sizes, growth = self.planes.magnitudes(self.matrix.abs())
        of_length = self._products(arithmetic) * (sizes.norm(dim=-1) + reach * growth.norm(dim=-1)) / shortest
        of_length = of_length + arithmetic.output * (length + reach * speed) / shortest
        of_products = self.plane_errors(arithmetic, reach) / shortest.unsqueeze(1)
        return (of_products + (of_length + self.roundings * unit(torch.float32)).unsqueeze(1)) / self.cosines.temperature

    def _products(self, arithmetic: Arithmetic) -> float:
        after = (1 + unit(torch.float32)) ** self.roundings
        return (1 + arithmetic.products(self.terms, self._inputs(arithmetic))) * after - 1


def score_geometry(name: str, order: Order, tokens: Tensor, norm: Norm, static: bool = False) -> Scoring:
    """Return the geometry that a score declares, at `tokens (..., d)`, in float64; differentiable in tokens and weights."""
    points = tokens.reshape(-1, tokens.shape[-1]).double()
    matrix = order.matrix.to(points)
    inputs = sum(given.dtype == torch.float64 for given in (tokens, order.matrix))
    weight = matrix if order.combine is None else order.combine.to(matrix) @ matrix
    bias = torch.zeros_like(weight[:, 0]) if order.bias is None else order.bias.to(weight)
    scales = None
    if order.block is not None:
        # A point has its token in the columns of its block and zeros elsewhere. The factors are 1 in these columns and 0 in
        # all others, so that only perturbations within the block count.
        width = points.shape[1]
        member = torch.nn.functional.one_hot(order.block.reshape(-1).to(points.device), matrix.shape[1] // width).double()
        points = (member.unsqueeze(-1) * points.unsqueeze(1)).flatten(1)
        blocks = torch.eye(member.shape[1], dtype=points.dtype, device=points.device)
        scales = FeatureScales(member, blocks.repeat_interleave(width, dim=1), static)
    elif order.scales is not None:
        scales = FeatureScales(order.scales.mixture.double(), order.scales.table.double(), static)
    planes = Affine(points, weight / order.temperature, bias / order.temperature, norm, scales)
    cosines = None if order.values is None else order.values.cosines
    common = (name, planes, matrix, inputs, order.values is not None, order.shifted, order.rounding, static)
    if order.combine is None and cosines is None:
        return LinearScoring(*common, order.temperature)
    if order.combine is None or order.bias is not None or order.rounding is not None or order.shifted:
        needed = "an order with `combine` and without bias, rounding or shift"
        raise NoCertificate(f"no certificate is known for {name}: cosines need {needed}")
    only_order = Cosines(temperature=1.0, shortest=0.0)
    return CosineScoring(*common, order.combine.to(matrix), order.roundings, cosines or only_order)
