"""The numerical certificate: which tokens could be sent elsewhere by rounding alone.

A token is undecided at a dtype if a margin, selected i against not selected j, is at most err_i + err_j, with err_e the
worst error of logit e computed in it:

    accumulate=dtype     gamma_d(u) sum_q |x_q w_eq|, everything computed in the dtype. Says nothing once d u >= 1: in
                         bfloat16 from a width of 256 on
    accumulate=float32   what matrix products of short types do (the default for them): tokens and weights are rounded to
                         the dtype, products are exact, sums are float32, and the result is rounded to the dtype

What rounding tokens and weights does to a logit is not bounded but computed: it is the same every time. All that comes after
the logits is float32, as it is in our routers and in the Hugging Face families.
"""

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, Rounding, unit
from holdfast.certificates.certificates import checked, read
from holdfast.certificates.planes import Planes
from holdfast.certificates.problem import Problem
from holdfast.certificates.reading import Gate
from holdfast.certificates.scoring import CosineScoring, Scoring
from holdfast.routing import Context, Router


@torch.no_grad()
def undecided(
    subject: Router | Gate,
    tokens: Tensor,
    dtype: torch.dtype,
    context: Context | None = None,
    *,
    accumulate: torch.dtype | None = None,
    rounding: Rounding = "worst",
) -> Tensor:
    """(...) bool: which of `tokens (B,N,d)` or `(T,d)` may take another set when scores are computed in `dtype`.

    All others take the same set in `dtype`, in float32 and in real numbers; with rounding="likely" all but a few in 10^9,
    for errors that are independent. Padding is never undecided.
    """
    arithmetic = Arithmetic.of(dtype, accumulate, rounding)
    clean, real = checked(subject, tokens, context)
    reading = read(subject, clean, context, "l2")
    found = [problem.nearest(_errors(problem, arithmetic)).radius <= 0 for _, problem in reading.problems()]
    flat = torch.cat(found) if found else torch.zeros(0, dtype=torch.bool, device=tokens.device)
    return (flat & real.flatten()).view(tokens.shape[:-1])


@torch.no_grad()
def rounding_errors(
    subject: Router | Gate,
    tokens: Tensor,
    dtype: torch.dtype,
    context: Context | None = None,
    *,
    accumulate: torch.dtype | None = None,
    rounding: Rounding = "worst",
) -> Tensor:
    """(T,E) float64: err_e, the worst error of each expert's logit when tokens are scored in `dtype`."""
    arithmetic = Arithmetic.of(dtype, accumulate, rounding)
    clean, _ = checked(subject, tokens, context)
    return _logit_errors(read(subject, clean, context, "l2").scoring, arithmetic)


def _errors(problem: Problem, arithmetic: Arithmetic) -> Tensor:
    """What the conditions of a problem are about: keys of planes, or logits."""
    still = torch.zeros_like(problem.scoring.planes.points[:, 0])
    in_reals = Arithmetic(torch.float64, torch.float64)
    scoring = problem.scoring
    if not isinstance(problem, Planes):
        return problem.spread(_logit_errors(scoring, arithmetic))
    # Of planes that are read through gates, what rounding the gates does comes on top.
    reading = problem.errors(in_reals, still)
    if isinstance(scoring, CosineScoring):
        return reading + _product_errors(scoring, arithmetic)
    return reading + _logit_errors(scoring, arithmetic)


def _logit_errors(scoring: Scoring, arithmetic: Arithmetic) -> Tensor:
    if not isinstance(scoring, CosineScoring):
        return scoring.product_errors(arithmetic)
    length = scoring.projected.norm(dim=-1, keepdim=True)
    errors = scoring.product_errors(arithmetic)
    turned = _product_errors(scoring, arithmetic) + errors.norm(dim=-1, keepdim=True)
    left = (length - errors.norm(dim=-1, keepdim=True)).clamp_min(torch.finfo(torch.float64).tiny)
    return (turned / left + scoring.finishing * unit(torch.float32)) / scoring.temperature


def _product_errors(scoring: CosineScoring, arithmetic: Arithmetic) -> Tensor:
    """Of z.e."""
    return scoring.product_errors(arithmetic) @ scoring.units.abs().t()
