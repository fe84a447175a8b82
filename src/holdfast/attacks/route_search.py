"""The search of the routing attacks: PGD towards a goal; the perturbations that reach it are shortened by bisection.

`RouteProbe` runs the attacked router or model and returns for each layer the selected sets and the keys that experts were
ranked by. `Target` says which difference of keys to raise. `RouteSearch` raises it by gradient steps, and keeps the smallest
perturbation with which each token reaches the goal.

A goal says which tokens have reached it: they have lost their selected set (`LeaveSet`), or got certain experts
(`JoinExperts`). It gives each token a margin that is below 0 until then and that gradient steps raise. With S the set of the
clean token, S' that of the perturbed one x', and key_e what expert e is ranked by:

    LeaveSet         max_{j not in S} key_j(x') - min_{i in S} key_i(x')
    JoinExperts(W)   min_{w in W - S'} key_w(x') - min_{i in S' - W} key_i(x')    while W is not in S'
                     min_{w in W} key_w(x') - max_{j not in S'} key_j(x')         then

T tokens as rows (T,d), E experts, L layers
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from holdfast.attacks.threat import derived_seed, direction, distances, gradient, project, row_norms
from holdfast.kernels.select import top
from holdfast.routing import Routing
from holdfast.routing.bounds import Norm


class Layer(NamedTuple):
    keys: Tensor  # (T,E), differentiable: an expert with a higher key is more likely to be selected
    chosen: Tensor  # (T,E) bool


class Goal(ABC):
    """What the search wants of each token in a layer (abstract)."""

    @abstractmethod
    def sets(self, routing: Routing, k: int | None) -> Tensor:
        """Return (T,E) bool: the sets that the goal reads; with `k`, those of the first k slots."""

    @abstractmethod
    def reached(self, now: Layer, clean: Layer) -> Tensor:
        """Return (T,) bool: which tokens have reached the goal."""

    @abstractmethod
    def margin(self, now: Layer, clean: Layer) -> Tensor:
        """Return (T,): what to raise; negative until the goal is reached. An empty side counts as a key of 0."""

    @abstractmethod
    def swaps(self, clean: Layer) -> tuple[Tensor, Tensor]:
        """Return (T,E) bool twice: the experts that may leave, and those that may come in, on the way to the goal."""

    @abstractmethod
    def pace(self, number: int) -> float:
        """Return the length of a gradient step, as a share of the radius; the first step has number 0."""


@final
class LeaveSet(Goal):
    """The selected set changes."""

    def sets(self, routing: Routing, k: int | None) -> Tensor:
        return routing.sets_of_slots(k)

    def reached(self, now: Layer, clean: Layer) -> Tensor:
        return (now.chosen != clean.chosen).any(-1)

    def margin(self, now: Layer, clean: Layer) -> Tensor:
        return _highest(now.keys, ~clean.chosen) - _lowest(now.keys, clean.chosen)

    def swaps(self, clean: Layer) -> tuple[Tensor, Tensor]:
        return clean.chosen, ~clean.chosen

    def pace(self, number: int) -> float:
        return 1.0  # the first step is exact for linear keys, and shorter steps found fewer flips for others


@final
class JoinExperts(Goal):
    """The token asks for all of these experts. A limit of capacity may then drop it, which does not count here."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.experts = list(experts)

    def sets(self, routing: Routing, k: int | None) -> Tensor:
        return routing.requested_sets if k is None else routing.sets_of_slots(k)

    def reached(self, now: Layer, clean: Layer) -> Tensor:
        return now.chosen[:, self.experts].all(-1)

    def margin(self, now: Layer, clean: Layer) -> Tensor:
        wanted = self._wanted(now)
        far = _lowest(now.keys, wanted & ~now.chosen) - _lowest(now.keys, now.chosen & ~wanted)
        return torch.where(self.reached(now, clean), _lowest(now.keys, wanted) - _highest(now.keys, ~now.chosen), far)

    def swaps(self, clean: Layer) -> tuple[Tensor, Tensor]:
        wanted = self._wanted(clean)
        return clean.chosen & ~wanted, wanted & ~clean.chosen

    def pace(self, number: int) -> float:
        # An expert comes in if it beats the weakest of the set, whichever that is: with equal steps, two experts that take
        # turns as the weakest are each beaten at the cost of the other.
        return float((1 + number) ** -0.5)

    def _wanted(self, layer: Layer) -> Tensor:
        wanted = torch.zeros_like(layer.chosen)
        wanted[:, self.experts] = True
        return wanted


def _highest(keys: Tensor, member: Tensor) -> Tensor:
    """Return (T,): the highest key of the members; 0 if there are none."""
    return keys.masked_fill(~member, -torch.inf).amax(-1).where(member.any(-1), 0.0)


def _lowest(keys: Tensor, member: Tensor) -> Tensor:
    """Return (T,): the lowest key of the members; 0 if there are none."""
    return keys.masked_fill(~member, torch.inf).amin(-1).where(member.any(-1), 0.0)


