"""Routing metrics of one layer: which experts are selected, how often, together with which others, and with what weight.

Of one run:

CoSelection         which experts are selected together, and how well that connects them
GateEntropy         how undecided a router is
LayerInstability    whether tokens that share an expert in one layer still share one in the next
ExpertLoad          how evenly tokens are distributed over experts
ExpertsPerToken     how many experts a token uses
WeightSums          what the gate weights of a token sum to
DroppedExperts      how many experts tokens lose to a limit
NearTies            how many tokens have a k-th and a (k+1)-th expert that differ by less than a width, so that a small
                    change flips them (appendix C.4 of "Geometric and Stochastic Analysis of Discontinuities in Sparse
                    Mixture-of-Experts")
gradient_interference   whether experts learn the same, or against each other (survey, section 3.3)

Of two runs over the same tokens, two checkpoints, or clean and perturbed inputs:

RoutingChanges      how many tokens change their selected set or their first expert, and how much weights change
PredictionStability how many predictions stay the same

Of one run over images and texts:

ModalityUse         how both share the experts of a layer

`RoutingReport` has those of one run for all layers in one pass over the data, as values that JSON can store:

```python
report = RoutingReport()
with holdfast.trace(model, each=report.each):
    for batch in batches:
        model(**batch)
report.result()
```

`ModalityUse`: c_me is how often tokens of modality m (image or text) select expert e, and p_me = c_me / sum_e c_me. Then

    overlap         sum_e min(p_image,e, p_text,e), from 0 (no expert in common) to 1 (both use experts alike)
    one modality    the share of experts with c_me > 0 for one modality only, among those that any token selected

The survey of robust MoE asks for consistent routing across modalities (5.5) and shared experts (3.5), and gives no formula.
The overlap of both loads is a reading of it that needs no pairs of an image token and a text token. What the survey calls
routing consistency in 5.2, the share of tokens that keep their experts under a perturbation, is in `RoutingChanges`.

An expert that one token of the other modality selects counts as serving both. So the share of one modality falls with the
number of tokens, and is comparable between routers on the same tokens only.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial, reduce
from typing import Any, Self

import torch
from torch import Tensor

from holdfast.kernels.select import top
from holdfast.metrics.accumulator import Accumulator, only_real, real_rows
from holdfast.routing import Router, Routing, Scores
from holdfast.routing.parts import TINY, normalise
from holdfast.routing.rules import Rule
from holdfast.stored import without_nan

WIDTHS = (0.001, 0.01, 0.1)
GATES: tuple[Callable[[Tensor], Tensor], ...] = (partial(torch.softmax, dim=-1), torch.sigmoid, torch.relu)


@dataclass(frozen=True)
class CoSelectionGraph:
    counts: list[list[int]]  # E x E: tokens that selected both; on the diagonal, tokens that selected the expert
    spectral_gap: float  # 0: experts form groups that no token connects; 1: no structure


class CoSelection(Accumulator[CoSelectionGraph]):
    """C = Z^T Z with Z (T,E) the 0/1 matrix of the selected sets (Symphony, Algorithm 1), and the spectral gap 1 - lambda_2.

    lambda_2 is the second largest eigenvalue of the row-normalised counts D^-1 C, Symphony's graph, over the experts that
    were selected at all. It is similar to D^-1/2 C D^-1/2, so its eigenvalues are real, and lie in [0, 1] because C is a
    product Z^T Z: lambda_2 is the rho of Symphony's Proposition 1. With one expert per token the gap is 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        chosen = only_real(routing, token_mask).chosen.double()
        self._add(counts=chosen.t() @ chosen, tokens=chosen.shape[0])

    def result(self) -> CoSelectionGraph:
        self._per("tokens")
        counts = self._sums["counts"]
        return CoSelectionGraph([[int(count) for count in row] for row in counts.tolist()], spectral_gap(counts))


def spectral_gap(counts: Tensor) -> float:
    """Return 1 - lambda_2 of D^-1 C for symmetric `counts (E,E)`, rows of dead experts 0; 1 if fewer than two are used."""
    used = counts.diagonal() > 0
    counts = counts[used][:, used].double()
    if len(counts) < 2:
        return 1.0
    scale = counts.sum(1).rsqrt()
    second = float(torch.linalg.eigvalsh(scale.unsqueeze(1) * counts * scale)[-2])
    return min(1.0, max(0.0, 1 - second))


