"""Compute the radius in which each token keeps its experts (`certify`), and find tokens that rounding alone could flip
(`undecided`).

A token x is undecided in a dtype if l_i - l_j <= err_i + err_j for a selected expert i and an expert j that is not selected.
l_e is the logit of expert e, w_e its weights, and err_e a bound for the error of l_e when it is computed in the dtype:

    accumulate=dtype     everything is computed in the dtype: err_e = gamma_d(u) sum_q |x_q w_eq|, where u is the unit
                         roundoff of the dtype, d the width and gamma_d(u) = d u / (1 - d u). It is infinite if d u >= 1:
                         in bfloat16, if d >= 256
    accumulate=float32   (default for types shorter than float32) as matrix products of such types are computed: tokens and
                         weights are rounded to the dtype, products are exact, sums are float32, and the result is rounded
                         to the dtype

The error that comes from rounding tokens and weights is computed exactly, because it is the same in every forward; all other
errors are bounded. Everything after the logits is float32, as in Holdfast's routers and in the Hugging Face families.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, Rounding
from holdfast.certificates.certificates import Certificates, Kind
from holdfast.certificates.planes import RadiusProblem
from holdfast.certificates.router_conditions import CertifiedRouter, Gate, describe_gate, describe_router
from holdfast.certificates.voting import MajorityVote, Smoothing, certify_vote
from holdfast.routing import Context, Router
from holdfast.routing.bounds import Norm, check_norm, lengths
from holdfast.routing.declarations import NoCertificate

# If no perturbation flips a token in real numbers, its radius in other arithmetic is at most this number times (norm of the
# token + 1): the rounding errors grow with the radius.
LARGEST_RADIUS = 2.0**10
FIELDS = ("radius", "distance", "lengths", "margin", "pair")  # of `Certificates`, computed for a slice of tokens at a time


@torch.no_grad()
def certify(
    subject: Router | Gate | MajorityVote,
    tokens: Tensor,
    context: Context | None = None,
    *,
    norm: Norm = "l2",
    arithmetic: torch.dtype | None = torch.float32,
    rounding: Rounding = "worst",
    smoothing: Smoothing | None = None,
) -> Certificates:
    """Certify `tokens (B,N,d)` or `(T,d)` against perturbations of the router's input; the context is not perturbed.

    subject     a Router in evaluation mode; the weights and the rule of a native `Gate`; or a majority vote
    context     the context that the Router is called with. For `ac`, the clusters in it are assumed to stay the same. With a
                token-side informer, the radius is valid even if every token of the sequence is perturbed by up to it
    norm        of a perturbation: "l2", or "linf", the largest change of any feature
    arithmetic  the dtype in which scores are computed; Holdfast's routers compute in float32. Its rounding errors make the
                radius smaller. None means real numbers: then float32 rounding may still flip a token inside the radius
    rounding    "worst" uses the largest possible rounding error; "likely" a smaller bound, which is correct with high
                probability and gives wide routers much larger radii
    smoothing   if no certificate is known for a router, certify its majority vote under this noise; None raises
                NoCertificate instead
    """
    check_norm(norm)
    if isinstance(subject, MajorityVote):
        return certify_vote(subject, tokens, norm)
    if isinstance(subject, Router) and subject.select.layer_kind != "moe":
        raise NoCertificate(f"with {type(subject.select).__name__} every token uses every expert: no set can be certified.")
    score_arithmetic = None if arithmetic is None else Arithmetic.of(arithmetic, rounding=rounding)
    try:
        return certify_described(describe(subject, tokens, context, norm), tokens.shape[:-1], norm, score_arithmetic)
    except NoCertificate as reason:
        if smoothing is not None and isinstance(subject, Router):
            return certify_vote(MajorityVote(subject, smoothing, context=context), tokens, norm)
        advice = "pass smoothing=Smoothing(sigma=...)"
        if not isinstance(subject, Router):
            advice = "give its callable to MajorityVote"
        raise NoCertificate(f"{reason}; {advice} to certify its majority vote.") from None


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
    """Return which of `tokens (B,N,d)` or `(T,d)` may flip when scores are computed in `dtype`: (B,N) or (T,) bool.

    All other tokens have the same selected set in `dtype`, in float32 and in real numbers. With rounding="likely" this is
    wrong for a few tokens in 10^9, if errors are independent. Padding is never undecided.
    """
    arithmetic = Arithmetic.of(dtype, accumulate, rounding)
    described = describe(subject, tokens, context, "l2")
    radii = [problem.nearest(problem.errors(arithmetic, None)).radius for _, problem in described.problems()]
    radii.append(torch.zeros(0, dtype=torch.float64, device=tokens.device))  # there may be no tokens
    return ((torch.cat(radii) <= 0) & described.real.flatten()).view(tokens.shape[:-1])


def describe(subject: Router | Gate, tokens: Tensor, context: Context | None, norm: Norm) -> CertifiedRouter:
    """Describe the subject at `tokens (B,N,d)` or `(T,d)`; raise ValueError for wrong arguments."""
    if not isinstance(subject, Router | Gate):
        name = type(subject).__name__
        raise ValueError(f"{name} is neither a Router nor a Gate; wrap any other callable in a MajorityVote.")
    width = subject.dim if isinstance(subject, Router) else subject.weight.shape[1]
    per_token = isinstance(subject, Gate) or not subject.traits.sequence_aware
    if tokens.dim() not in ((2, 3) if per_token else (3,)) or not tokens.is_floating_point() or tokens.shape[-1] != width:
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        expected = f"(B, N, {width}) or (T, {width})" if per_token else f"(B, N, {width})"
        raise ValueError(f"tokens are {got}; expected a floating-point dtype and {expected}.")
    if isinstance(subject, Router) and subject.disabled is not None:
        raise ValueError("the router has disabled experts (holdfast.disable); certify it outside of that.")
    if isinstance(subject, Router) and subject.training:
        raise ValueError("the router is in training mode, where it updates state and may add noise; call eval() first.")
    if context is not None and isinstance(subject, Gate):
        raise ValueError("context= works only with a Router; a Gate reads only its token.")
    if context is not None and context.cache is not None:
        raise ValueError("the context has a cache of earlier tokens; certify whole sequences without a cache.")
    tokens, context = tokens.detach().unsqueeze(0) if tokens.dim() == 2 else tokens.detach(), context or Context()
    real = context.real_tokens(tokens)
    tokens = tokens.where(real.unsqueeze(-1), 0.0)
    if not tokens.isfinite().all():
        bad = int((~tokens.isfinite()).any(-1).sum())
        raise ValueError(f"{bad} of {real.numel()} tokens contain NaN or infinite numbers and cannot be certified.")
    if isinstance(subject, Router):
        return describe_router(subject, tokens, context, norm)
    return describe_gate(subject, tokens, norm)


def certify_described(
    subject: CertifiedRouter, shape: torch.Size, norm: Norm, arithmetic: Arithmetic | None
) -> Certificates:
    """Certify the tokens of `subject`, which have this shape; `arithmetic=None` means real numbers."""
    results: list[dict[str, Tensor]] = []
    kind: Kind = "exact"
    for rows, problem in subject.problems():
        results.append(_certify_rows(problem, norm, arithmetic))
        if subject.chosen is not None and arithmetic is not None:
            declared, selected = problem.conditions.chosen, subject.chosen[rows]
            differs = declared != selected if subject.core is None else declared & ~selected
            wrong = int((differs.any(1) & (results[-1]["radius"] > 0)).sum())
            if wrong:
                found = f"{wrong} tokens selected other experts than the router's parts declare, beyond rounding error"
                raise ValueError(f"{found}; a router with wrong declarations cannot be certified.")
        kind = "exact" if problem.exact else "lower bound"
    if not results:  # there are no tokens
        empty = torch.zeros(0, dtype=torch.float64, device=subject.real.device)
        results = [dict.fromkeys(FIELDS, empty) | {"pair": empty.new_zeros(0, 2, dtype=torch.int64)}]
    values = {name: torch.cat([result[name] for result in results]) for name in results[0]}
    for name in values.keys() - {"pair", "lengths", "margin"}:
        values[name] = values[name].where(subject.real.flatten(), 0.0)
    values = {name: rows.view(*shape, *rows.shape[1:]) for name, rows in values.items()}
    fields: dict[str, Any] = {name: values.pop(name) for name in FIELDS}
    return Certificates(
        **fields,
        real=subject.real.view(shape),
        kind=kind,
        norm=norm,
        about=subject.about,
        bounds=values,
        arithmetic="real numbers" if arithmetic is None else str(arithmetic),
    )


def _certify_rows(problem: RadiusProblem, norm: Norm, arithmetic: Arithmetic | None) -> dict[str, Tensor]:
    """Return the tensors of `Certificates` for the tokens of `problem`, by name, and its other lower bounds."""
    token_lengths = lengths(problem.scoring.planes.points, norm)
    nearest = problem.nearest(None)
    distance = problem.distance(nearest.radius)
    radius = distance
    constrained = problem.conditions.valid.any(1)
    if arithmetic is not None:
        # Rounding errors grow with the length of a token: those of the longest token within `reach` bound all others.
        reach = distance.where(distance < torch.inf, LARGEST_RADIUS * (token_lengths + 1))
        safe = problem.nearest(problem.errors(arithmetic, reach)).radius
        radius = problem.distance(safe).minimum(reach).where(constrained, torch.inf)
    which = nearest.which.view(-1, 1)
    if problem.conditions.valid.shape[1]:
        margin = problem.margins.gather(1, which).squeeze(1).where(constrained, torch.inf)
        ahead, behind = problem.conditions.sides(which)
        pair = torch.stack([ahead[:, 0, 0], behind[:, 0, 0]], dim=1)
    else:
        margin, pair = torch.full_like(radius, torch.inf), which.new_zeros(len(radius), 2)
    no_pair = torch.full_like(pair, problem.scoring.planes.experts)
    fields = radius, distance, token_lengths, margin, pair.where(constrained.unsqueeze(1), no_pair)
    return dict(zip(FIELDS, fields, strict=True)) | problem.bounds()
