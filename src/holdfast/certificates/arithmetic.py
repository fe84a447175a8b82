"""`Arithmetic`: in which types products of tokens and weights are computed, and how large their rounding errors can be.

The worst case, gamma_n of `holdfast.routing.bounds`, is rarely reached, because errors of both signs cancel. If errors are
independent with mean 0, exp(lambda sqrt(n) u + n u^2) - 1 bounds them with probability 1 - 2 n exp(-lambda^2 / 2) (Higham
and Mary 2019, theorem 3.1): an eighth of gamma at n = 4096.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from holdfast.errors import unknown_name
from holdfast.routing.bounds import gamma, unit

Rounding = Literal["worst", "likely"]
LAMBDA = 8.0  # with 10^4 terms, the bound fails once in 10^9

# Tensor cores truncate when they sum in float32, instead of rounding to the nearest: an error of one unit, not of half.
FLOAT32_SUM = 2.0**-23


def likely_gamma(terms: int, u: float) -> float:
    """Return the bound that is correct with high probability, or gamma if that is smaller."""
    exponent = LAMBDA * math.sqrt(terms) * u + terms * u * u
    return min(gamma(terms, u), math.expm1(exponent) if exponent < 1 else math.inf)


@dataclass(frozen=True)
class Arithmetic:
    """How a product of tokens and weights is computed.

    dtype       of tokens, weights and the result
    accumulate  in which products are summed: `dtype` for float32 and float64. Kernels for shorter types multiply exactly and
                sum in float32, so that is their default
    rounding    "worst", or "likely", a bound that sums of independent errors rarely exceed
    """

    dtype: torch.dtype
    accumulate: torch.dtype
    rounding: Rounding = "worst"

    @classmethod
    def of(cls, dtype: torch.dtype, accumulate: torch.dtype | None = None, rounding: Rounding = "worst") -> "Arithmetic":
        """Return the arithmetic of `dtype`; raise ValueError if the types are not possible together."""
        if rounding not in get_args(Rounding):
            raise ValueError(unknown_name("kind of rounding", rounding, get_args(Rounding)))
        for given in (dtype, accumulate):
            if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
                raise ValueError(f"the dtype is {given}; expected a floating-point type like torch.bfloat16.")
        if accumulate is None:
            accumulate = torch.float32 if unit(dtype) > unit(torch.float32) else dtype
        if unit(accumulate) > unit(dtype):
            raise ValueError(f"accumulate is {accumulate}, shorter than {dtype}; no kernel sums in a shorter type.")
        return cls(dtype, accumulate, rounding)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + (", likely rounding" if self.rounding == "likely" else "")

    @property
    def rounds_output(self) -> bool:
        """Return whether sums are rounded to `dtype` when they are stored."""
        return self.accumulate != self.dtype

    def products(self, terms: int, inputs: int = 0) -> float:
        """Return the error of a sum of `terms` products, relative to the sum of their magnitudes.

        inputs  how many of the two factors are rounded to `dtype` first
        """
        bound = gamma if self.rounding == "worst" else likely_gamma
        error = bound(terms, FLOAT32_SUM if self.rounds_output else unit(self.dtype))
        return (1 + unit(self.dtype)) ** inputs * (1 + error) - 1

    @property
    def output(self) -> float:
        """Return the error of storing the sum, relative to the sum."""
        return unit(self.dtype) if self.rounds_output else 0.0

    def underflow(self, terms: int) -> float:
        """Return the total error from numbers that underflow in the types."""
        limits = torch.finfo(self.accumulate), torch.finfo(self.dtype)
        # The spacing of subnormal numbers; kernels may flush those of float32 and bfloat16, below 2^-126, to 0.
        summed, stored = (max(each.smallest_normal * each.eps, 2.0**-126) for each in limits)
        return terms * summed + stored


def representable(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether `dtype` represents every value exactly."""
    return bool((values.to(dtype).to(values.dtype) == values).all())
