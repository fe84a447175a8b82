"""Bounds of rounding errors of logits, as `undecided` uses them."""

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, Rounding
from holdfast.certificates.radii import describe
from holdfast.certificates.router_conditions import Gate
from holdfast.routing import Router


@torch.no_grad()
def rounding_errors(
    subject: Router | Gate,
    tokens: Tensor,
    dtype: torch.dtype,
    *,
    accumulate: torch.dtype | None = None,
    rounding: Rounding = "worst",
) -> Tensor:
    """Return (T,E) float64: a bound for the error of each expert's logit when scores are computed in `dtype`."""
    arithmetic = Arithmetic.of(dtype, accumulate, rounding)
    return describe(subject, tokens, None, "l2").scoring.value_errors(arithmetic, None)