def graph_sparsity(graph: Tensor) -> float:
    """Return the share of the pairs of two different experts whose entry in `graph (E,E)` is 0; 0 with one expert."""
    others = graph[~torch.eye(len(graph), dtype=torch.bool, device=graph.device)]
    return float((others == 0).double().mean()) if len(others) else 0.0


class GateEntropy(Accumulator[float]):
    """mean_t -sum_e g_te log g_te in nats, from 0 to log E, g the gates that selection read over their sum.

    High entropy makes routing fluctuate (Mutual-Inform, section 3.3). A token whose gates are all 0 has entropy 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        gates = normalise(only_real(routing, token_mask).gates.double())
        self._add(entropy=torch.special.entr(gates).sum(), tokens=gates.shape[0])

    def result(self) -> float:
        return self._mean("entropy")


class LayerInstability(Accumulator[float]):
    """mean_ij |Same_l[i,j] - Same_(l-1)[i,j]|, Same_l[i,j] = 1 if tokens i, j have the same first expert (ACMoE C.9).

    From the joint counts N_ab of the tokens with first expert a in layer l-1 and b in layer l, never T x T:
    (sum_a N_a.^2 + sum_b N_.b^2 - 2 sum_ab N_ab^2) / T^2. All tokens added form one set of pairs, also across batches.
    Tokens that took no expert are alike: they form a group of their own.
    """

    def update(self, previous: Routing, routing: Routing, token_mask: Tensor | None = None) -> None:
        """Add the routings of the same tokens in layer l-1 and in layer l."""
        both, device = (previous, routing), routing.experts.device
        if len(previous.experts) != len(routing.experts):
            counts = f"{len(previous.experts)} tokens in one layer and {len(routing.experts)} in the next"
            raise ValueError(f"{counts}; instability needs the same tokens in both.")
        before, now = (real_rows(record.experts[:, 0], token_mask).to(device) for record in both)
        groups = [record.gates.shape[-1] + 1 for record in both]  # the last group: tokens without an expert
        joint = torch.bincount(before * groups[1] + now, minlength=groups[0] * groups[1])
        self._add(joint=joint.view(groups), tokens=now.shape[0])

    def result(self) -> float:
        tokens = self._per("tokens")
        joint = self._sums["joint"]
        pairs = joint.sum(1).square().sum() + joint.sum(0).square().sum() - 2 * joint.square().sum()
        return float(pairs) / tokens**2


@dataclass(frozen=True)
class Load:
    percent: list[float]  # of tokens that selected each expert; the sum is 100 times the experts per token
    std: float  # standard deviation of the percentages (ACMoE Table 6), 0 if even
    cv: float  # load unevenness, std / mean (survey 5.2); does not depend on the number of experts per token
    dead: list[int]  # experts that no token selected


class ExpertLoad(Accumulator[Load]):
    """The percentage of tokens that select each expert, its standard deviation, the load unevenness (CV), and dead experts.

    Both use the population's standard deviation, since all experts are counted. If no expert is selected, the CV is 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        chosen = only_real(routing, token_mask).chosen
        self._add(counts=chosen.sum(0), tokens=chosen.shape[0])

    def result(self) -> Load:
        tokens = self._per("tokens")
        percent = 100 * self._sums["counts"] / tokens
        std, mean = float(percent.std(correction=0)), float(percent.mean())
        dead = (percent == 0).nonzero().flatten().tolist()
        return Load(percent.tolist(), std, std / mean if mean > 0 else 0.0, dead)


@dataclass(frozen=True)
class ExpertCount:
    mean: float
    histogram: list[int]  # number of tokens with 0, 1, ..., E experts


