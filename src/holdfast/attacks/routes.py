"""The routing attack: the smallest change of a token that sends it to other experts.

S the set of a clean token x:   maximise  key_j(x') - key_i(x')  over j not in S, i in S, |x' - x| <= budget

By PGD (Madry et al. 2018), once for each of the pairs (i,j) whose switching plane is nearest when keys are linearised at x
(as DeepFool does, Moosavi-Dezfooli et al. 2016), and once for the best pair at each step. What it finds is shortened by
bisection and searched again at smaller budgets. The smallest flipping perturbation found is above every certificate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from holdfast.attacks.flags import Flag, black_box_wins, randomised, train_mode, warn, zero_gradients
from holdfast.attacks.route_search import Plan, Readings, Route, Search, gradient, nearest_plans
from holdfast.attacks.threat import (
    Json,
    Norm,
    check_budget,
    check_count,
    check_norm,
    check_seed,
    distances,
    mixed,
    row_norms,
)
from holdfast.routing import Context, Router, Traits


@dataclass(frozen=True)
class AttackedRoutes:
    """Tokens moved so that they take other experts. Leading dimensions (...) are those of the tokens, (B,N) or (T,)."""

    inputs: Tensor  # (..., d): each within its ball; padding as it was
    flipped: Tensor  # (...) bool: the set of experts of this token changed, in at least one layer
    flipped_by_layer: Tensor  # (L, ...) bool
    distances: Tensor  # (...) float64: the smallest perturbation found that flips the token; infinite where none was
    budgets: Tensor  # (...) float64: how far each token might be moved; 0 for padding
    real: Tensor  # (...) bool: tokens that are no padding; the others are not attacked and count nowhere
    budget: float | None  # as it was stated; None where each token had its own
    realised: float  # the largest distance that a token of `inputs` was moved
    norm: Norm
    relative: bool  # the budget was a multiple of each token's own length
    joint: bool  # all tokens move together, and a distance is the largest move in the token's sequence
    steps: int
    seed: int
    options: Mapping[str, Json] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()

    @property
    def rate(self) -> float:
        """The realised rate: the share of real tokens that were flipped."""
        return float(self.flipped.sum() / self.real.sum().clamp_min(1))

    @property
    def rates(self) -> list[float]:
        """The same for each layer."""
        return [float(layer.sum() / self.real.sum().clamp_min(1)) for layer in self.flipped_by_layer]

    def summary(self) -> dict[str, Json]:
        """What to store with a result."""
        found = self.distances[self.real & self.distances.isfinite()]
        return {
            "attack": "routing",
            "budget": self.budget,
            "norm": self.norm,
            "relative": self.relative,
            "joint": self.joint,
            "realised": self.realised,
            "rate": self.rate,
            "rates": self.rates,
            "tokens": int(self.real.sum()),
            "smallest": float(found.min()) if found.numel() else None,
            "median": float(found.median()) if found.numel() else None,  # of the tokens that were flipped
            "steps": self.steps,
            "seed": self.seed,
            "options": dict(self.options),
            "flags": [flag.summary() for flag in self.flags],
        }


def attack_routes(
    route: Router | Route,
    tokens: Tensor,
    *,
    budget: float | Tensor,
    norm: Norm = "l2",
    relative: bool = False,
    k: int | None = None,
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
    """Move each token within its budget so that it goes to another set of experts, and find the smallest such move.

    route       a Router, with the `context` it is called in (only the tokens move), or any callable from tokens, for example
                a model's embeddings (B,N,d), to a `Routing`, a list of them (one a layer), or scores (then say `k`). The
                callable must keep the graph, or there are no gradients to follow
    budget      a length; with `relative`, a multiple of each token's own length; or a tensor with one for each token
    k           compare the first k slots instead of the whole sets: the hard core of a smooth router
    padding     bool, True where a token is real; by default the context's
    joint       may moving one token flip another? By default what a Router's traits say, and True for a callable. If so the
                tokens of a sequence move together (of the batch, for a Router that looks across it), and a token's
                distance is the largest move among them
    pairs       how many of the nearest switching planes are tried, among the `candidates` best experts outside the set and
                the as many worst inside it
    steps       of each climb, as long as the radius
    restarts    runs from a random start towards the best pair of each step
    rounds      searches at smaller budgets, after the first
    bisections  forwards that shorten what each climb has found
    tries       random perturbations of the whole budget, to see whether gradients mislead
    """
    check_norm(norm)
    check_seed(seed)
    for name, count in {"steps": steps, "pairs": pairs, "candidates": candidates}.items():
        check_count(count, name)
    for name, count in {"restarts": restarts, "rounds": rounds, "bisections": bisections, "tries": tries}.items():
        check_count(count, name, least=0)
    call = _callable(route, context)
    _check_tokens(tokens)
    units = _units(route, tokens, joint)
    real = _real(tokens, token_mask if token_mask is not None or context is None else context.token_mask)
    budgets = _budgets(tokens, budget, norm, relative).where(real, 0.0)
    readings = Readings(call, tokens, k)
    search = Search(readings, tokens, budgets, real, norm, units)
    plans = nearest_plans(search, pairs, candidates)
    flags = _flags(route, search, plans, real) if check else ()
    search.run(plans, steps, restarts, bisections, seed)
    white = search.found
    search.scatter(tries, seed)
    flags = (*flags, *black_box_wins(white, search.found, "random noise"))
    for round_ in range(rounds):
        search.narrow()
        search.run(plans, steps, restarts, bisections, mixed(seed, "round", round_))
    options: dict[str, Json] = {"k": k, "pairs": pairs, "candidates": candidates, "restarts": restarts}
    options |= {"rounds": rounds, "bisections": bisections, "tries": tries}
    moved = search.strongest
    with torch.no_grad():
        flipped = readings.changed(readings(moved)) & real.flatten()
    lead = tokens.shape[:-1]
    return AttackedRoutes(
        inputs=moved.view(tokens.shape),
        flipped=flipped.any(0).view(lead),
        flipped_by_layer=flipped.view(-1, *lead),
        distances=search.smallest.view(lead),
        budgets=budgets,
        real=real,
        budget=None if isinstance(budget, Tensor) else budget,
        realised=float(distances(moved, search.clean, norm).max()),
        norm=norm,
        relative=relative,
        joint=units is not None,
        steps=steps,
        seed=seed,
        options=options,
        flags=warn(*flags),
    )


def _flags(route: object, search: Search, plans: list[Plan], real: Tensor) -> tuple[Flag, ...]:
    rows = search.clean.detach().requires_grad_()
    with torch.enable_grad():
        layers = search.readings(rows)
        value = plans[0].value(search.readings, layers).where(search.real, 0.0).sum()
    once, again = (torch.cat([layer.keys for layer in read], 1) for read in (search.readings.clean, layers))
    known = real.flatten() & ~search.readings.clean[0].chosen.all(-1)  # a token with all experts has nowhere to go
    return (
        *train_mode(route),
        *randomised(once[search.real], again[search.real]),
        *zero_gradients(gradient(value, rows), among=known, what="tokens"),
    )


def _callable(route: Router | Route, context: Context | None) -> Route:
    if isinstance(route, Router):
        return cast(Route, partial(route, context=context))
    if context is not None:
        raise ValueError("a context is for a Router; a callable brings its own.")
    return route


def _units(route: Router | Route, tokens: Tensor, joint: bool | None) -> int | None:
    """How many groups of tokens move together; None where each token stands alone."""
    traits = route.traits if isinstance(route, Router) else Traits(sequence_aware=True)
    joint = (traits.sequence_aware or not traits.batch_invariant) if joint is None else joint
    if not joint:
        return None
    return tokens.shape[0] if tokens.dim() > 2 and traits.batch_invariant else 1


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() < 2 or tokens.numel() == 0 or not tokens.is_floating_point() or not tokens.isfinite().all():
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise ValueError(f"tokens are {got}; expected finite floating-point numbers, (B, N, d) or (T, d).")


def _real(tokens: Tensor, token_mask: Tensor | None) -> Tensor:
    lead = tokens.shape[:-1]
    if token_mask is None:
        return torch.ones(lead, dtype=torch.bool, device=tokens.device)
    if token_mask.dtype != torch.bool or token_mask.shape != lead:
        got = f"{token_mask.dtype} of shape {tuple(token_mask.shape)}"
        raise ValueError(f"token_mask is {got}; expected bool of shape {tuple(lead)}, True where the token is real.")
    return token_mask.to(tokens.device)


def _budgets(tokens: Tensor, budget: float | Tensor, norm: Norm, relative: bool) -> Tensor:
    """(...) float64: a radius for each token."""
    lead = tokens.shape[:-1]
    if isinstance(budget, Tensor):
        if budget.shape != lead or not (budget >= 0).all() or not budget.isfinite().all():
            raise ValueError(f"budget is a tensor of shape {tuple(budget.shape)}; expected lengths of shape {tuple(lead)}.")
        radius = budget.to(device=tokens.device, dtype=torch.float64)
    else:
        check_budget(budget)
        radius = torch.full(lead, budget, dtype=torch.float64, device=tokens.device)
    if relative:
        radius = radius * row_norms(tokens.reshape(-1, tokens.shape[-1]), norm).view(lead)
    return radius
