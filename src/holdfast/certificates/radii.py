"""`certify`: up to which perturbation each token keeps its experts. `undecided`: which tokens rounding alone could flip.

A token is undecided in a dtype if l_i - l_j <= err_i + err_j for a selected expert i and another expert j, with err_e the
worst error of logit e when it is computed in the dtype:

    accumulate=dtype     gamma_d(u) sum_q |x_q w_eq|, everything computed in the dtype. It is infinite from d u = 1 on: in
                         bfloat16 from a width of 256 on
    accumulate=float32   what matrix products of short types do (the default for them): tokens and weights are rounded to
                         the dtype, products are exact, sums are float32, and the result is rounded to the dtype

The effect of rounding tokens and weights on a logit is computed, not bounded, because it is the same every time. Everything
after the logits is float32, as in Holdfast's routers and in the Hugging Face families.
"""

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, Rounding
from holdfast.certificates.certificates import Certificates, Kind
from holdfast.certificates.planes import RadiusProblem
from holdfast.certificates.router_conditions import CertifiedRouter, Gate, describe_gate, describe_router
from holdfast.certificates.voting import MajorityVote, Smoothing, certify_vote
from holdfast.routing import Context, Router
from holdfast.routing.bounds import ABOVE, Norm, check_norm, lengths
from holdfast.routing.declarations import NoCertificate

LARGEST_RADIUS = 2.0**10  # times a token's norm plus 1: the largest finite radius, because rounding errors grow with it


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
    context     what the Router is called with. `ac` is certified given the clusters in it. Where tokens share gates, the
                radius is valid with every token of the sequence perturbed by up to it
    norm        "l2", or "linf", the largest change of any feature
    arithmetic  in which scores are computed; Holdfast's routers compute in float32. Rounding errors are subtracted from the
                radius. None is real numbers: then float32 rounding may still flip a token inside the radius
    rounding    subtract the "worst" error, or a "likely" bound of it: wide routers lose much to errors that never happen
    smoothing   if no certificate is known for a router, certify its majority vote under this noise; None raises NoBound
    """
    check_norm(norm)
    if isinstance(subject, MajorityVote):
        return certify_vote(subject, tokens, norm)
    computed = None if arithmetic is None else Arithmetic.of(arithmetic, rounding=rounding)
    clean, real = _check_tokens(subject, tokens, context)
    try:
        return _certify_all(_describe(subject, clean, context, norm), tokens, real, norm, computed)
    except NoCertificate as reason:
        if smoothing is not None and isinstance(subject, Router):
            return certify_vote(MajorityVote(subject, smoothing, context=context), tokens, norm)
        instead = "pass smoothing=Smoothing(sigma=...)"
        if not isinstance(subject, Router):
            instead = "give its callable to MajorityVote"
        raise NoCertificate(f"{reason}; {instead} to certify its majority vote.") from None


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
    """Return which of `tokens (B,N,d)` or `(T,d)` may flip when scores are computed in `dtype`, (...) bool.

    All other tokens have the same set in `dtype`, in float32 and in real numbers; with rounding="likely" all but a few in
    10^9, if errors are independent. Padding is never undecided.
    """
    arithmetic = Arithmetic.of(dtype, accumulate, rounding)
    clean, real = _check_tokens(subject, tokens, context)
    problems = _describe(subject, clean, context, "l2").problems()
    found = [problem.nearest(problem.errors_at_tokens(arithmetic)).radius <= 0 for _, problem in problems]
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
    """Return err_e (T,E) float64, the worst error of each expert's logit when scores are computed in `dtype`."""
    arithmetic = Arithmetic.of(dtype, accumulate, rounding)
    clean, _ = _check_tokens(subject, tokens, context)
    return _describe(subject, clean, context, "l2").scoring.value_errors_at_tokens(arithmetic)


def _describe(subject: Router | Gate, tokens: Tensor, context: Context | None, norm: Norm) -> CertifiedRouter:
    if isinstance(subject, Router):
        return describe_router(subject, tokens, context or Context(), norm)
    return describe_gate(subject, tokens, norm)