class ExpertsPerToken(Accumulator[ExpertCount]):
    """mean_t |S_t|, which decides the cost of a token: k for top-k, more for smooth top-k, any number for top-p and ReLU.

    In SoftMoE and SMEAR layers every token uses every expert, and the mean is that of the rows that experts compute.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        real = only_real(routing, token_mask)
        chosen = real.chosen
        used = chosen.sum(1)
        cost = used if real.rows is None else real.rows.double()
        self._add(tokens=chosen.shape[0], used=cost.sum(), histogram=torch.bincount(used, minlength=chosen.shape[1] + 1))

    def result(self) -> ExpertCount:
        return ExpertCount(self._mean("used"), [int(count) for count in self._sums["histogram"].tolist()])


@dataclass(frozen=True)
class WeightSum:
    mean: float
    std: float


class WeightSums(Accumulator[WeightSum]):
    """Mean and standard deviation over tokens of sum_e w_te: 1 and 0 where weights are renormalised.

    A mean that drifts shows that a router scales its layer's output up or down.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        sums = only_real(routing, token_mask).weights.double().sum(-1)
        # Centred at 1, the usual sum, so that the variance is not a difference of large numbers.
        self._add(tokens=sums.shape[0], excess=(sums - 1).sum(), squares=(sums - 1).square().sum())

    def result(self) -> WeightSum:
        excess = self._mean("excess")
        return WeightSum(1 + excess, max(0.0, self._mean("squares") - excess**2) ** 0.5)


@dataclass(frozen=True)
class Dropped:
    share: float  # of the experts that tokens asked for
    tokens: float  # share of the tokens that are left without any expert


class DroppedExperts(Accumulator[Dropped]):
    """The share of the experts that tokens lose because experts are limited, and of the tokens that are left with none.

    Routings without a limit are not counted.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        if routing.dropped is None:
            return
        routing = only_real(routing, token_mask)
        assert routing.dropped is not None
        used, dropped = routing.used.sum(), routing.dropped.sum()
        self._add(tokens=len(routing.experts), asked=used + dropped, dropped=dropped, empty=(~routing.used.any(-1)).sum())

    def result(self) -> Dropped:
        empty = self._mean("empty")
        asked = float(self._sums["asked"])
        return Dropped(float(self._sums["dropped"]) / asked if asked else 0.0, empty)


@dataclass(frozen=True)
class Changes:
    fluctuation: float  # share of tokens that flip (Mutual-Inform, Figure 2: between checkpoints)
    consistency: float  # share of tokens that keep their selected set (survey 5.2: under a perturbation)
    first_flips: float  # share of tokens whose expert with the largest weight changes
    weight_change: float  # mean over tokens of sum_e |w_te - w'_te|, w = 0 for experts that are not selected


class RoutingChanges(Accumulator[Changes]):
    """Shares of tokens whose selected set or first expert differs between two routings, and the L1 distance of weights.

    The two may have different numbers of slots. With `k`, only the k experts with the largest weights are compared: smooth
    top-k adds and drops experts at weight 0, which is no flip, so its own k makes it comparable to top-k.
    """

    def __init__(self, k: int | None = None) -> None:
        super().__init__(k)
        if k is not None and k < 1:
            raise ValueError(f"k is {k}; it must be at least 1, or None for whole sets.")
        self.k = k

    def update(self, before: Routing, after: Routing, token_mask: Tensor | None = None) -> None:
        if before.gates.shape != after.gates.shape:
            sizes = "{} tokens x {} experts and {} x {}".format(*before.gates.shape, *after.gates.shape)
            expected = "expected the same tokens, in layers with the same number of experts"
            raise ValueError(f"the two routings have {sizes}; {expected}.")
        before, after = only_real(before, token_mask), only_real(after, token_mask, before.experts.device)
        changed, flipped = set_changes(before, after, self.k), before.experts[:, 0] != after.experts[:, 0]
        weights = (before.dense_weights.double() - after.dense_weights.double()).abs()
        self._add(tokens=len(changed), changed=changed.sum(), flipped=flipped.sum(), weights=weights.sum())

    def result(self) -> Changes:
        changed = self._mean("changed")
        return Changes(changed, 1 - changed, self._mean("flipped"), self._mean("weights"))


def set_changes(before: Routing, after: Routing, k: int | None = None) -> Tensor:
    """Return (T,) bool: which tokens flip; with `k`, compare the k experts with the largest weights."""
    return (before.sets_of_slots(k) != after.sets_of_slots(k)).any(-1)


class PredictionStability(Accumulator[float]):
    """The share of predictions that a perturbation does not change, 1 - mean [y(x) != y(x + delta)] (survey 5.2)."""

    def update(self, before: Tensor, after: Tensor, token_mask: Tensor | None = None) -> None:
        """Add predicted classes or tokens of the same shape (...), for example `logits.argmax(-1)`."""
        if before.shape != after.shape:
            raise ValueError(f"predictions have shapes {tuple(before.shape)} and {tuple(after.shape)}; they must be equal.")
        same = real_rows((before == after.to(before.device)).reshape(-1), token_mask)
        self._add(same=same.sum(), predictions=same.numel())

    def result(self) -> float:
        return self._mean("same", "predictions")


def compared(routing: Routing) -> Tensor:
    """Return (T,E): what experts were ranked by, as far as a record shows it: the logits, or else the log gates.

    After an informer, or with noise, the gates are not a function of the scored logits, and selection read the gates.
    """
    for gate in GATES:
        if torch.allclose(gate(routing.logits), routing.gates, rtol=1e-3, atol=1e-6):
            return routing.logits
    return routing.gates.clamp_min(TINY).log()


@dataclass(frozen=True)
class Boundary:
    """The decision boundary of a router: between the k-th expert and the next, by `levels (T,E)` of a routing."""

    k: int | None = None  # None: the number of experts of the token. Smooth top-k uses more than its k, so it needs k
    levels: Callable[[Routing], Tensor] = compared


def boundary_of(router: Router) -> Boundary:
    """Return the boundary that a router's selector declares; in training, noise may change its levels."""
    declared = router.select.declares
    if router.training:
        return Boundary(declared.core)
    if router.fixed_sets:  # no score decides between the selected experts and the others: they are infinitely far apart
        return Boundary(declared.core, lambda routing: torch.zeros_like(routing.gates).where(routing.chosen, -torch.inf))
    return Boundary(declared.core, partial(_levels, declared.levels, router.informed))


