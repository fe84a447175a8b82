"""The routing attack: find the smallest perturbation of a token that flips it, that is, changes its selected set.

With S the selected set of the clean token x and key_e(x) what expert e is ranked by:

    maximise  key_j(x') - key_i(x')  over j not in S, i in S, |x' - x| <= budget

The attack runs PGD (Madry et al. 2018) once for each of the pairs (i,j) whose decision boundary is nearest when keys are
linearised at x (as DeepFool does, Moosavi-Dezfooli et al. 2016), and once for the best pair of each step. It shortens the
flips it finds by bisection, and searches again at smaller budgets. Every flip it finds must be larger than the certified
radius of its token; `route_search` has the search.

Two other goals use the same search: `experts` pushes every token to experts of your choice, and `universal` looks for one
perturbation that flips as many tokens as possible (as Moosavi-Dezfooli et al. 2017 do with images).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor

from holdfast.attacks.flags import (
    AttackResult,
    Flag,
    black_box_flag,
    late_flag,
    randomised_flag,
    train_mode_flag,
    warn,
    zero_gradient_flag,
)
from holdfast.attacks.route_search import (
    Goal,
    JoinExperts,
    LeaveSet,
    Route,
    RouteProbe,
    RouteSearch,
    Target,
    nearest_targets,
)
from holdfast.attacks.threat import Json, budgets_of, check_count, check_seed, derived_seed, distances, gradient
from holdfast.routing import Context, Router, Traits
from holdfast.routing.bounds import Norm, check_norm


@dataclass(frozen=True, kw_only=True)
class AttackedTokens(AttackResult):
    """Perturbed router inputs, and how they were found. Leading dimensions (...) are those of the tokens, (B,N) or (T,)."""

    stored: ClassVar[tuple[str, ...]] = ("budget", "norm", "relative", "joint", "realised", "steps", "seed", "options")
    inputs: Tensor  # (..., d): each within its ball; padding unchanged
    budget: float | None  # as passed; None if each token had its own
    realised: float  # the size of the largest perturbation in `inputs`
    norm: Norm
    relative: bool  # the budget was a multiple of each token's own norm
    joint: bool  # tokens are perturbed together
    steps: int
    seed: int
    options: Mapping[str, Json] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttackedRoutes(AttackedTokens):
    """Tokens perturbed so that they flip. Those that are perturbed `joint` have the distance of the one farthest away.

    If the attack was towards some experts, a token has flipped if it asks for all of them, also without the attack.
    """

    stored = (*AttackedTokens.stored, "rate", "rates", "flags")
    flipped: Tensor  # (...) bool: this token flipped in at least one layer: its selected set changed
    flipped_by_layer: Tensor  # (L, ...) bool
    distances: Tensor  # (...) float64: the smallest perturbation found that flips the token; infinite if none was found
    budgets: Tensor  # (...) float64: the largest allowed perturbation of each token; 0 for padding
    real: Tensor  # (...) bool: tokens that are not padding; padding is not attacked and not counted

    @property
    def rate(self) -> float:
        """The realised rate: the share of real tokens that flipped."""
        return float(self.flipped.sum() / self.real.sum().clamp_min(1))

    @property
    def rates(self) -> list[float]:
        """The realised rate of each layer."""
        return [float(layer.sum() / self.real.sum().clamp_min(1)) for layer in self.flipped_by_layer]

    def summary(self) -> dict[str, Json]:
        """Return what to store as JSON; "smallest" and "median" are of the tokens that the attack flipped."""
        found = self.distances[self.real & self.distances.isfinite() & (self.distances > 0)]
        smallest, median = (float(found.min()), float(found.median())) if found.numel() else (None, None)
        tokens = int(self.real.sum())
        return {"attack": "routing", **super().summary(), "tokens": tokens, "smallest": smallest, "median": median}


def attack_routes(
    route: Router | Route,
    tokens: Tensor,
    *,
    budget: float | Tensor,
    norm: Norm = "l2",
    relative: bool = False,
    k: int | None = None,
    experts: int | Sequence[int] | None = None,
    universal: bool = False,
    context: Context | None = None,
    token_mask: Tensor | None = None,
    joint: bool | None = None,
    steps: int = 10,
    pairs: int = 4,
    candidates: int = 8,
    restarts: int = 1,
    rounds: int = 2,
    bisections: int = 16,
    tries: int = 4,
    seed: int = 0,
    check: bool = True,
) -> AttackedRoutes:
    """Perturb each token within its budget so that it flips, and find the smallest such perturbation.

    route       a Router, with the `context` it is called in (only the tokens are perturbed), or any callable from tokens,
                for example a model's embeddings (B,N,d), to a `Routing`, a list of them (one per layer), or scores (then
                pass `k`). The callable must be differentiable
    budget      a norm; with `relative`, a multiple of each token's own norm; or a tensor with one budget per token
    k           compare the first k slots instead of the whole sets: the hard core of a smooth router
    experts     push every token to this expert, or to all of these at once. Read in `Routing.requested`: what a limit of
                capacity does with the token does not count
    universal   find one perturbation for all tokens, within the smallest budget of a real token
    token_mask  bool, True where a token is real; by default the context's
    joint       whether perturbing one token may flip another; by default as a Router's traits declare, and True for a
                callable. If so, the tokens of a sequence are perturbed together (those of the batch, for a Router that is
                not batch-invariant), and a token's distance is the largest perturbation among them
    pairs       how many of the nearest decision boundaries to try, among the `candidates` best experts outside the set and
                the same number of worst ones inside it
    steps       PGD steps of each run, each as long as the budget
    restarts    runs from a random start towards the best pair of each step
    rounds      further searches at smaller budgets
    bisections  forwards that shorten the perturbation after each run
    tries       random perturbations of the whole budget, to see whether gradients mislead
    """
    check_norm(norm)
    check_seed(seed)
    counts = {"pairs": pairs, "candidates": candidates, "restarts": restarts, "rounds": rounds}
    counts |= {"bisections": bisections, "tries": tries}
    for name, count in {"steps": steps, **counts}.items():
        check_count(count, name, least=1 if name in ("steps", "pairs", "candidates") else 0)
    if not isinstance(route, Router) and context is not None:
        raise ValueError("context= works only with a Router; a callable must provide its own context.")
    if tokens.dim() < 2 or tokens.numel() == 0 or not tokens.is_floating_point() or not tokens.isfinite().all():
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise ValueError(f"tokens are {got}; expected finite floating-point numbers, (B, N, d) or (T, d).")
    traits = route.traits if isinstance(route, Router) else Traits(sequence_aware=True)
    joint = (traits.sequence_aware or not traits.batch_invariant) if joint is None else joint
    joint = joint or universal
    # How many groups of tokens are perturbed together; None: each token is perturbed alone.
    units = (tokens.shape[0] if tokens.dim() > 2 and traits.batch_invariant and not universal else 1) if joint else None
    mask = token_mask if token_mask is not None or context is None else context.token_mask
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:-1]):
        got, expected = f"{mask.dtype} of shape {tuple(mask.shape)}", tuple(tokens.shape[:-1])
        raise ValueError(f"token_mask is {got}; expected bool of shape {expected}, True where the token is real.")
    real = (torch.ones(tokens.shape[:-1], dtype=torch.bool) if mask is None else mask).to(tokens.device)
    budgets = budgets_of(tokens, budget, norm if relative else None).where(real, 0.0)
    if universal and real.any():
        budgets = budgets[real].min().expand(real.shape).where(real, 0.0)
    call = cast(Route, partial(route, context=context)) if isinstance(route, Router) else route
    wanted = None if experts is None else [experts] if isinstance(experts, int) else list(experts)
    goal: Goal = LeaveSet() if wanted is None else JoinExperts(wanted)
    probe = RouteProbe(call, tokens, k, goal)
    _check_experts(wanted, probe)
    search = RouteSearch(probe, tokens, budgets, real, norm, units, universal)
    targets = nearest_targets(search, pairs, candidates)
    flags = _flags(route, search, targets, real) if check else ()
    search.run(targets, steps, restarts, bisections, seed)
    white, strength = search.found, search.strength
    search.try_random(tries, seed)
    if universal:  # more tokens at once, not other tokens
        white, black = strength >= search.strength, torch.ones_like(strength, dtype=torch.bool)
    else:
        black = search.found
    flags = (*flags, *black_box_flag(white, black, "random noise"), *late_flag(search.late, search.found, steps))
    for round_ in range(rounds):
        search.search_closer()
        search.run(targets, steps, restarts, bisections, derived_seed(seed, "round", round_))
    perturbed = search.strongest
    with torch.no_grad():
        flipped = probe.reached(probe(perturbed)) & real.flatten()
    lead = tokens.shape[:-1]
    return AttackedRoutes(
        inputs=perturbed.view(tokens.shape),
        flipped=flipped.any(0).view(lead),
        flipped_by_layer=flipped.view(-1, *lead),
        distances=search.smallest.view(lead),
        budgets=budgets,
        real=real,
        budget=None if isinstance(budget, Tensor) else budget,
        realised=float(distances(perturbed, search.clean, norm).max()),
        norm=norm,
        relative=relative,
        joint=units is not None,
        steps=steps,
        seed=seed,
        options={"k": k, "experts": wanted, "universal": universal, **counts},
        flags=warn(*flags),
    )


def _check_experts(wanted: list[int] | None, probe: RouteProbe) -> None:
    """Raise ValueError unless these are different experts of every layer, and as many as a token can have."""
    experts = min(layer.keys.shape[-1] for layer in probe.clean)
    slots = max(int(layer.chosen.sum(-1).max()) for layer in probe.clean)
    if wanted is None:
        return
    if not wanted or len(set(wanted)) < len(wanted) or not all(0 <= one < experts for one in wanted):
        raise ValueError(f"experts is {wanted}; expected one or several of the experts 0 to {experts - 1}, each once.")
    if len(wanted) > slots:
        raise ValueError(f"experts is {wanted}, but tokens have at most {slots} experts.")


def _flags(route: object, search: RouteSearch, targets: list[Target], real: Tensor) -> tuple[Flag, ...]:
    rows = search.clean.detach().requires_grad_()
    with torch.enable_grad():
        layers = search.probe(rows)
        value = targets[0].value(search.probe, layers).where(search.real, 0.0).sum()
    once, again = (torch.cat([layer.keys for layer in read], 1) for read in (search.probe.clean, layers))
    # A token with all experts cannot flip, and one that has the wanted experts need not.
    known = real.flatten() & ~search.probe.clean[0].chosen.all(-1) & ~search.probe.reached(search.probe.clean)[0]
    random = randomised_flag(once[search.real], again[search.real])
    return (*train_mode_flag(route), *random, *zero_gradient_flag(gradient(value, rows), among=known, what="tokens"))