Route = Callable[[Tensor], Routing | Sequence[Routing] | Tensor]  # tokens (..., d) to routings, or to scores (..., E)
TINY = torch.finfo(torch.float32).tiny


class RouteProbe:
    """Call `route` at tokens given as rows (T,d), and return keys and selected sets of each layer.

    A selected set has the experts of all slots of a token, or with `k` those of its first k slots. Keys are the logits if
    the gates have the same order, and otherwise the logarithms of the gates (an informer or a rule changed the order). They
    are also the logarithms if the number of experts varies and gates sum to 1, because selection then compares gates with a
    threshold. Which of the two is decided once, at the clean tokens.
    """

    def __init__(self, route: Route, tokens: Tensor, k: int | None, goal: Goal | None = None) -> None:
        self.route, self.shape, self.k, self.goal = route, tokens.shape, k, goal or LeaveSet()
        rows = tokens.detach().reshape(-1, tokens.shape[-1])
        with torch.no_grad():
            routings = self.routings(rows)
        self.ragged, self.by_logits = list[bool](), list[bool]()
        for routing in routings:
            # The number of experts per token may vary if a slot is unused, or if there is a slot for every expert.
            may_vary = bool((~routing.used).any()) or routing.experts.shape[-1] == routing.gates.shape[-1]
            self.ragged.append(k is None and may_vary)
            order = routing.logits.argsort(dim=-1, descending=True)
            same_order = bool((routing.gates.gather(-1, order).diff(dim=-1) <= 0).all())
            sums_to_one = bool(((routing.gates.sum(-1) - 1).abs() < 1e-3).all())
            self.by_logits.append(same_order and not (self.ragged[-1] and sums_to_one))
        self.clean = [self._layer(index, routing) for index, routing in enumerate(routings)]

    def __call__(self, rows: Tensor) -> list[Layer]:
        routings = self.routings(rows)
        if len(routings) != len(self.clean):
            raise ValueError(f"the route returned {len(routings)} layers; for clean tokens it returned {len(self.clean)}.")
        return [self._layer(index, routing) for index, routing in enumerate(routings)]

    def reached(self, layers: list[Layer]) -> Tensor:
        """Return (L,T) bool: whether a token has reached the goal; by default, whether its selected set has changed."""
        return torch.stack([self.goal.reached(now, clean) for now, clean in zip(layers, self.clean, strict=True)])

    def margins(self, layers: list[Layer]) -> Tensor:
        """Return (L,T): what to raise to reach the goal; negative before."""
        return torch.stack([self.goal.margin(now, clean) for now, clean in zip(layers, self.clean, strict=True)])

    def routings(self, rows: Tensor) -> list[Routing]:
        """Return the routing of each layer."""
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
                raise ValueError(f"the route returned a routing for {len(routing.gates)} tokens; expected {len(rows)}.")
        if not routings:
            raise ValueError("the route returned no routing: the model has no MoE layer, or none was recorded.")
        return routings

    def _layer(self, index: int, routing: Routing) -> Layer:
        keys = routing.logits if self.by_logits[index] else routing.gates.clamp_min(TINY).log()
        if self.k is not None and self.k > routing.experts.shape[-1]:
            raise ValueError(f"k is {self.k}, but tokens have at most {routing.experts.shape[-1]} experts.")
        return Layer(keys, self.goal.sets(routing, self.k))


SHORTER = 0.9  # a later round searches for perturbations of at most this share of the smallest one so far
HALF = 0.5  # the same share if tokens are perturbed together
SOFTNESS = 0.3  # of the count of flips by one perturbation, as a share of the median distance between keys
LATE = 0.75  # flips that are found after this share of a run's steps are late


class Target(NamedTuple):
    """A pair of experts for each token, whose order the attack tries to swap. Index E is the threshold, a key of 0.

    Without a pair, the target of each step is the pair with the smallest difference of keys.
    """

    inside: Tensor | None = None  # (T,)
    outside: Tensor | None = None  # (T,)

    def value(self, probe: RouteProbe, layers: list[Layer]) -> Tensor:
        """Return (T,): the value to raise. Layers that reached the goal are skipped, so that the others get the budget."""
        if self.inside is None or self.outside is None:
            return probe.margins(layers).where(~probe.reached(layers), 0.0).sum(0)
        return _key(layers[0].keys, self.outside) - _key(layers[0].keys, self.inside)