def levels_of(rule: Rule) -> Callable[[Routing], Tensor]:
    """Return `Boundary.levels` for the rule of a native gate of a Hugging Face family."""
    return partial(_levels, rule.levels, False)


def _levels(levels: Callable[[Scores], Tensor], informed: bool, routing: Routing) -> Tensor:
    return levels(Scores.from_routing(routing, informed=informed)).squeeze(0)


def gaps_below(routing: Routing, boundary: Boundary) -> tuple[Tensor, Tensor]:
    """Return (T,E) twice: how far each expert is below the k-th, infinite for the k best; and which are the k best."""
    levels = boundary.levels(routing)
    tokens, experts = levels.shape
    k = routing.used.sum(-1, keepdim=True)
    k = k if boundary.k is None else torch.full_like(k, boundary.k).clamp_max(experts)
    order = top(levels, int(k.max()) if tokens else 0)
    order = order.where(torch.arange(order.shape[1], device=levels.device) < k, experts)
    best = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=levels.device).scatter(1, order, True)[:, :experts]
    lowest = levels.where(best, torch.inf).amin(-1, keepdim=True)  # the k-th; infinity if there is none
    return (lowest.double() - levels).where(~best, torch.inf), best


def margins(routing: Routing, boundary: Boundary) -> Tensor:
    """Return (T,) float64: level_(k) - level_(k+1) of each token; infinite if it selects no expert, or all of them."""
    return gaps_below(routing, boundary)[0].amin(-1)


@dataclass(frozen=True)
class NearTie:
    """Near-ties in the strip of this `width` below the k-th level."""

    width: float
    share: float  # of tokens with another expert in the strip
    experts: float  # per token, in the strip and not among the k best


@dataclass(frozen=True)
class NearTieMass:
    strips: list[NearTie]
    explained: float  # share of tokens whose k best experts by level were all selected; below 1, the levels are wrong