def _check_tokens(subject: Router | Gate, tokens: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
    """Return tokens (B,N,d) with zeros for padding, and which are real (B,N); raise ValueError for unusable tokens."""
    if not isinstance(subject, Router | Gate):
        raise ValueError(
            f"{type(subject).__name__} is neither a Router nor a Gate; wrap any other callable in a MajorityVote."
        )
    width = subject.dim if isinstance(subject, Router) else subject.weight.shape[1]
    per_token = isinstance(subject, Gate) or not subject.traits.sequence_aware
    if tokens.dim() not in ((2, 3) if per_token else (3,)) or not tokens.is_floating_point() or tokens.shape[-1] != width:
        expected = f"(B, N, {width}) or (T, {width})" if per_token else f"(B, N, {width})"
        raise ValueError(f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; expected floating point, {expected}.")
    if isinstance(subject, Router) and subject.training:
        raise ValueError("the router is in training mode, where it updates state and may add noise; call eval() first.")
    if context is not None and isinstance(subject, Gate):
        raise ValueError("context= works only with a Router; a Gate reads only its token.")
    if context is not None and context.cache is not None:
        raise ValueError("the context has a cache of earlier tokens; certify whole sequences without a cache.")
    tokens = tokens.detach().unsqueeze(0) if tokens.dim() == 2 else tokens.detach()
    real = (context or Context()).real_tokens(tokens)
    tokens = tokens.where(real.unsqueeze(-1), 0.0)
    if not tokens.isfinite().all():
        bad = int((~tokens.isfinite()).any(-1).sum())
        raise ValueError(f"{bad} of {real.numel()} tokens contain NaN or infinite numbers and cannot be certified.")
    return tokens, real


def _certify_all(
    subject: CertifiedRouter, tokens: Tensor, real: Tensor, norm: Norm, rounding: Arithmetic | None
) -> Certificates:
    parts: list[dict[str, Tensor]] = []
    exact = True
    for rows, problem in subject.problems():
        parts.append(_certify_rows(problem, norm, rounding))
        exact = problem.exact
        if subject.chosen is not None and rounding is not None:
            _require_declared_sets(
                parts[-1]["radius"], problem.conditions.chosen, subject.chosen[rows], subject.core is not None
            )
    lead, flat = tokens.shape[:-1], real.flatten()
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else _no_tokens(tokens)
    for name in found.keys() - {"pair", "lengths", "margin"}:
        found[name] = found[name].where(flat, 0.0)
    found = {name: values.view(*lead, *values.shape[1:]) for name, values in found.items()}
    kind: Kind = "exact" if exact else "lower bound"
    return Certificates(
        radius=found.pop("radius"),
        distance=found.pop("distance"),
        lengths=found.pop("lengths"),
        margin=found.pop("margin"),
        pair=found.pop("pair"),
        real=real.view(lead),
        kind=kind,
        norm=norm,
        about=subject.about,
        bounds=found,
        arithmetic="real numbers" if rounding is None else str(rounding),
    )


def _certify_rows(problem: RadiusProblem, norm: Norm, rounding: Arithmetic | None) -> dict[str, Tensor]:
    """Return the tensors of `Certificates` for some tokens, by name; other lower bounds under their own names."""
    sizes = lengths(problem.scoring.planes.points, norm)
    nearest = problem.nearest(None)
    distance = _non_negative(problem.to_token_radius(nearest.radius)) / ABOVE
    radius = distance
    constrained = problem.conditions.valid.any(1)
    if rounding is not None:
        # Errors grow with the token: taken at the end of the radius, they are upper bounds within it.
        reach = distance.where(distance < torch.inf, LARGEST_RADIUS * (sizes + 1))
        safe = problem.nearest(problem.errors(rounding, reach)).radius
        radius = (_non_negative(problem.to_token_radius(safe)) / ABOVE).minimum(reach).where(constrained, torch.inf)
    which = nearest.which.view(-1, 1)
    if problem.conditions.valid.shape[1]:
        margin = problem.margins.gather(1, which).squeeze(1).where(constrained, torch.inf)
        ahead, behind = problem.conditions.sides(which)
        pair = torch.stack([ahead[:, 0, 0], behind[:, 0, 0]], dim=1)
    else:
        margin, pair = torch.full_like(radius, torch.inf), which.new_zeros(len(radius), 2)
    neither = torch.full_like(pair, problem.scoring.planes.experts)
    found = {"radius": radius, "distance": distance, "lengths": sizes, "margin": margin}
    return found | {"pair": pair.where(constrained.unsqueeze(1), neither)} | problem.bounds()


def _non_negative(radius: Tensor) -> Tensor:
    return radius.nan_to_num(nan=0.0, posinf=torch.inf).clamp_min(0)


def _require_declared_sets(radius: Tensor, chosen: Tensor, routed: Tensor, core: bool) -> None:
    """Raise ValueError if the router's own sets are not those that its parts declare."""
    wrong = (chosen & ~routed if core else chosen != routed).any(1) & (radius > 0)
    if wrong.any():
        raise ValueError(
            f"{int(wrong.sum())} tokens selected other experts than the router's parts declare, beyond rounding error; "
            "a router with wrong declarations cannot be certified."
        )


def _no_tokens(tokens: Tensor) -> dict[str, Tensor]:
    empty = torch.zeros(0, dtype=torch.float64, device=tokens.device)
    found = dict.fromkeys(("radius", "distance", "lengths", "margin"), empty)
    return found | {"pair": torch.zeros(0, 2, dtype=torch.int64, device=tokens.device)}
