"""Attacks on the load of experts, for all tokens of a batch together.

With load_e the share of real tokens that ask for expert e, maximise over tokens within their budgets

    overload     max_e load_e                            one expert gets as many tokens as possible
    imbalance    mean_e (load_e - mean load)^2 / mean load^2    the loads are as uneven as possible

`attack_routes` first pushes every token to each expert in turn, which gives each token several perturbations and their sets.
Then each token takes the set that raises the objective most, again and again until no token changes: both objectives are
convex in the loads, so that no round lowers them. Where a token has several experts, `imbalance` goes on with the experts
that now have the highest loads, together with every other one.

A load counts what tokens ask for (`Routing.requested`). What a limit of capacity then takes away is `dropped`.

T tokens, E experts, C perturbations of each token
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from holdfast.attacks.flags import AttackWarning, Flag, warn
from holdfast.attacks.route_search import JoinExperts, Route, RouteProbe
from holdfast.attacks.routes import AttackedRoutes, AttackedTokens, attack_routes
from holdfast.attacks.threat import distances, gradient
from holdfast.errors import require_known
from holdfast.routing import Context, Router

ROUNDS = 20  # of choices between perturbations; they end when no token changes


class Objective(NamedTuple):
    about: str
    value: Callable[[Tensor], Tensor]  # of loads (E,)
    together: bool  # the sets of several experts matter, not only of one


OBJECTIVES = {
    "overload": Objective("the largest load of an expert", lambda load: load.amax(), False),
    "imbalance": Objective(
        "the squared coefficient of variation of the loads",
        lambda load: load.var(correction=0) / load.mean().square(),
        True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class AttackedLoad(AttackedTokens):
    """Tokens perturbed so that experts are overloaded."""

    stored = (*AttackedTokens.stored, "attack", "expert", "clean_value", "value", "clean_load", "load", "targeted")
    stored += ("clean_dropped", "dropped", "tokens", "flags")
    attack: str  # a name of `OBJECTIVES`
    clean_load: list[float]  # the share of real tokens that ask for each expert, without the attack
    load: list[float]  # the same, after the attack
    targeted: list[float]  # the same for each expert, after the attack that pushes tokens to it alone
    clean_value: float  # the objective, without the attack
    value: float  # the objective, after the attack
    clean_dropped: float  # the share of what real tokens ask for that a limit of capacity takes away
    dropped: float
    tokens: int  # real ones

    @property
    def expert(self) -> int:
        """The expert with the highest load after the attack."""
        return max(range(len(self.load)), key=self.load.__getitem__)


def attack_load(
    route: Router | Route,
    tokens: Tensor,
    *,
    budget: float | Tensor,
    objective: str = "overload",
    k: int | None = None,
    context: Context | None = None,
    **search: Any,
) -> AttackedLoad:
    """Perturb tokens within their budgets so that one expert gets as many as possible, or the loads become uneven.

    objective   "overload" or "imbalance"
    search      the other options of `attack_routes`, whose search this is, by default with one pair of experts; distances
                are not searched for
    """
    require_known("objective", objective, OBJECTIVES)
    aim = OBJECTIVES[objective]
    call = cast(Route, partial(route, context=context)) if isinstance(route, Router) else route
    probe = RouteProbe(call, tokens, k, JoinExperts([]))
    if len(probe.clean) > 1:
        raise ValueError(f"the route returned {len(probe.clean)} layers; attack the load of one layer at a time.")
    count, most = probe.clean[0].chosen.shape[1], int(probe.clean[0].chosen.sum(1).max())
    if probe.clean[0].chosen.all():
        raise ValueError("every token asks for every expert, and a search towards experts cannot change their load.")
    how = {"budget": budget, "k": k, "context": context, "pairs": 1, "rounds": 0, "bisections": 0, **search}
    clean = tokens.detach().reshape(-1, tokens.shape[-1])
    found, held = list[AttackedRoutes](), list[int]()
    rows, sets = [clean], [probe.clean[0].chosen]  # perturbations of all tokens, and what tokens then ask for
    for _ in range(most if aim.together else 1):
        for expert in (expert for expert in range(count) if expert not in held):
            with warnings.catch_warnings(action="ignore", category=AttackWarning):
                found.append(attack_routes(route, tokens, experts=[*held, expert], **how))
            rows.append(found[-1].inputs.view_as(clean))
            sets.append(_asked(probe, rows[-1]))
        best, load = _combined(probe, aim, torch.stack(rows), torch.stack(sets), found[0].real.flatten())
        held = load.argsort(descending=True)[: len(held) + 1].tolist()
    one, real = found[0], found[0].real.flatten()
    flags = {flag.kind: flag for each in found for flag in each.flags}
    if aim.together and probe.ragged[0]:
        detail = "the number of experts of a token varies, and smaller sets were not searched for."
        flags["lower bound"] = Flag("lower bound", detail)
    clean_load = sets[0][real].float().mean(0)
    return AttackedLoad(
        attack=objective,
        inputs=best.view(tokens.shape),
        clean_load=clean_load.tolist(),
        load=load.tolist(),
        targeted=[each.rate for each in found[:count]],
        clean_value=float(aim.value(clean_load)),
        value=float(aim.value(load)),
        clean_dropped=_dropped(probe, clean, real),
        dropped=_dropped(probe, best, real),
        tokens=int(real.sum()),
        realised=float(distances(best, clean, one.norm).max()),
        **{name: getattr(one, name) for name in ("budget", "norm", "relative", "joint", "steps", "seed")},
        options={**one.options, "experts": None},
        flags=warn(*flags.values()),
    )


def _combined(probe: RouteProbe, aim: Objective, rows: Tensor, sets: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return (T,d) one of the perturbations `rows (C,T,d)` for each token, and the loads (E,) that they lead to.

    Choices start from each perturbation of all tokens. The sets (C,T,E) are those of a token whose whole batch has the same
    perturbation, so that the loads of a mixture are measured again.
    """
    best, largest, loads = rows[0], -torch.inf, torch.empty(0)
    for start, whole in enumerate(sets):
        choice, load = torch.full_like(real, start, dtype=torch.long), whole[real].float().mean(0)
        for _ in range(ROUNDS):
            with torch.enable_grad():
                load = load.requires_grad_()
                slope = gradient(aim.value(load), load)
            better = (sets.float() @ slope).argmax(0)
            if torch.equal(better, choice):
                break
            choice = better
            load = sets[choice, torch.arange(len(choice))][real].float().mean(0)
        for mixture in (rows[start], rows[choice, torch.arange(len(choice))]):
            load = _asked(probe, mixture)[real].float().mean(0)
            if float(aim.value(load)) > largest:
                best, largest, loads = mixture, float(aim.value(load)), load
    return best, loads


@torch.no_grad()
def _asked(probe: RouteProbe, rows: Tensor) -> Tensor:
    """Return (T,E) bool: what tokens ask for."""
    return probe(rows)[0].chosen


@torch.no_grad()
def _dropped(probe: RouteProbe, rows: Tensor, real: Tensor) -> float:
    """Return the share of what real tokens ask for that a limit takes away."""
    routing = probe.routings(rows)[0]
    if routing.dropped is None:
        return 0.0
    return float(routing.dropped[real].sum() / routing.requested_sets[real].sum().clamp_min(1))