class NearTies(Accumulator[NearTieMass]):
    """Count near-ties for several widths eps: tokens with level_(k) - level_(k+1) < eps.

    Also the mean number of experts j beyond the k best with level_(k) - level_j < eps. Levels are logits; after an
    informer, log gates. A token that selects no expert, or all of them, is no near-tie.
    """

    def __init__(self, widths: Sequence[float] = WIDTHS, boundary: Boundary | None = None) -> None:
        self.widths, self.boundary = tuple(widths), boundary or Boundary()
        super().__init__(self.widths, self.boundary.k)
        if not self.widths or not all(width > 0 for width in self.widths):
            raise ValueError(f"widths are {self.widths}; expected at least one, all positive.")
        if self.boundary.k is not None and self.boundary.k < 1:
            raise ValueError(f"k is {self.boundary.k}; it must be at least 1.")

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        routing = only_real(routing, token_mask)
        gaps, best = gaps_below(routing, self.boundary)
        strips = torch.stack([gaps < width for width in self.widths])  # (widths,T,E)
        near, experts, explained = strips.any(2).sum(1), strips.sum((1, 2)), (routing.chosen | ~best).all(1)
        self._add(tokens=len(gaps), near=near, experts=experts, explained=explained.sum())

    def result(self) -> NearTieMass:
        tokens = self._per("tokens")
        shares, experts = (self._sums[name] / tokens for name in ("near", "experts"))
        rows = zip(self.widths, shares.tolist(), experts.tolist(), strict=True)
        return NearTieMass([NearTie(*row) for row in rows], self._mean("explained"))


def gradient_interference(gradients: Sequence[Tensor]) -> float | None:
    """Return the mean over pairs of experts of the cosine between their gradients; None for fewer than two experts.

    -1: their updates are opposite, 0: they have nothing in common, 1: they are the same. Experts without a gradient, which
    no token of the batch selected, do not count.

    gradients   (E, ...) of each parameter that the E experts have; together they are one vector for each expert
    """
    if not gradients:
        return None
    products = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:
        rows = gradient.flatten(1).double()
        products = products + rows @ rows.T
    used = products.diagonal() > 0
    products = products[used][:, used]
    count = len(products)
    if count < 2:
        return None
    lengths = products.diagonal().sqrt()
    cosines = products / (lengths.unsqueeze(1) * lengths)
    return float((cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1)))


