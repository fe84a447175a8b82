"""`measure_geometry`: the geometry of routing on a model's own tokens, and what another router changes about it.

The model runs once unchanged. At its router inputs, ties, random walks and jumps are measured, the jumps and pictures with
the what-if's router too, on the same weights and points. Then the model runs once more with that router, for its cost.

Distances are shares of each token's norm, and the noise of a random walk is scaled by it: at time 1, a walk has added noise
of `noise` times the norm of the token, as the perturbation `noise` of an audit does at once. With `drift`, it has also moved
by `drift` times the norm straight towards the token's nearest boundary, as an adversary would.

Statements of the papers stand beside what is measured, on the tokens of the first batch, for layers with pictures:

co_selection    how precisely the batch estimates Symphony's expert graph, and how far noise moves it (theorem 1) or can move
                it (appendix B.2)
entropy         of gates that tokens of a sequence share by similarity, and its bound (Mutual-Inform, proposition 1)
clusters        separation, mis-assignment and condition numbers before and after AC scales features (ACMoE)
slopes          how fast gate weights change with the logits: softmax, top-k, smooth (survey, section 6.1)
tsne            t-SNE of router inputs, with the first expert of each (ACMoE, figure 4)

T tokens, E experts, M orders, n times or widths
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from holdfast.auditing.baseline import Mean
from holdfast.auditing.forwards import Observation, observe
from holdfast.auditing.layer_geometry import (
    LayerTokens,
    central_token,
    nearest_jumps,
    output_along_normal,
    shares_within,
    slice_around,
    slice_through,
)
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, Measurement, Progress, evaluation_mode
from holdfast.auditing.reports import (
    Clusters,
    ClusterSpace,
    Entropies,
    ExtraExperts,
    GeometryReport,
    GeometrySettings,
    GeometryWhatIf,
    GraphPrecision,
    Hitting,
    Jump,
    Jumps,
    JumpSizes,
    MeasuredLayer,
    Pair,
    Pictures,
    RefusedLayer,
    Slope,
    Slopes,
    Theory,
    TieOrder,
    Ties,
    Tsne,
    known_mean,
)
from holdfast.auditing.run import perplexity_of, require_not_rerouted, rerouted
from holdfast.checked import from_mapping
from holdfast.errors import missing_extra_message
from holdfast.geometry import (
    FlipPoints,
    NoGeometry,
    cluster_separation,
    extra_experts_law,
    gate_slopes,
    graph_under_noise,
    hitting_bounds,
    mixed_entropies,
    region_constants,
    region_regularity,
    similarity_weights,
    simulate_walks,
    smooth_weights,
    softmax_weights,
    thickening_share,
    top_k_weights,
    tsne_coordinates,
)
from holdfast.hub.convert import routers_in_parts
from holdfast.hub.layers import moe_layers
from holdfast.routing import Router
from holdfast.routing.presets import resolve_layers

ORDERS = (1, 2, 3)
WIDTHS = tuple(10.0 ** (-power / 4) for power in range(16, -1, -1))  # eps, in shares of a token's norm
TIMES = tuple(10.0 ** (power / 4) for power in range(-8, 9))
LARGEST = 10  # jumps that are listed
DRAWS = 64  # directions in each flat, for the law of extra experts
MOST_SETS = 500  # of experts in the law of a ball; beyond, the sum over sets is estimated
GRAPH_NOISE = (0.01, 0.05, 0.1)  # of the expert graph, in shares of a token's norm
MOST_REGIONS = 32  # sets of experts whose regions are measured
CLUSTER_NOISE = 0.05  # of tokens that are assigned to clusters, in shares of their mean norm
STRIP = 0.1  # width of the strip of `smooth`, if the what-if has none
MOST_SLOPES = 64  # tokens
MOST_DRAWN = 600  # tokens of a t-SNE


def measure_geometry(
    model: Any,
    texts_or_inputs: Iterable[Any],
    *,
    tokenizer: Any = None,
    what_if: str | None = "smooth",
    name: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> GeometryReport:
    """Measure how near a model's tokens are to the discontinuities of its routers, and when noise takes them there.

    model            of any MoE family, or sparsified; it is not changed. A rerouted one needs `what_if=None`
    texts_or_inputs  strings, with the model's `tokenizer`; or batches, dicts for its forward. With a what-if they are read
                     twice
    what_if          a router that reads one token at a time, to be compared with the model's own on the same weights; None:
                     no other router
    name             of the model in the report
    progress         called with the number of tokens done and a description of the current work; by default a bar shows
                     them, or lines on stderr where there is no terminal
    settings         noise, drift, walks, walking, pictures, seed, batch, length, tokens: those of `GeometrySettings`

    Layers whose ties are not flats (no affine scores, or no top-k) are in `refused`, with the reason. After Ctrl-C it
    reports on the finished batches, with the status "interrupted".

    Example:
        report = holdfast.measure_geometry(model, ["The quick brown fox jumps over the dog."], tokenizer=tokenizer)
        print([layer.ties.orders[0].median for layer in report.layers])
    """
    checked = from_mapping(GeometrySettings, {"what_if": what_if, **settings})
    inputs = list(texts_or_inputs) if isinstance(texts_or_inputs, Iterator) else texts_or_inputs  # read twice
    run = _GeometryRun(model, tokenizer, checked, progress)
    with run.showing(name):
        run.run(inputs)
        if what_if is not None and not run.interrupted:
            run.run_rerouted(inputs, what_if)
    return run.report(name)


def what_if_routers(audited: AuditedModel, name: str | None) -> list[Router | None]:
    """Return the router that `name` puts into each layer, None where it changes nothing. The model is left as it is.

    A router keeps its references to the weights of the gate, so it can be called after the model is restored.
    """
    if name is None:
        return [None] * len(audited.moe_layers)
    require_not_rerouted(audited)
    routers_in_parts(resolve_layers(name, None, native=True), audited.moe_layers)  # a mistake ends it here
    before = [site.router for site in audited.moe_layers]
    with evaluation_mode(audited.model), rerouted(audited, name):
        after = [site.router for site in moe_layers(audited.model)]
    routers = [None if new is old else new for old, new in zip(before, after, strict=True)]
    for router in filter(None, routers):
        router.eval()
        if router.traits.sequence_aware or any(part.reads for part in router.all_parts) or router.fixed_sets:
            raise ValueError(
                f"the what-if {name!r} reads more than one token; routers are compared at points that are no tokens of a "
                "text, so name a router that reads one token at a time, for example smooth."
            )
    return routers


@final
class _GeometryRun(Measurement):
    """A report in progress. A batch counts when all layers have been measured on it."""

    def __init__(self, model: Any, tokenizer: Any, settings: GeometrySettings, progress: Progress | None) -> None:
        super().__init__(model, tokenizer, settings, progress)
        self.audited.require_texts()
        self.routers = what_if_routers(self.audited, settings.what_if)
        self.layers = [LayerSums() for _ in self.routers]
        self.before, self.after = _Cost(len(self.layers)), _Cost(len(self.layers))

    def add(self, batch: AuditBatch) -> None:
        self.tell(self.tokens, "the model's own forward")
        observed = observe(self.audited, batch)
        observed.require_finite()
        news = [self._measure(layer, observed, batch) for layer in range(len(self.layers))]
        for layer, new in zip(self.layers, news, strict=True):
            layer.merge(new)
        self.before.add(observed)
        self.count(batch, batch.tokens or len(observed.real(0)))

    def run_rerouted(self, inputs: Iterable[Any], router: str) -> None:
        """Run the rerouted model on the same batches, for its cost."""
        done = 0
        with evaluation_mode(self.audited.model), rerouted(self.audited, router):
            try:
                for batch in self.batches(inputs):
                    self.tell(done, f"the model with {router}")
                    self.after.add(observe(self.audited, batch))
                    done += batch.tokens
            except KeyboardInterrupt:
                self.interrupted = True

    def _measure(self, layer: int, observed: Observation, batch: AuditBatch) -> "LayerSums":
        if self.layers[layer].reason is not None:
            return LayerSums()
        try:
            tokens = LayerTokens.of(self.audited, layer, observed, batch, self.encoder)
        except NoGeometry as reason:
            return LayerSums(reason=str(reason))
        pictures = batch.number == 0 and layer in spread(len(self.layers), self.settings.pictures)
        self.tell(self.tokens, f"layer {layer}: ties, walks and jumps{', pictures and t-SNE' if pictures else ''}")
        before = observed.layers[layer - 1].routing.experts[:, 0][tokens.rows].cpu() if layer else None
        measured = LayerBatch(layer, tokens, self.settings, self.routers[layer], before)
        try:
            return measured.sums(self.layers[layer].walked, pictures)
        except ValueError as problem:
            raise ValueError(f"{self.audited.names[layer]}: {problem}") from None

    def report(self, name: str | None) -> GeometryReport:
        about, other = self.about(name), self.settings.what_if
        layers, refused = [], []
        for layer, sums in enumerate(self.layers):
            which = (layer, about["model"].layers[layer], about["model"].routers[layer])
            if sums.reason is not None or not sums.distances:
                refused.append(RefusedLayer(*which, sums.reason or "there were no tokens."))
                continue
            extra = None
            if other is not None and self.after.tokens:
                extra = ExtraExperts(self.after.extra_shares(layer, sums.about["k"]), sums.laws.get("extra"))
            layers.append(sums.result(*which, extra))
        what_if = None
        if other is not None:
            after = self.after.numbers()
            cost = {key: Pair(before, after[key]) for key, before in self.before.numbers().items()}
            jumps = (
                known_mean(each.mean for layer in layers for each in layer.jumps.routers[place:][:1]) for place in (0, 1)
            )
            what_if = GeometryWhatIf(other, cost, Pair(*jumps))
        return GeometryReport(**about, layers=layers, refused=refused, what_if=what_if).as_stored()


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices below `count`, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [0] * most if most <= 1 else [round(place * (count - 1) / (most - 1)) for place in range(most)]


@final
class _Cost:
    """Loss and number of experts of a model, over the batches that it has run on."""

    def __init__(self, layers: int) -> None:
        self.loss, self.tokens = Mean(), 0
        self.used: list[list[Tensor]] = [[] for _ in range(layers)]  # experts of each token

    def add(self, observed: Observation) -> None:
        if observed.predictions is not None:
            self.loss.update(observed.predictions.scored)
        for layer, record in enumerate(observed.layers):
            self.used[layer].append(record.routing.used.sum(-1)[observed.real(layer)].cpu())
        self.tokens += len(observed.real(0))

    def numbers(self) -> dict[str, float | None]:
        loss = self.loss.result()
        used = torch.cat([torch.cat(part) for part in self.used]).double() if self.tokens else None
        experts = None if used is None else float(used.mean())
        return {"loss": loss, "perplexity": perplexity_of(loss), "experts_per_token": experts}

    def extra_shares(self, layer: int, k: int) -> list[float]:
        """Return the shares of tokens with at least 1, 2 and 3 experts beyond k."""
        extra = torch.cat(self.used[layer]) - k
        return [float((extra >= least).double().mean()) for least in (1, 2, 3)]


@final
@dataclass
class LayerSums:
    """The sums of one layer over the finished batches, or the reason why it has none."""

    reason: str | None = None
    distances: list[Tensor] = field(default_factory=list)  # (T,M) of each batch, relative
    exact: bool = True  # whether all distances are; otherwise some are upper bounds
    lengths: list[Tensor] = field(default_factory=list)  # (T,)
    bounds: list[Tensor] = field(default_factory=list)  # (2,n): sums over tokens of the lower and the upper bound
    exits: list[Tensor] = field(default_factory=list)  # (n,): walks that have left their cell before each time
    walks: int = 0
    walked: int = 0  # tokens
    exit_orders: list[Tensor] = field(default_factory=list)
    jumps: list[Tensor] = field(default_factory=list)  # (routers,T), relative to the output
    largest: list[Jump] = field(default_factory=list)
    pictures: Pictures | None = None  # of the first batch, as theory and laws
    theory: Theory | None = None
    laws: dict[str, list[Any]] = field(default_factory=dict)
    about: dict[str, int] = field(default_factory=dict)  # width, experts, k

    def merge(self, other: "LayerSums") -> None:
        """Add a finished batch."""
        for name in ("distances", "lengths", "bounds", "exits", "exit_orders", "jumps"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("reason", "pictures", "theory", "laws", "about"):
            setattr(self, name, getattr(self, name) or getattr(other, name))
        self.exact = self.exact and other.exact
        self.walks, self.walked = self.walks + other.walks, self.walked + other.walked
        jumps = [*self.largest, *other.largest]
        self.largest = heapq.nlargest(LARGEST, jumps, key=lambda jump: (jump.size or 0.0, -jump.batch, -jump.place))

    def result(self, layer: int, name: str, router: str, extra: ExtraExperts | None) -> MeasuredLayer:
        distances, lengths = torch.cat(self.distances), torch.cat(self.lengths)
        orders = []
        for place, order in enumerate(ORDERS):
            laws = {name: [row[place] for row in self.laws[name]] for name in ("law", "asymptotic") if self.laws}
            own = distances[:, place]
            orders.append(TieOrder(order, shares_within(own, WIDTHS), float(own.median()), **laws))
        sizes = [JumpSizes(float(row.mean()), float(row.median()), float(row.max())) for row in torch.cat(self.jumps, dim=1)]
        hitting = None
        if self.walked:
            lower, upper = (torch.stack(self.bounds).sum(0) / self.walked).tolist()
            simulated, seen = (torch.stack(self.exits).sum(0) / self.walks).tolist(), torch.cat(self.exit_orders)
            of_order_1 = float((seen == 1).double().mean()) if len(seen) else None
            hitting = Hitting(list(TIMES), lower, upper, simulated, self.walked, self.walks, of_order_1)
        return MeasuredLayer(
            layer=layer,
            name=name,
            router=router,
            **self.about,
            tokens=len(distances),
            norm={"mean": float(lengths.mean()), "std": float(lengths.std(correction=0))},
            ties=Ties(list(WIDTHS), self.exact, orders),
            hitting=hitting,
            jumps=Jumps(sizes, self.largest),
            pictures=self.pictures,
            theory=self.theory,
            what_if=extra,
        )


@final
@dataclass(frozen=True)
class LayerBatch:
    """The tokens of one layer in one batch, and what is measured on them. `router` is that of the what-if."""

    layer: int
    tokens: LayerTokens
    settings: GeometrySettings
    router: Router | None
    before: Tensor | None  # (T,): the first expert of each token at the previous MoE layer; None: there is no such layer

    def sums(self, walked: int, pictures: bool) -> LayerSums:
        """Measure the tokens.

        walked      how many tokens of earlier batches have walked
        pictures    whether to draw this layer, and to put the papers' statements beside it
        """
        tokens = self.tokens
        about = {"width": tokens.tokens.shape[1], "experts": tokens.experts, "k": tokens.k}
        sums = LayerSums(about=about, lengths=[tokens.lengths])
        if tokens.k == tokens.experts:
            sums.reason = "every token uses every expert, so there are no ties at a threshold."
            return sums
        if not bool(tokens.lengths.any()):
            raise ValueError("all tokens that reach this layer are 0; the checkpoint's weights before it are 0.")
        distances, sums.exact = tokens.tie_distances(ORDERS)
        sums.distances.append(distances)
        if tokens.batch.number == 0:
            sums.laws = self._laws_of_ball()
        flips = tokens.flips()
        if walked < self.settings.walking:
            self._add_walks(sums, self.settings.walking - walked, flips)
        self._add_jumps(sums, flips)
        if pictures:
            sums.pictures, sums.theory = self._pictures(flips), self._theory()
        return sums

    @property
    def strip(self) -> float | None:
        """Return the width of the strip of the what-if's router, in logits; None if it has none."""
        width = None if self.router is None else self.router.select.declares.snapshot().get("width")
        return float(width) if width is not None and float(width) > 0 else None

    def _laws_of_ball(self) -> dict[str, list[Any]]:
        """Return what a ball with tokens of the same mean squared norm would have, if inputs were spread evenly over it.

        law         (n,M): the share within each width of ties of each order, by the exact integrals
        asymptotic  (n,M): the same for a large ball, which falls as the m-th power of the width
        extra       the shares with at least 1, 2 and 3 experts beyond k in the strip of the what-if, for linear scores
        """
        tokens, seed = self.tokens, self.settings.seed
        group = tokens.most_frequent
        order, rows = tokens.keys.order_of(group), tokens.tokens[tokens.keys.index == group]
        norm = float(rows.double().square().sum(1).mean().sqrt())
        widths = norm * torch.tensor(WIDTHS, dtype=torch.float64)
        share = thickening_share(order, rows, tokens.k, widths, orders=ORDERS, most_sets=MOST_SETS, seed=seed)
        laws: dict[str, list[Any]] = {"law": share.exact.clamp_max(1).tolist(), "asymptotic": share.law.tolist()}
        if self.router is not None and self.strip is not None:
            # A law is known if the router's logits are the keys, up to a number that all experts of a token share.
            logits = tokens.route(tokens.tokens[:1], torch.zeros(1, dtype=torch.int64), self.router).logits.double()
            keys = tokens.keys.logits[:1]
            if not torch.allclose(logits - logits.mean(), keys - keys.mean(), rtol=1e-3, atol=1e-4):
                return laws
            eps = torch.tensor([self.strip], dtype=torch.float64)
            extra = [
                extra_experts_law(order.matrix, tokens.k, eps, share.radius, m=m, draws=DRAWS, seed=seed) for m in ORDERS
            ]
            laws["extra"] = [min(1.0, float(each)) for each in extra]
        return laws

    def _add_walks(self, sums: LayerSums, most: int, flips: FlipPoints) -> None:
        """Walk from some of the tokens, with noise of noise |x| sqrt(t / d) a feature and drift of drift |x| t at time t."""
        tokens, chosen = self.tokens, self.tokens.spread(most)
        speeds = (self.settings.noise * tokens.lengths).square() / tokens.tokens.shape[1]
        instants = torch.tensor(TIMES, dtype=torch.float64)
        seed = self.settings.seed + 1_000_003 * tokens.batch.number + 7919 * self.layer
        for rows, order in tokens.keys.orders():
            rows = rows[torch.isin(rows, chosen)]
            if not len(rows):
                continue
            starts, speed = tokens.tokens[rows], speeds[rows].unsqueeze(1)
            # Walks have noise 1, and their time is `speed` times ours.
            drift = self.settings.drift * (tokens.lengths[rows].unsqueeze(1) / speed) * flips.normals[rows]
            moved = {"drift": drift} if self.settings.drift else {}
            bounds = hitting_bounds(order, starts, tokens.k, speed * instants, **moved)
            sums.bounds.append(torch.stack([bounds.lower.sum(0), bounds.upper.sum(0)]))
            horizon = speeds[rows] * max(TIMES)
            walks = simulate_walks(order, starts, tokens.k, horizon, walks=self.settings.walks, seed=seed, **moved)
            sums.exits.append(((walks.times / speed).unsqueeze(2) <= instants).sum((0, 1)).double())
            sums.exit_orders.append(walks.orders[walks.times.isfinite()])
            sums.walks += walks.times.numel()
            sums.walked += len(rows)

    def _add_jumps(self, sums: LayerSums, flips: FlipPoints) -> None:
        """Measure the jump at every token's nearest boundary, relative to the norm of the layer's output at the token."""
        tokens = self.tokens
        sizes = tokens.output.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        routers = [None] if self.router is None else [None, self.router]
        relative = torch.stack([nearest_jumps(tokens, flips, by).limit / sizes for by in routers])
        sums.jumps.append(relative)
        for place in relative[0].argsort(descending=True, stable=True)[:LARGEST].tolist():
            jump = Jump(
                **vars(tokens.place(place)),
                size=float(relative[0, place]),
                size_with_what_if=float(relative[1, place]) if self.router is not None else None,
                distance=float(flips.distances[place] / tokens.lengths[place]),
                leaves=int(flips.leaving[place]),
                enters=int(flips.entering[place]),
            )
            sums.largest.append(jump)

    def _pictures(self, flips: FlipPoints) -> Pictures:
        """Return two slices and the output along a normal. Slices are left out if the geometry does not allow them.

        The slice through three tokens has the central token and the next two of the batch that select other experts.
        """
        tokens, central = self.tokens, central_token(self.tokens, flips)
        slices = []
        for draw in (
            lambda: slice_through(tokens, _three(tokens, central), self.router),
            lambda: slice_around(tokens, central, self.router),
        ):
            try:
                slices.append(draw())
            except ValueError:  # parallel boundaries, or fewer than three tokens with different experts
                continue
        return Pictures(tokens.place(central), slices, output_along_normal(tokens, flips, central, self.router))

    def _theory(self) -> Theory:
        """Return the statements that apply, and the reason for each that does not."""
        found: dict[str, Any] = {}
        skipped: dict[str, str] = {}
        for measure in (self._co_selection, self._entropy, self._clusters, self._slopes, self._tsne):
            name = measure.__name__.removeprefix("_")
            try:
                found[name] = measure()
            except ValueError as reason:
                skipped[name] = str(reason)
        return Theory(**found, skipped=skipped)

    def _co_selection(self) -> GraphPrecision:
        tokens = self.tokens
        order = tokens.keys.order_of(tokens.most_frequent)

        def chosen(points: Tensor) -> Tensor:
            keys = points.double() @ order.matrix.t() + tokens.keys.bias
            best = keys.argsort(dim=1, descending=True, stable=True)[:, : tokens.k]
            return torch.zeros(len(points), tokens.experts, dtype=torch.bool).scatter(1, best, True)

        graph = graph_under_noise(chosen, tokens.tokens, GRAPH_NOISE, seed=self.settings.seed)
        half_width = float(graph.clean.half_widths[graph.clean.counts > 0].median())
        bounds = region_constants(order, tokens.tokens, tokens.k, GRAPH_NOISE)
        regularity = None
        if not missing_extra_message("the regularity of regions", "scipy"):
            sets, counts = tokens.sets.unique(dim=0, return_counts=True)
            most = counts.argsort(descending=True, stable=True)[:MOST_REGIONS]
            regularity = float(region_regularity(order, sets[most]).min())
        return GraphPrecision(
            half_width,
            graph.clean.alpha,
            list(GRAPH_NOISE),
            **{name: getattr(graph, name).tolist() for name in ("mean", "largest", "beyond", "joint")},
            joint_bound=bounds.change.tolist(),
            regularity=regularity,
        )

    def _entropy(self) -> Entropies:
        """Return the entropies of the first sequence, with similarity of router inputs at its default temperature."""
        tokens, ids = self.tokens, self.tokens.batch.ids
        first = tokens.tokens if ids is None else tokens.tokens[tokens.rows < ids.shape[1]]
        if len(first) < 2:
            raise ValueError("the first sequence has fewer than two tokens.")
        gates = torch.softmax(tokens.keys.logits[: len(first)], dim=-1)
        entropies = mixed_entropies(gates, similarity_weights(first))
        return Entropies(*(float(values.mean()) for values in vars(entropies).values()))

    def _clusters(self) -> Clusters:
        if self.before is None:
            raise ValueError("there is no previous MoE layer, whose first experts are the clusters.")
        noise = CLUSTER_NOISE * float(self.tokens.lengths.mean()) / self.tokens.tokens.shape[1] ** 0.5
        found = cluster_separation(self.tokens.tokens, self.before, noise=noise, seed=self.settings.seed)
        medians = ([float(values.median()) for values in vars(space).values()] for space in (found.plain, found.scaled))
        return Clusters(len(found.clusters), CLUSTER_NOISE, *(ClusterSpace(*numbers) for numbers in medians))

    def _slopes(self) -> Slopes:
        logits, k, strip = self.tokens.keys.logits[:MOST_SLOPES], self.tokens.k, self.strip or STRIP
        gates = [softmax_weights, lambda values: top_k_weights(values, k), lambda values: smooth_weights(values, k, strip)]
        slopes = [gate_slopes(weights, logits, k) for weights in gates]
        medians = ((each.at_token.median(), each.jump.median(), each.largest.median()) for each in slopes)
        return Slopes(strip, *(Slope(*map(float, numbers)) for numbers in medians))

    def _tsne(self) -> Tsne:
        if message := missing_extra_message("t-SNE of router inputs", "sklearn"):
            raise ValueError(f"{message}.")
        places, kept = tsne_coordinates(self.tokens.tokens, most=MOST_DRAWN, seed=self.settings.seed)
        x, y = (places / (float(places.abs().max()) or 1.0)).t().tolist()
        experts = self.tokens.keys.logits.argmax(1)[kept].tolist()
        return Tsne([round(each, 4) for each in x], [round(each, 4) for each in y], experts)


def _three(tokens: LayerTokens, first: int) -> tuple[int, int, int]:
    """Return a token and the next two in the batch with other sets of experts; raise ValueError if there are none."""
    first_with: dict[tuple[int, ...], int] = {}
    sets = tokens.sets.tolist()
    for place in (*range(first, len(sets)), *range(first)):
        first_with.setdefault(tuple(sets[place]), place)
    found = list(first_with.values())
    if len(found) < 3:
        raise ValueError("there are no three tokens with different experts.")
    return found[0], found[1], found[2]
