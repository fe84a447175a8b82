"""The search of the routing attack: PGD towards other experts; the perturbations that flip are shortened by bisection.

`RouteProbe` runs the attacked router or model and returns for each layer the selected sets and the keys that experts were
ranked by. `Target` says which difference of keys to raise. `RouteSearch` raises it by gradient steps, and keeps the smallest
perturbation that flips each token.

T tokens as rows (T,d), E experts, L layers
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.attacks.threat import derived_seed, direction, distances, gradient, project, row_norms
from holdfast.kernels.select import top
from holdfast.routing import Routing
from holdfast.routing.bounds import Norm

Route = Callable[[Tensor], Routing | Sequence[Routing] | Tensor]  # tokens (..., d) to routings, or to scores (..., E)
TINY = torch.finfo(torch.float32).tiny


class Layer(NamedTuple):
    keys: Tensor  # (T,E), differentiable: an expert with a higher key is more likely to be selected
    chosen: Tensor  # (T,E) bool


class RouteProbe:
    """Call `route` at tokens given as rows (T,d), and return keys and selected sets of each layer.

    A selected set has the experts of all slots of a token, or with `k` those of its first k slots. Keys are the logits if
    the gates have the same order, and otherwise the logarithms of the gates (an informer or a rule changed the order). They
    are also the logarithms if the number of experts varies and gates sum to 1, because selection then compares gates with a
    threshold. Which of the two is decided once, at the clean tokens.
    """

    def __init__(self, route: Route, tokens: Tensor, k: int | None) -> None:
        self.route, self.shape, self.k = route, tokens.shape, k
        rows = tokens.detach().reshape(-1, tokens.shape[-1])
        with torch.no_grad():
            routings = self._routings(rows)
        # The number of experts per token may vary if a slot is unused, or if there is a slot for every expert.
        self.ragged = [
            k is None and (bool((~routing.used).any()) or routing.experts.shape[-1] == routing.gates.shape[-1])
            for routing in routings
        ]
        self.by_logits = [_by_logits(routing, ragged) for routing, ragged in zip(routings, self.ragged, strict=True)]
        self.clean = [self._layer(index, routing) for index, routing in enumerate(routings)]

    def __call__(self, rows: Tensor) -> list[Layer]:
        routings = self._routings(rows)
        if len(routings) != len(self.clean):
            raise ValueError(
                f"the route returned {len(routings)} layers; for the clean tokens it returned {len(self.clean)}."
            )
        return [self._layer(index, routing) for index, routing in enumerate(routings)]

    def changed(self, layers: list[Layer]) -> Tensor:
        """Return (L,T) bool: whether the selected set differs from that of the clean token."""
        return torch.stack([(now.chosen != was.chosen).any(-1) for now, was in zip(layers, self.clean, strict=True)])

    def margins(self, layers: list[Layer]) -> Tensor:
        """Return (L,T): highest key outside the clean set minus lowest key inside it; negative while the set is the same."""
        margins = []
        for now, was in zip(layers, self.clean, strict=True):
            outside = now.keys.masked_fill(was.chosen, -torch.inf).amax(-1)
            inside = now.keys.masked_fill(~was.chosen, torch.inf).amin(-1)
            # 0 for an empty side, so that the other still counts.
            margins.append(outside.where(~was.chosen.all(-1), 0.0) - inside.where(was.chosen.any(-1), 0.0))
        return torch.stack(margins)

    def _routings(self, rows: Tensor) -> list[Routing]:
        returned = self.route(rows.view(self.shape))
        if isinstance(returned, Tensor):
            if self.k is None:
                raise ValueError("the route returns scores; pass k, the number of experts per token.")
            scores = returned.flatten(0, -2).float()
            experts, gates = top(scores, self.k), scores.softmax(-1)
            returned = Routing(scores, gates, experts, gates.gather(-1, experts))
        routings = [returned] if isinstance(returned, Routing) else list(returned)
        for routing in routings:
            if routing.gates.shape[0] != rows.shape[0]:
                got, expected = routing.gates.shape[0], rows.shape[0]
                raise ValueError(f"the route returned a routing for {got} tokens; expected {expected}.")
        if not routings:
            raise ValueError("the route returned no routing: the model has no MoE layer, or none was recorded.")
        return routings

    def _layer(self, index: int, routing: Routing) -> Layer:
        keys = routing.logits if self.by_logits[index] else routing.gates.clamp_min(TINY).log()
        if self.k is not None and self.k > routing.experts.shape[-1]:
            raise ValueError(f"k is {self.k}, but tokens have at most {routing.experts.shape[-1]} experts.")
        return Layer(keys, routing.sets_of_slots(self.k))


def _by_logits(routing: Routing, ragged: bool) -> bool:
    """Return whether keys are logits rather than log gates."""
    order = routing.logits.argsort(dim=-1, descending=True)
    same_order = bool((routing.gates.gather(-1, order).diff(dim=-1) <= 0).all())
    sums_to_one = bool(((routing.gates.sum(-1) - 1).abs() < 1e-3).all())
    return same_order and not (ragged and sums_to_one)


SHORTER = 0.9  # a later round searches for perturbations of at most this share of the smallest one so far
HALF = 0.5  # the same share if tokens are perturbed together


class Target(NamedTuple):
    """A pair of experts for each token, whose order the attack tries to swap. Index E is the threshold, a key of 0.

    Without a pair, the target of each step is the pair with the smallest difference of keys.
    """

    inside: Tensor | None = None  # (T,)
    outside: Tensor | None = None  # (T,)

    def value(self, probe: RouteProbe, layers: list[Layer]) -> Tensor:
        """Return (T,): the value to raise. Layers that have flipped are skipped, so that the others get the budget."""
        if self.inside is None or self.outside is None:
            return probe.margins(layers).where(~probe.changed(layers), 0.0).sum(0)
        return _key(layers[0].keys, self.outside) - _key(layers[0].keys, self.inside)


class RouteSearch:
    """Search for flips at rows (T,d); keep the strongest input within the budget and the smallest flipping distance.

    units   number of groups of tokens that are perturbed together (sequences, or the whole batch); None: each token alone
    """

    def __init__(
        self, probe: RouteProbe, tokens: Tensor, budgets: Tensor, real: Tensor, norm: Norm, units: int | None
    ) -> None:
        self.probe, self.norm, self.units = probe, norm, units
        self.clean = tokens.detach().reshape(-1, tokens.shape[-1])
        self.budgets, self.real = budgets.flatten(), real.flatten()
        self.radius = self.budgets
        self.smallest = torch.full_like(self.budgets, torch.inf)
        self.known = torch.full_like(self.budgets, torch.inf)  # `smallest` at the last call of `search_closer`
        self.share = torch.full_like(self.budgets, SHORTER)
        self.strongest = self.clean
        self.strength = torch.full((units or self.budgets.numel(),), -torch.inf, device=tokens.device, dtype=torch.float64)

    @property
    def found(self) -> Tensor:
        return self.smallest.isfinite()

    def project(self, rows: Tensor) -> Tensor:
        return project(rows, self.clean, self.radius, self.norm)

    def run(self, targets: list[Target], steps: int, restarts: int, bisections: int, seed: int) -> None:
        """Run gradient steps for each target from the clean tokens, then from random starts; shorten what they find."""
        for target in targets:
            self._bisect(self._climb(target, self.clean, steps), bisections)
        for restart in range(restarts):
            noise = self._noise(derived_seed(seed, "routes", restart))
            self._bisect(self._climb(Target(), self.project(self.clean + noise * 0.5), steps), bisections)

    def _climb(self, target: Target, rows: Tensor, steps: int) -> Tensor:
        """Run gradient steps. Return each token at its first flip, or after the last step if it did not flip.

        Tokens that are perturbed together are all returned as after the last step.
        """
        radius = self.radius.to(rows.dtype).unsqueeze(-1)
        first, flipped = rows, torch.zeros_like(self.real)
        for _ in range(steps):
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                layers = self.probe(rows)
                value = target.value(self.probe, layers)
            flips = self.keep_worst(rows.detach(), layers)
            first, flipped = rows.detach().where(~flipped.unsqueeze(-1), first), flipped | flips
            # If tokens are perturbed together, those that have flipped no longer count, as in a hinge loss.
            wanted = self.real if self.units is None else self.real & ~flips
            slope = gradient(value.where(wanted, 0.0).sum(), rows)
            # Steps of the whole radius: the first is exact for linear keys, and shorter steps found fewer flips for others.
            rows = self.project(rows.detach() + radius * direction(slope, self.norm))
        self.try_inputs(rows)
        return rows if self.units is not None else rows.where(~flipped.unsqueeze(-1), first)

    def try_inputs(self, rows: Tensor) -> Tensor:
        """Route these rows, call `keep_worst`, and return (T,) which of them flip."""
        with torch.no_grad():
            return self.keep_worst(rows, self.probe(rows))

    def keep_worst(self, rows: Tensor, layers: list[Layer]) -> Tensor:
        """Keep the rows that are stronger than before and the smallest distances of flips; return (T,) which rows flip."""
        changed = self.probe.changed(layers) & self.real
        flips, distance = changed.any(0), distances(rows, self.clean, self.norm)
        # Stronger rows flip more layers and tokens. Of equal ones, the larger margin decides, which adds at most 1/4.
        margin = torch.tanh(self.probe.margins(layers).detach().double().mean(0)).nan_to_num(0.0)
        strength = changed.sum(0) + margin.where(self.real, 0.0) / (4 * self.real.numel())
        if self.units is not None:
            distance = self._per_token(distance.view(self.units, -1).amax(1))
            strength = strength.view(self.units, -1).sum(1)
        stronger = (strength > self.strength) & (strength > 0.5)  # above 0.5: a token has flipped
        self.strength = strength.where(stronger, self.strength)
        self.strongest = rows.where(self._per_token(stronger).unsqueeze(-1), self.strongest)
        nearer = flips & (distance < self.smallest)
        self.smallest = distance.where(nearer, self.smallest)
        return flips

    def _bisect(self, rows: Tensor, bisections: int) -> None:
        """Try shorter perturbations: by bisection, or with evenly spaced lengths if tokens are perturbed together."""
        low, high, clean = torch.zeros_like(self.smallest), torch.ones_like(self.smallest), self.clean.double()
        for number in range(bisections if self.found.any() else 0):
            share = (low + high) / 2 if self.units is None else high * (number + 1) / (bisections + 1)
            between = (clean + share.unsqueeze(-1) * (rows.double() - clean)).to(rows.dtype)
            # Rounding may exceed the budget.
            flips = self.try_inputs(project(between, self.clean, self.budgets, self.norm))
            if self.units is None:
                low, high = share.where(~flips, low), share.where(flips, high)

    def try_random(self, tries: int, seed: int) -> None:
        """Try random perturbations that are as large as the radius."""
        for number in range(tries):
            self.try_inputs(self.project(self.clean + self._noise(derived_seed(seed, "tries", number))))

    def search_closer(self) -> None:
        """Reduce the radius below the smallest flip so far; by less for tokens that did not flip in the last radius."""
        if self.units is not None:
            self.radius = self.radius * HALF
            return
        self.share = torch.where(self.smallest < self.known, SHORTER, (1 + self.share) / 2)
        self.known = self.smallest
        self.radius = self.budgets.minimum(self.share * self.smallest)

    def _noise(self, seed: int) -> Tensor:
        """Return random perturbations that are as large as the radius."""
        noise = torch.randn(self.clean.shape, generator=torch.Generator().manual_seed(seed)).to(self.clean)
        return direction(noise, self.norm) * self.radius.to(noise.dtype).unsqueeze(-1)

    def _per_token(self, units: Tensor) -> Tensor:
        """Repeat the value of each unit for each of its tokens."""
        return units if self.units is None else units.repeat_interleave(self.real.numel() // self.units)


def nearest_targets(search: RouteSearch, pairs: int, candidates: int) -> list[Target]:
    """Return the pairs with the nearest decision boundaries of the linearised keys, and the default target.

    For several layers, return only the default target.
    """
    probe = search.probe
    if len(probe.clean) > 1:
        return [Target()]
    rows = search.clean.detach().requires_grad_()
    with torch.enable_grad():
        keys = probe(rows)[0].keys
    chosen = probe.clean[0].chosen
    inside = _ranked(-keys.detach(), chosen, candidates)
    outside = _ranked(keys.detach(), ~chosen, candidates)
    if inside.shape[1] == 0 or outside.shape[1] == 0:
        return [Target()]
    slopes = [[gradient(_key(keys, column).sum(), rows) for column in side.unbind(1)] for side in (inside, outside)]
    distances_to_boundary = []
    for a, i in enumerate(inside.unbind(1)):
        for b, j in enumerate(outside.unbind(1)):
            gap = (_key(keys, i) - _key(keys, j)).detach().clamp_min(0).double()
            steepest = slopes[0][a] - slopes[1][b]
            # The dual norm: the largest change of the difference of keys by a step of norm 1.
            slope = row_norms(steepest, "l2") if search.norm == "l2" else steepest.double().abs().sum(1)
            valid = (i < keys.shape[-1]) & (j < keys.shape[-1]) & (slope > 0) & gap.isfinite()
            distances_to_boundary.append((gap / slope).where(valid, torch.inf))
    order = torch.stack(distances_to_boundary, 1).argsort(dim=1, stable=True)[:, :pairs]
    targets = [
        Target(inside.gather(1, pair // outside.shape[1]).squeeze(1), outside.gather(1, pair % outside.shape[1]).squeeze(1))
        for pair in order.split(1, dim=1)
    ]
    if probe.ragged[0]:  # a set may also lose or gain an expert
        threshold = torch.full_like(inside[:, 0], keys.shape[-1])
        targets += [Target(inside[:, 0], threshold), Target(threshold, outside[:, 0])]
    return [*targets, Target()]


def _ranked(keys: Tensor, member: Tensor, count: int) -> Tensor:
    """Return (T,n): the n <= count members with the highest keys; index E in the remaining places of rows with fewer."""
    count = min(count, int(member.sum(1).max())) if member.numel() else 0
    best = keys.masked_fill(~member, -torch.inf).topk(count, dim=1).indices
    return best.where(member.gather(1, best), keys.shape[1])


def _key(keys: Tensor, index: Tensor) -> Tensor:
    """Return (T,): the key of one expert per token; index E is the threshold 0."""
    padded = torch.cat([keys, keys.new_zeros(keys.shape[0], 1)], dim=1)
    return padded.gather(1, index.unsqueeze(1)).squeeze(1)