class RoutingReport:
    """Collect `each(layer, routing, token_mask)` of all layers. Memory is O(E^2) per layer, and one layer's selection.

    names         of the layers, for the result
    boundaries    by layer, if a router's k or levels are not visible in its records: `boundary_of(router)`
    """

    def __init__(self, names: Sequence[str] = (), *, boundaries: Mapping[int, Boundary] | None = None) -> None:
        self.names, self.boundaries = list(names), dict(boundaries or {})
        self._layers: dict[int, dict[str, Any]] = {}  # of each layer, its metrics by name
        self._last: tuple[int, Routing, Tensor | None] | None = None

    @torch.no_grad()
    def each(self, layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        """Add one layer's routing of one forward; call it for the layers of a forward in order."""
        metrics, real = self._layer(layer), only_real(routing, token_mask)
        for name, metric in metrics.items():
            if name != "instability":
                metric.update(real)
        if self._last is not None:
            place, previous, mask = self._last
            same_mask = mask is token_mask
            if mask is not None and token_mask is not None:
                same_mask = torch.equal(mask, token_mask.to(mask.device))
            if place == layer - 1 and len(previous.experts) == len(routing.experts) and same_mask:
                metrics["instability"].update(previous, routing, token_mask)
        # Logits and gates become one expanded zero of their shape, to save memory.
        gates = routing.gates.new_zeros(()).expand(routing.gates.shape)
        self._last = (layer, Routing(gates, gates, routing.experts.detach(), routing.weights.detach()), token_mask)

    def merge(self, other: Self) -> Self:
        """Add the data of `other`; change and return this report."""
        for layer, metrics in other._layers.items():
            for name, metric in self._layer(layer).items():
                metric.merge(metrics[name])
        return self

    def result(self) -> dict[str, Any]:
        """Return {"layers": [...], "overall": {...}}: dicts, lists, numbers, strings and None only.

        "overall" has means over layers (as ACMoE's Table 6), and the number of dead experts. "dropped" is there only if
        experts are limited in a layer, and its mean is over such layers. "instability" compares a layer
        with the one before; it is None for the first layer, and if the two do not get the same tokens.
        """
        if not self._layers:
            raise ValueError("the report has no data: pass its `each` to holdfast.trace and run the model.")
        layers = []
        for layer, metrics in sorted(self._layers.items()):
            tokens = metrics["load"].tokens
            if not tokens:
                raise ValueError(f"layer {layer} got only padding; there is nothing to report.")
            found: dict[str, Any] = {name: metric.result() if metric.tokens else None for name, metric in metrics.items()}
            if found["dropped"] is None:
                del found["dropped"]
            values = {name: asdict(value) if is_dataclass(value) else value for name, value in found.items()}  # type: ignore[arg-type]
            name = {"name": self.names[layer]} if layer < len(self.names) else {}
            layers.append({"layer": layer, **name, "tokens": tokens, "experts": len(found["load"].percent), **values})
        return without_nan({"layers": layers, "overall": _overall(layers)})  # type: ignore[no-any-return]

    def _layer(self, layer: int) -> dict[str, Any]:
        """Return the metrics of a layer by their names in the result."""
        if layer not in self._layers:
            metrics: dict[str, Accumulator[Any]] = {
                "entropy": GateEntropy(),
                "load": ExpertLoad(),
                "experts_per_token": ExpertsPerToken(),
                "weight_sum": WeightSums(),
                "near_ties": NearTies(boundary=self.boundaries.get(layer)),
                "instability": LayerInstability(),  # against the layer before; the only metric of two layers
                "co_selection": CoSelection(),
                "dropped": DroppedExperts(),  # without data if no limit drops experts
            }
            self._layers[layer] = metrics
        return self._layers[layer]


def _overall(layers: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(*keys: str) -> float | None:
        """Return the mean of an entry over the layers that have it."""
        values = [reduce(dict.__getitem__, keys, layer) for layer in layers if layer.get(keys[0]) is not None]
        return statistics.fmean(values) if values else None  # type: ignore[arg-type]

    of_widths = zip(*(layer["near_ties"]["strips"] for layer in layers), strict=True)
    strips = [{name: statistics.fmean(strip[name] for strip in same) for name in same[0]} for same in of_widths]
    dropped = {name: mean("dropped", name) for name in ("share", "tokens")}
    dead = sum(len(layer["load"]["dead"]) for layer in layers)
    return {
        "layers": len(layers),
        "entropy": mean("entropy"),
        "load": {
            "std": mean("load", "std"),
            "std_over_layers": statistics.pstdev(layer["load"]["std"] for layer in layers),  # ACMoE Table 6, after the sign
            "cv": mean("load", "cv"),
            "dead": dead,
        },
        "experts_per_token": {"mean": mean("experts_per_token", "mean")},
        "weight_sum": {"mean": mean("weight_sum", "mean")},
        **({} if dropped["share"] is None else {"dropped": dropped}),
        "near_ties": {"strips": strips, "explained": mean("near_ties", "explained")},
        "instability": mean("instability"),
        "co_selection": {"spectral_gap": mean("co_selection", "spectral_gap")},
    }


MODALITIES = ("text", "image")  # by number, as routers read them


@dataclass(frozen=True)
class Modalities:
    overlap: float
    one_modality: float  # share of the experts that are used
    text: list[float]  # percent of text tokens that selected each expert
    image: list[float]  # the same of image tokens


class ModalityUse(Accumulator[Modalities]):
    """Count which experts serve image tokens, text tokens, or both."""

    def update(self, routing: Routing, is_image: Tensor, token_mask: Tensor | None = None) -> None:
        """Add a routing; `is_image (T,)` bool, in any shape, is True where a token is a part of an image."""
        if is_image.dtype != torch.bool or is_image.numel() != len(routing.experts):
            got = f"{is_image.dtype} of shape {tuple(is_image.shape)}"
            raise ValueError(f"is_image is {got}; expected {len(routing.experts)} bools, one for each token.")
        image = real_rows(is_image.reshape(-1).to(routing.experts.device), token_mask)
        chosen = only_real(routing, token_mask).chosen.double()
        parts = torch.stack([~image, image]).double()  # (2,T), in the order of MODALITIES
        self._add(counts=parts @ chosen, by_modality=parts.sum(1), tokens=len(image))

    def result(self) -> Modalities:
        self._per("tokens")
        counts, tokens = self._sums["counts"], self._sums["by_modality"]
        for name, number in zip(MODALITIES, tokens.tolist(), strict=True):
            if not number:
                raise ValueError(f"there are no {name} tokens; experts are compared between images and texts.")
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        used, both = (counts > 0).any(0).sum(), (counts > 0).all(0).sum()
        text, image = (100 * counts / tokens.unsqueeze(1)).tolist()
        return Modalities(float(shares.amin(0).sum()), float((used - both) / used.clamp_min(1)), text, image)
