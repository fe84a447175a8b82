"""`certify`: how far each token may be moved and keep its experts; `undecided`: can rounding alone send it elsewhere?

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

from holdfast.certificates.arithmetic import Arithmetic, Rounding
from holdfast.certificates.certificates import Certificates, Kind
from holdfast.certificates.planes import Problem
from holdfast.certificates.subjects import Gate, Subject, gate_subject, router_subject
from holdfast.certificates.voting import MajorityVote, Smoothing, certify_vote
from holdfast.routing import Context, Router
from holdfast.routing.bounds import ABOVE, Norm, check_norm, lengths
from holdfast.routing.declarations import NoBound

FAR = 2.0**10  # times a token's length: where no plane is in reach, certificates end here


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
    """Radii for `tokens (B,N,d)` or `(T,d)`, of perturbations of the router's input; the context stays as it is.

    subject     a Router in evaluation mode; the plain weights and rule of a gate that is not ours; or a majority vote
    context     what the Router was called with. AC is certified given the clusters in it; where tokens inform each other,
                the radius holds with every token of the sequence moved that far
    norm        "l2", or "linf", the largest change of any feature
    arithmetic  what scores are computed in. The radius is what is left when rounding errors are taken off; routers of ours
                compute in float32. None is real numbers: then float32 may still flip a set inside the radius
    rounding    take off the "worst" error, or what is "likely" its bound: wide routers lose much to errors they never make
    smoothing   where no bound is known for a router, certify its majority vote under this noise; otherwise that is an error
    """
    check_norm(norm)
    if isinstance(subject, MajorityVote):
        return certify_vote(subject, tokens, norm)
    computed = None if arithmetic is None else Arithmetic.of(arithmetic, rounding=rounding)
    clean, real = _checked(subject, tokens, context)
    try:
        return _collected(_described(subject, clean, context, norm), tokens, real, norm, computed)
    except NoBound as reason:
        if smoothing is not None and isinstance(subject, Router):
            return certify_vote(MajorityVote(subject, smoothing, context=context), tokens, norm)
        instead = (
            "pass smoothing=Smoothing(sigma=...)" if isinstance(subject, Router) else "give its callable to MajorityVote"
        )
        raise NoBound(f"{reason}; {instead} to certify its majority vote.") from None


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
    clean, real = _checked(subject, tokens, context)
    problems = _described(subject, clean, context, "l2").problems()
    found = [problem.nearest(problem.errors_in_place(arithmetic)).radius <= 0 for _, problem in problems]
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
    clean, _ = _checked(subject, tokens, context)
    return _described(subject, clean, context, "l2").scoring.value_errors_in_place(arithmetic)


def _described(subject: Router | Gate, tokens: Tensor, context: Context | None, norm: Norm) -> Subject:
    if isinstance(subject, Router):
        return router_subject(subject, tokens, context or Context(), norm)
    return gate_subject(subject, tokens, norm)


def _checked(subject: Router | Gate, tokens: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
    """Tokens (B,N,d) with 0 in place of padding, and which (B,N) are real."""
    if not isinstance(subject, Router | Gate):
        raise ValueError(f"{type(subject).__name__} is neither a Router nor a Gate; for any other callable, a MajorityVote.")
    width = subject.dim if isinstance(subject, Router) else subject.weight.shape[1]
    alone = isinstance(subject, Gate) or not subject.traits.sequence_aware
    if tokens.dim() not in ((2, 3) if alone else (3,)) or not tokens.is_floating_point() or tokens.shape[-1] != width:
        wanted = f"(B, N, {width}) or (T, {width})" if alone else f"(B, N, {width})"
        raise ValueError(f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; expected floating point, {wanted}.")
    if isinstance(subject, Router) and subject.training:
        raise ValueError("the router is in training mode, where it learns and may add noise; call eval() first.")
    if context is not None and isinstance(subject, Gate):
        raise ValueError("a context is for a Router; a Gate looks at nothing but its token.")
    if context is not None and context.cache is not None:
        raise ValueError("the context holds a cache of earlier tokens; certify whole sequences, without one.")
    tokens = tokens.detach().unsqueeze(0) if tokens.dim() == 2 else tokens.detach()
    real = (context or Context()).real_or_all(tokens)
    tokens = tokens.where(real.unsqueeze(-1), 0.0)
    if not tokens.isfinite().all():
        bad = int((~tokens.isfinite()).any(-1).sum())
        raise ValueError(f"{bad} of {real.numel()} tokens hold NaN or infinite numbers; there is nothing to certify.")
    return tokens, real


def _collected(subject: Subject, tokens: Tensor, real: Tensor, norm: Norm, rounding: Arithmetic | None) -> Certificates:
    parts: list[dict[str, Tensor]] = []
    exact = True
    for rows, problem in subject.problems():
        parts.append(_solved(problem, norm, rounding))
        exact = problem.exact
        if subject.chosen is not None and rounding is not None:
            _compare(parts[-1]["radius"], problem.conditions.chosen, subject.chosen[rows], subject.core is not None)
    lead, flat = tokens.shape[:-1], real.flatten()
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else _nothing(tokens)
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


def _solved(problem: Problem, norm: Norm, rounding: Arithmetic | None) -> dict[str, Tensor]:
    """For some tokens, as rows."""
    sizes = lengths(problem.scoring.planes.points, norm)
    nearest = problem.nearest(None)
    distance = _clean(problem.outward(nearest.radius)) / ABOVE
    radius = distance
    constrained = problem.conditions.valid.any(1)
    if rounding is not None:
        # Errors grow with the token: they are taken where it is longest, and hold for all that is nearer.
        reach = distance.where(distance < torch.inf, FAR * (sizes + 1))
        safe = problem.nearest(problem.errors(rounding, reach)).radius
        radius = (_clean(problem.outward(safe)) / ABOVE).minimum(reach).where(constrained, torch.inf)
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


def _clean(radius: Tensor) -> Tensor:
    return radius.nan_to_num(nan=0.0, posinf=torch.inf).clamp_min(0)


def _compare(radius: Tensor, chosen: Tensor, routed: Tensor, core: bool) -> None:
    """Raise an error where the router's own sets are not those that its parts declare."""
    wrong = (chosen & ~routed if core else chosen != routed).any(1) & (radius > 0)
    if wrong.any():
        raise ValueError(
            f"{int(wrong.sum())} tokens took other experts than the router's parts declare, by more than rounding explains; "
            "a router whose declarations are wrong cannot be certified."
        )


def _nothing(tokens: Tensor) -> dict[str, Tensor]:
    empty = torch.zeros(0, dtype=torch.float64, device=tokens.device)
    found = dict.fromkeys(("radius", "distance", "lengths", "margin"), empty)
    return found | {"pair": torch.zeros(0, 2, dtype=torch.int64, device=tokens.device)}
