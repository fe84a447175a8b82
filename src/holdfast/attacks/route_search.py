"""What the routing attack reads off a router or a model: for each layer, sets of experts and the keys they were chosen by.

T tokens, E experts, L layers


The search of the routing attack: PGD towards other experts, shortened by bisection.

T tokens as rows (T,d), E experts
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.attacks.threat import Norm, direction, distances, mixed, project, row_norms
from holdfast.kernels.select import top
from holdfast.routing import Routing

Route = Callable[[Tensor], Routing | Sequence[Routing] | Tensor]  # tokens (..., d) to routings, or to scores (..., E)
TINY = torch.finfo(torch.float32).tiny


class Layer(NamedTuple):
    keys: Tensor  # (T,E), differentiable: what a higher value of makes an expert more likely to be chosen
    chosen: Tensor  # (T,E) bool


class Readings:
    """Reads `route` at tokens given as rows (T,d); sets are whole, or the first k slots of each token.

    Keys are the logits where gates follow their order, which is then what selection sorts by, unrounded; else log gates,
    what an informer or another rule made of them. Where the number of experts is free and gates are shares, a threshold on
    gates decides, and keys are log gates as well. Which it is, is decided once, at the clean tokens.
    """

    def __init__(self, route: Route, tokens: Tensor, k: int | None) -> None:
        self.route, self.shape, self.k = route, tokens.shape, k
        rows = tokens.detach().reshape(-1, tokens.shape[-1])
        with torch.no_grad():
            routings = self._routings(rows)
        self.ragged = [_is_ragged(routing) and k is None for routing in routings]
        self.by_logits = [_by_logits(routing, ragged) for routing, ragged in zip(routings, self.ragged, strict=True)]
        self.clean = [self._layer(index, routing) for index, routing in enumerate(routings)]

    def __call__(self, rows: Tensor) -> list[Layer]:
        routings = self._routings(rows)
        if len(routings) != len(self.clean):
            raise ValueError(f"the route gave {len(routings)} layers, {len(self.clean)} for the clean tokens.")
        return [self._layer(index, routing) for index, routing in enumerate(routings)]

    def changed(self, layers: list[Layer]) -> Tensor:
        """(L,T) bool: whose set is another one than for the clean tokens."""
        return torch.stack([(now.chosen != was.chosen).any(-1) for now, was in zip(layers, self.clean, strict=True)])

    def margins(self, layers: list[Layer]) -> Tensor:
        """(L,T): by how much the best expert outside the clean set is above the worst inside it; negative while it holds."""
        return torch.stack([_margin(now.keys, was.chosen) for now, was in zip(layers, self.clean, strict=True)])

    def _routings(self, rows: Tensor) -> list[Routing]:
        answer = self.route(rows.view(self.shape))
        if isinstance(answer, Tensor):
            answer = self._from_scores(answer)
        routings = [answer] if isinstance(answer, Routing) else list(answer)
        for routing in routings:
            if routing.gates.shape[0] != rows.shape[0]:
                got, expected = routing.gates.shape[0], rows.shape[0]
                raise ValueError(f"the route gave routes for {got} tokens, but {expected} were put in.")
        if not routings:
            raise ValueError("the route gave no routings: the model has no MoE layer, or none was recorded.")
        return routings

    def _from_scores(self, scores: Tensor) -> Routing:
        if self.k is None:
            raise ValueError("the route gives scores; say k, how many of the best experts a token uses.")
        scores = scores.flatten(0, -2).float()
        experts = top(scores, self.k)
        gates = scores.softmax(-1)
        return Routing(scores, gates, experts, gates.gather(-1, experts))

    def _layer(self, index: int, routing: Routing) -> Layer:
        keys = routing.logits if self.by_logits[index] else routing.gates.clamp_min(TINY).log()
        if self.k is None:
            return Layer(keys, routing.chosen)
        if self.k > routing.experts.shape[-1]:
            raise ValueError(f"k is {self.k}, but tokens have {routing.experts.shape[-1]} experts at most.")
        core = Routing(routing.logits, routing.gates, routing.experts[:, : self.k], routing.weights[:, : self.k])
        return Layer(keys, core.chosen)


def _is_ragged(routing: Routing) -> bool:
    """May the number of experts a token vary? It does, or there is a slot for every expert."""
    return bool((~routing.used).any()) or routing.experts.shape[-1] == routing.gates.shape[-1]


def _by_logits(routing: Routing, ragged: bool) -> bool:
    order = routing.logits.argsort(dim=-1, descending=True)
    follows = bool((routing.gates.gather(-1, order).diff(dim=-1) <= 0).all())
    shares = bool(((routing.gates.sum(-1) - 1).abs() < 1e-3).all())
    return follows and not (ragged and shares)


def _margin(keys: Tensor, chosen: Tensor) -> Tensor:
    """(T,): best outside minus worst inside; an empty side counts as 0, so that the other one can still be pushed."""
    outside = keys.masked_fill(chosen, -torch.inf).amax(-1)
    inside = keys.masked_fill(~chosen, torch.inf).amin(-1)
    return outside.where(~chosen.all(-1), 0.0) - inside.where(chosen.any(-1), 0.0)


SHORTER = 0.9  # a later round first looks for what is at most this much of the smallest perturbation so far
HALF = 0.5  # the same where tokens move together


class Plan:
    """Towards one pair for each token, or towards the best pair of each step. Index E is a key that is always 0."""

    def __init__(self, inside: Tensor | None = None, outside: Tensor | None = None) -> None:
        self.inside, self.outside = inside, outside  # (T,)

    def value(self, readings: Readings, layers: list[Layer]) -> Tensor:
        """(T,): what to raise. Layers whose set has changed already are left alone, so that the others get the budget."""
        if self.inside is None or self.outside is None:
            return readings.margins(layers).where(~readings.changed(layers), 0.0).sum(0)
        return _key(layers[0].keys, self.outside) - _key(layers[0].keys, self.inside)


class Search:
    """The flips found so far, at rows (T,d): the strongest input within the budget, and the smallest distance.

    units   how many groups of tokens move together, sequences or the whole batch; None where each token stands alone
    """

    def __init__(
        self, readings: Readings, tokens: Tensor, budgets: Tensor, real: Tensor, norm: Norm, units: int | None
    ) -> None:
        self.readings, self.norm, self.units = readings, norm, units
        self.clean = tokens.detach().reshape(-1, tokens.shape[-1])
        self.budgets, self.real = budgets.flatten(), real.flatten()
        self.radius = self.budgets
        self.smallest = torch.full_like(self.budgets, torch.inf)
        self.known = torch.full_like(self.budgets, torch.inf)  # the smallest distances when the search was last narrowed
        self.share = torch.full_like(self.budgets, SHORTER)
        self.strongest = self.clean
        self.strength = torch.full((units or self.budgets.numel(),), -torch.inf, device=tokens.device, dtype=torch.float64)

    @property
    def found(self) -> Tensor:
        return self.smallest.isfinite()

    def project(self, rows: Tensor) -> Tensor:
        return project(rows, self.clean, self.radius, self.norm)

    def run(self, plans: list[Plan], steps: int, restarts: int, bisections: int, seed: int) -> None:
        """Climb along each plan from the clean tokens, then from random starts, and shorten what each climb finds."""
        for plan in plans:
            self._shorten(self._climb(plan, self.clean, steps), bisections)
        for restart in range(restarts):
            noise = self._noise(mixed(seed, "routes", restart))
            self._shorten(self._climb(Plan(), self.project(self.clean + noise * HALF), steps), bisections)

    def _climb(self, plan: Plan, rows: Tensor, steps: int) -> Tensor:
        """The rows where each token flipped first, its last ones where it did not."""
        radius = self.radius.to(rows.dtype).unsqueeze(-1)
        first, flipped = rows, torch.zeros_like(self.real)
        for _ in range(steps):
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                layers = self.readings(rows)
                value = plan.value(self.readings, layers)
            flips = self.note(rows.detach(), layers)
            first, flipped = rows.detach().where(~flipped.unsqueeze(-1), first), flipped | flips
            # The hinge: where tokens move together, those that have flipped leave the others to be served.
            wanted = self.real if self.units is None else self.real & ~flips
            slope = gradient(value.where(wanted, 0.0).sum(), rows)
            # Steps of the whole radius: the first is exact where keys are linear, and shorter ones found less where not.
            rows = self.project(rows.detach() + radius * direction(slope, self.norm))
        self.look(rows)
        return rows if self.units is not None else rows.where(~flipped.unsqueeze(-1), first)

    def look(self, rows: Tensor) -> Tensor:
        """Try these rows; (T,) which of them flip."""
        with torch.no_grad():
            return self.note(rows, self.readings(rows))

    def note(self, rows: Tensor, layers: list[Layer]) -> Tensor:
        changed = self.readings.changed(layers) & self.real
        flips, far = changed.any(0), distances(rows, self.clean, self.norm)
        # Strong is what flips many layers and tokens, and of these what is far beyond the switching plane.
        margin = torch.tanh(self.readings.margins(layers).detach().double().mean(0)).nan_to_num(0.0)
        strength = changed.sum(0) + margin.where(self.real, 0.0) / (4 * self.real.numel())
        if self.units is not None:
            far = self._spread(far.view(self.units, -1).amax(1))
            strength = strength.view(self.units, -1).sum(1)
        stronger = (strength > self.strength) & (strength > HALF)
        self.strength = strength.where(stronger, self.strength)
        self.strongest = rows.where(self._spread(stronger).unsqueeze(-1), self.strongest)
        nearer = flips & (far < self.smallest)
        self.smallest = far.where(nearer, self.smallest)
        return flips

    def _shorten(self, rows: Tensor, bisections: int) -> None:
        """Walk back towards the clean tokens: by bisection, or where tokens move together, all by the same shares."""
        low, high = torch.zeros_like(self.smallest), torch.ones_like(self.smallest)
        for number in range(bisections if self.found.any() else 0):
            share = (low + high) / 2 if self.units is None else high * (number + 1) / (bisections + 1)
            flips = self.look(self._between(rows, share))
            if self.units is None:
                low, high = share.where(~flips, low), share.where(flips, high)

    def scatter(self, tries: int, seed: int) -> None:
        """Random perturbations of the whole budget."""
        for number in range(tries):
            self.look(self.project(self.clean + self._noise(mixed(seed, "tries", number))))

    def narrow(self) -> None:
        """Search for what is shorter than the smallest so far; where the last search failed at that, not so much shorter."""
        if self.units is not None:
            self.radius = self.radius * HALF
            return
        self.share = torch.where(self.smallest < self.known, SHORTER, (1 + self.share) / 2)
        self.known = self.smallest
        self.radius = self.budgets.minimum(self.share * self.smallest)

    def _noise(self, seed: int) -> Tensor:
        """Of the whole radius, in all directions."""
        noise = torch.randn(self.clean.shape, generator=torch.Generator().manual_seed(seed)).to(self.clean)
        return direction(noise, self.norm) * self.radius.to(noise.dtype).unsqueeze(-1)

    def _between(self, rows: Tensor, share: Tensor) -> Tensor:
        clean = self.clean.double()
        between = (clean + share.unsqueeze(-1) * (rows.double() - clean)).to(rows.dtype)
        return project(between, self.clean, self.budgets, self.norm)  # rounding may have left the ball

    def _spread(self, units: Tensor) -> Tensor:
        """What holds for a unit, for each of its tokens."""
        return units if self.units is None else units.repeat_interleave(self.real.numel() // self.units)


def nearest_plans(search: Search, pairs: int, candidates: int) -> list[Plan]:
    """The nearest planes when keys are linearised at the clean tokens; for several layers, the best pair of each step."""
    readings = search.readings
    if len(readings.clean) > 1:
        return [Plan()]
    rows = search.clean.detach().requires_grad_()
    with torch.enable_grad():
        keys = readings(rows)[0].keys
    chosen = readings.clean[0].chosen
    inside = _ranked(-keys.detach(), chosen, candidates)
    outside = _ranked(keys.detach(), ~chosen, candidates)
    if inside.shape[1] == 0 or outside.shape[1] == 0:
        return [Plan()]
    slopes = [[gradient(_key(keys, column).sum(), rows) for column in side.unbind(1)] for side in (inside, outside)]
    planes = []
    for a, i in enumerate(inside.unbind(1)):
        for b, j in enumerate(outside.unbind(1)):
            gap = (_key(keys, i) - _key(keys, j)).detach().clamp_min(0).double()
            slope = _dual_norms(slopes[0][a] - slopes[1][b], search.norm)
            known = (i < keys.shape[-1]) & (j < keys.shape[-1]) & (slope > 0) & gap.isfinite()
            planes.append((gap / slope).where(known, torch.inf))
    order = torch.stack(planes, 1).argsort(dim=1, stable=True)[:, :pairs]
    plans = [
        Plan(inside.gather(1, plane // outside.shape[1]).squeeze(1), outside.gather(1, plane % outside.shape[1]).squeeze(1))
        for plane in order.split(1, dim=1)
    ]
    if readings.ragged[0]:  # a set may also lose an expert or gain one
        nobody = torch.full_like(inside[:, 0], keys.shape[-1])
        plans += [Plan(inside[:, 0], nobody), Plan(nobody, outside[:, 0])]
    return [*plans, Plan()]


def _ranked(keys: Tensor, member: Tensor, count: int) -> Tensor:
    """(T,n): the n <= count members with the highest keys, the index E where a token has fewer."""
    count = min(count, int(member.sum(1).max())) if member.numel() else 0
    best = keys.masked_fill(~member, -torch.inf).topk(count, dim=1).indices
    return best.where(member.gather(1, best), keys.shape[1])


def _key(keys: Tensor, index: Tensor) -> Tensor:
    padded = torch.cat([keys, keys.new_zeros(keys.shape[0], 1)], dim=1)
    return padded.gather(1, index.unsqueeze(1)).squeeze(1)


def _dual_norms(slopes: Tensor, norm: Norm) -> Tensor:
    """(T,) float64: the steepest descent that a step of length 1 can make; of l_inf steps that is the sum."""
    return row_norms(slopes, "l2") if norm == "l2" else slopes.double().abs().sum(1)


def gradient(value: Tensor, rows: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(rows)
    (slope,) = torch.autograd.grad(value, rows, retain_graph=True, allow_unused=True)
    return torch.zeros_like(rows) if slope is None else slope
