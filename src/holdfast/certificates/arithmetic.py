"""How products of tokens and weights are computed, and what rounding can do to them.

The worst case, gamma_n of `holdfast.routing.bounds`, is rarely reached: errors of both signs cancel. If they are
independent with mean 0, exp(lambda sqrt(n) u + n u^2) - 1 bounds them with probability 1 - 2 n exp(-lambda^2 / 2) (Higham
and Mary 2019, theorem 3.1): an eighth of gamma at n = 4096.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from holdfast.errors import unknown
from holdfast.routing.bounds import gamma, unit

Rounding = Literal["worst", "likely"]
LAMBDA = 8.0  # of 10^4 terms, one bound in 10^9 fails

# Tensor cores cut off instead of rounding to the nearest when they sum in float32: an error of one unit, not of half.
FLOAT32_SUM = 2.0**-23


def likely_gamma(terms: int, u: float) -> float:
    """Return the bound that holds with high probability, if it is less."""
    exponent = LAMBDA * math.sqrt(terms) * u + terms * u * u
    return min(gamma(terms, u), math.expm1(exponent) if exponent < 1 else math.inf)


@dataclass(frozen=True)
class Arithmetic:
    """How a product of tokens and weights is computed.

    dtype       what tokens, weights and the result are held in
    accumulate  what products are summed in. That is `dtype` for float32 and float64; kernels for the short types multiply
                exactly and sum in float32, so that is the default for those
    rounding    "worst", or "likely", what sums of independent errors do not exceed
    """

    dtype: torch.dtype
    accumulate: torch.dtype
    rounding: Rounding = "worst"

    @classmethod
    def of(cls, dtype: torch.dtype, accumulate: torch.dtype | None = None, rounding: Rounding = "worst") -> "Arithmetic":
        if rounding not in get_args(Rounding):
            raise ValueError(unknown("kind of rounding", rounding, get_args(Rounding)))
        for given in (dtype, accumulate):
            if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
                raise ValueError(f"the dtype to compute in is {given}; expected a floating-point type like torch.bfloat16.")
        if accumulate is None:
            accumulate = torch.float32 if unit(dtype) > unit(torch.float32) else dtype
        if unit(accumulate) > unit(dtype):
            raise ValueError(f"sums in {accumulate} of products in {dtype}: no kernel sums in a shorter type.")
        return cls(dtype, accumulate, rounding)

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + (", likely rounding" if self.rounding == "likely" else "")

    @property
    def rounds_output(self) -> bool:
        return self.accumulate != self.dtype

    def products(self, terms: int, inputs: int = 0) -> float:
        """The error of a sum of `terms` products, relative to the sum of their magnitudes.

        inputs  how many of the two factors were rounded to `dtype` first
        """
        bound = gamma if self.rounding == "worst" else likely_gamma
        error = bound(terms, FLOAT32_SUM if self.rounds_output else unit(self.dtype))
        return (1 + unit(self.dtype)) ** inputs * (1 + error) - 1

    @property
    def output(self) -> float:
        """The error of storing the sum, relative to it."""
        return unit(self.dtype) if self.rounds_output else 0.0

    def underflow(self, terms: int) -> float:
        """What is lost, in all, where numbers are too small for the types."""
        return terms * _smallest(self.accumulate) + _smallest(self.dtype)


def representable(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Does `dtype` hold every one of the values as it is?"""
    return bool((values.to(dtype).to(values.dtype) == values).all())


def _smallest(dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    # The spacing of subnormal numbers; kernels may take those of float32 and bfloat16 for 0, down from 2^-126.
    return max(limits.smallest_normal * limits.eps, 2.0**-126)
