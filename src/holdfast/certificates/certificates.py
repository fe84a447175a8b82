"""`certify`: for each token, how far it may be moved and keep its set of experts."""

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, Rounding
from holdfast.certificates.problem import Problem
from holdfast.certificates.reading import Gate, Reading, read_gate, read_router
from holdfast.certificates.records import Certificates, Kind
from holdfast.certificates.scoring import NoBound
from holdfast.certificates.voting import MajorityVote, Smoothing, certify_vote
from holdfast.routing import Context, Router
from holdfast.routing.bounds import ABOVE, Norm, check_norm, lengths

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
    clean, real = checked(subject, tokens, context)
    try:
        reading = read(subject, clean, context, norm)
    except NoBound as reason:
        if smoothing is not None and isinstance(subject, Router):
            return certify_vote(MajorityVote(subject, smoothing, context=context), tokens, norm)
        instead = (
            "say smoothing=Smoothing(sigma=...)" if isinstance(subject, Router) else "give its callable to MajorityVote"
        )
        raise NoBound(f"{reason}, so no radius is known for it; {instead} to certify its majority vote.") from None
    return _collected(reading, tokens, real, norm, computed)


def read(subject: Router | Gate, tokens: Tensor, context: Context | None, norm: Norm) -> Reading:
    if isinstance(subject, Router):
        return read_router(subject, tokens, context or Context(), norm)
    return read_gate(subject, tokens.reshape(-1, tokens.shape[-1]), norm)


def checked(subject: Router | Gate, tokens: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
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


def _collected(reading: Reading, tokens: Tensor, real: Tensor, norm: Norm, rounding: Arithmetic | None) -> Certificates:
    parts: list[dict[str, Tensor]] = []
    exact = True
    for rows, problem in reading.problems():
        parts.append(_solved(problem, norm, rounding))
        exact = problem.exact
        if reading.chosen is not None and rounding is not None:
            _compare(parts[-1]["radius"], problem.chosen, reading.chosen[rows], reading.core)
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
        about=reading.about,
        bounds=found,
        arithmetic="real numbers" if rounding is None else str(rounding),
    )


def _solved(problem: Problem, norm: Norm, rounding: Arithmetic | None) -> dict[str, Tensor]:
    """For some tokens, as rows."""
    sizes = lengths(problem.scoring.planes.points, norm)
    nearest = problem.nearest(None)
    distance = _clean(problem.outward(nearest.radius)) / ABOVE
    radius = distance
    conditions = problem.pairs.valid.any(1)
    if rounding is not None:
        # Errors grow with the token: they are taken where it is longest, and hold for all that is nearer.
        reach = distance.where(distance < torch.inf, FAR * (sizes + 1))
        safe = problem.nearest(problem.errors(rounding, reach)).radius
        radius = (_clean(problem.outward(safe)) / ABOVE).minimum(reach).where(conditions, torch.inf)
    which = nearest.which.view(-1, 1)
    if problem.pairs.valid.shape[1]:
        margin = problem.margins.gather(1, which).squeeze(1).where(conditions, torch.inf)
        ahead, behind = problem.pairs.sides(which)
        pair = torch.stack([ahead[:, 0, 0], behind[:, 0, 0]], dim=1)
    else:
        margin, pair = torch.full_like(radius, torch.inf), which.new_zeros(len(radius), 2)
    nobody = torch.full_like(pair, problem.scoring.planes.experts)
    found = {"radius": radius, "distance": distance, "lengths": sizes, "margin": margin}
    return found | {"pair": pair.where(conditions.unsqueeze(1), nobody)} | problem.bounds()


def _clean(radius: Tensor) -> Tensor:
    return radius.nan_to_num(nan=0.0, posinf=torch.inf).clamp_min(0)


def _compare(radius: Tensor, chosen: Tensor, routed: Tensor, core: bool) -> None:
    """What we took the router for must be what it is."""
    wrong = (chosen & ~routed if core else chosen != routed).any(1) & (radius > 0)
    if wrong.any():
        raise ValueError(
            f"{int(wrong.sum())} tokens took other experts than their scores say, by more than rounding explains: the "
            "router does something that its parts do not tell, and cannot be certified."
        )


def _nothing(tokens: Tensor) -> dict[str, Tensor]:
    empty = torch.zeros(0, dtype=torch.float64, device=tokens.device)
    found = dict.fromkeys(("radius", "distance", "lengths", "margin"), empty)
    return found | {"pair": torch.zeros(0, 2, dtype=torch.int64, device=tokens.device)}