class RouteSearch:
    """Search for flips at rows (T,d); keep the strongest input within the budget and the smallest flipping distance.

    A flip is a token that reaches the goal of `probe`.

    units       number of groups of tokens that are perturbed together (sequences, or the whole batch); None: each token
                alone
    universal   all tokens get the same perturbation, so `units` is 1 and all real tokens have the same budget
    """

    def __init__(
        self,
        probe: RouteProbe,
        tokens: Tensor,
        budgets: Tensor,
        real: Tensor,
        norm: Norm,
        units: int | None,
        universal: bool = False,
    ) -> None:
        self.probe, self.norm, self.units, self.universal = probe, norm, units, universal
        self.clean = tokens.detach().reshape(-1, tokens.shape[-1])
        self.budgets, self.real = budgets.flatten(), real.flatten()
        self.radius = self.budgets
        self.smallest = torch.full_like(self.budgets, torch.inf)
        self.known = torch.full_like(self.budgets, torch.inf)  # `smallest` at the last call of `search_closer`
        self.share = torch.full_like(self.budgets, SHORTER)
        self.late = torch.zeros_like(self.real)  # (T,) bool: every flip found so far was found in the last steps of a run
        self.strongest = self.clean
        self.strength = torch.full((units or self.budgets.numel(),), -torch.inf, device=tokens.device, dtype=torch.float64)

    @property
    def found(self) -> Tensor:
        return self.smallest.isfinite()

    def project(self, rows: Tensor) -> Tensor:
        if self.universal:  # the perturbations differ by rounding, which would add up over the steps
            mean = (rows.double() - self.clean.double())[self.real].mean(0)
            rows = (self.clean.double() + mean).to(rows.dtype)
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
        for number in range(steps):
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                layers = self.probe(rows)
                value = self._smooth_count(layers) if self.universal else target.value(self.probe, layers)
            found = self.found
            flips = self.keep_worst(rows.detach(), layers)
            self.late = self.late | flips & ~found if number >= LATE * steps else self.late & ~flips
            first, flipped = rows.detach().where(~flipped.unsqueeze(-1), first), flipped | flips
            # If tokens are perturbed together, those that have flipped no longer count, as in a hinge loss.
            wanted = self.real if self.units is None or self.universal else self.real & ~flips
            slope = gradient(value.where(wanted, 0.0).sum(), rows)
            slope = slope.sum(0, keepdim=True).expand_as(slope) if self.universal else slope
            step = self.probe.goal.pace(number) * radius
            rows = self.project(rows.detach() + step * direction(slope, self.norm))
        found = self.found
        self.late = self.late | self.try_inputs(rows) & ~found
        return rows if self.units is not None else rows.where(~flipped.unsqueeze(-1), first)

    def _smooth_count(self, layers: list[Layer]) -> Tensor:
        """Return (T,): sums of sigmoids of the margins, whose sum over tokens is about the number of flips.

        One perturbation cannot flip all tokens: those near their boundaries count most, on both sides. The number of flips
        alone has no gradient, and a hinge loss gives the tokens that are out of reach the same weight as the others.
        """
        margins = self.probe.margins(layers)
        typical = margins.detach()[:, self.real].abs().median(dim=1, keepdim=True).values
        return torch.sigmoid(margins / (SOFTNESS * typical).clamp_min(TINY)).sum(0)

    def try_inputs(self, rows: Tensor) -> Tensor:
        """Route these rows, call `keep_worst`, and return (T,) which of them flip."""
        with torch.no_grad():
            return self.keep_worst(rows, self.probe(rows))

    def keep_worst(self, rows: Tensor, layers: list[Layer]) -> Tensor:
        """Keep the rows that are stronger than before and the smallest distances of flips; return (T,) which rows flip."""
        reached = self.probe.reached(layers) & self.real
        flips, distance = reached.any(0), distances(rows, self.clean, self.norm)
        # Stronger rows flip more layers and tokens. Of equal ones, the larger margin decides, which adds at most 1/4.
        margin = torch.tanh(self.probe.margins(layers).detach().double().mean(0)).nan_to_num(0.0)
        strength = reached.sum(0) + margin.where(self.real, 0.0) / (4 * self.real.numel())
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
        shape = (1, *self.clean.shape[1:]) if self.universal else self.clean.shape
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.clean).expand_as(self.clean)
        return direction(noise, self.norm) * self.radius.to(noise.dtype).unsqueeze(-1)

    def _per_token(self, units: Tensor) -> Tensor:
        """Repeat the value of each unit for each of its tokens."""
        return units if self.units is None else units.repeat_interleave(self.real.numel() // self.units)


def nearest_targets(search: RouteSearch, pairs: int, candidates: int) -> list[Target]:
    """Return the pairs with the nearest decision boundaries of the linearised keys, and the default target.

    For several layers or a universal perturbation, return only the default target.
    """
    probe = search.probe
    if len(probe.clean) > 1 or search.universal:
        return [Target()]
    rows = search.clean.detach().requires_grad_()
    with torch.enable_grad():
        keys = probe(rows)[0].keys
    leaving, coming = probe.goal.swaps(probe.clean[0])
    inside = _ranked(-keys.detach(), leaving, candidates)
    outside = _ranked(keys.detach(), coming, candidates)
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
    nearest = inside.gather(1, order // outside.shape[1]), outside.gather(1, order % outside.shape[1])
    targets = [Target(*pair) for pair in zip(*(side.unbind(1) for side in nearest), strict=True)]
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
