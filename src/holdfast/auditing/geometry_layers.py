"""What `measure_geometry` collects about one MoE layer, batch by batch: ties, hitting times, jumps and pictures.

Distances are shares of each token's norm, and the noise of a random walk is scaled by it: at time 1, a walk has added noise
of `noise` times the norm of the token, as the perturbation `noise` of an audit does at once.

T tokens, E experts, M orders, n times or widths
"""

import heapq
import math
import statistics
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from holdfast.auditing.baseline import where_in_batch
from holdfast.auditing.geometry_theory import measure_theory
from holdfast.auditing.model_and_data import AuditBatch, TextEncoder
from holdfast.auditing.token_geometry import (
    LayerTokens,
    nearest_jumps,
    output_along_normal,
    slice_around,
    slice_through,
)
from holdfast.geometry.diffusion import meets_before, simulate_walks
from holdfast.geometry.thickening import extra_experts_law, thickening_share
from holdfast.geometry.ties import nearest_ties, pair_distances, ranks_of
from holdfast.metrics.jump import FlipPoints
from holdfast.routing import Router
from holdfast.routing.declarations import Order

ORDERS = (1, 2, 3)
WIDTHS = tuple(10.0 ** (-power / 4) for power in range(16, -1, -1))  # eps, in shares of a token's norm
TIMES = tuple(10.0 ** (power / 4) for power in range(-8, 9))
LARGEST = 10  # jumps that are listed
DRAWS = 64  # directions in each flat, for the law of extra experts
MOST_SETS = 500  # of experts in the law of a ball; beyond, the sum over sets is estimated


@final
@dataclass
class LayerGeometry:
    """The sums of one layer over the finished batches, or the reason why it has none."""

    layer: int
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
    largest: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)
    theory: dict[str, Any] = field(default_factory=dict)  # of the first batch
    laws: dict[str, Any] = field(default_factory=dict)  # of the first batch
    about: dict[str, Any] = field(default_factory=dict)  # width, experts, k

    def merge(self, other: "LayerGeometry") -> None:
        """Add a finished batch."""
        for name in ("distances", "lengths", "bounds", "exits", "exit_orders", "jumps"):
            getattr(self, name).extend(getattr(other, name))
        self.reason, self.exact = self.reason or other.reason, self.exact and other.exact
        self.walks, self.walked = self.walks + other.walks, self.walked + other.walked
        self.largest = heapq.nlargest(LARGEST, [*self.largest, *other.largest], key=_size)
        self.pictures, self.about = self.pictures or other.pictures, self.about or other.about
        self.laws, self.theory = self.laws or other.laws, self.theory or other.theory

    def result(self) -> dict[str, Any]:
        """Return the entries of the layer in the report."""
        if self.reason is not None or not self.distances:
            return {"skipped": self.reason or "there were no tokens."}
        distances, lengths = torch.cat(self.distances), torch.cat(self.lengths)
        return {
            "skipped": None,
            **self.about,
            "tokens": len(distances),
            "norm": {"mean": float(lengths.mean()), "std": float(lengths.std(correction=0))},
            "ties": self._ties(distances),
            "hitting": self._hitting(),
            "jumps": self._jumps(),
            "pictures": self.pictures,
            "theory": self.theory,
        }

    def _ties(self, distances: Tensor) -> dict[str, Any]:
        orders = []
        for place, order in enumerate(ORDERS):
            own = distances[:, place]
            shares = [float((own <= width).double().mean()) for width in WIDTHS]
            median = float(own.median())
            laws: dict[str, Any] = {
                name: [row[place] for row in self.laws[name]] for name in ("law", "asymptotic") if name in self.laws
            }
            orders.append({"order": order, "shares": shares, "median": median if math.isfinite(median) else None, **laws})
        return {"widths": list(WIDTHS), "exact": self.exact, "orders": orders}

    def _hitting(self) -> dict[str, Any] | None:
        if not self.walked:
            return None
        lower, upper = (torch.stack(self.bounds).sum(0) / self.walked).tolist()
        shares = (torch.stack(self.exits).sum(0) / self.walks).tolist()
        seen = torch.cat(self.exit_orders)
        return {
            "times": list(TIMES),
            "lower": lower,
            "upper": upper,
            "simulated": shares,
            "tokens": self.walked,
            "walks": self.walks,
            "exits_of_order_1": float((seen == 1).double().mean()) if len(seen) else None,
        }

    def _jumps(self) -> dict[str, Any]:
        sizes = torch.cat(self.jumps, dim=1)
        rows = [{"mean": float(row.mean()), "median": float(row.median()), "largest": float(row.max())} for row in sizes]
        return {"routers": rows, "largest": self.largest}


def _size(entry: dict[str, Any]) -> tuple[float, int, int]:
    return entry["size"], -entry["batch"], -entry["place"]


@final
@dataclass(frozen=True)
class GeometryOptions:
    """What determines the numbers of a layer, apart from its tokens."""

    noise: float = 0.05
    walks: int = 4  # of each token that walks
    walking: int = 512  # tokens of a layer that walk
    seed: int = 0


def measure_batch(
    tokens: LayerTokens,
    layer: int,
    batch: AuditBatch,
    encoder: TextEncoder | None,
    options: GeometryOptions,
    router: Router | None,
    walked: int,
    pictures: bool,
    before: Tensor | None = None,
) -> LayerGeometry:
    """Measure the tokens of one layer in one batch.

    router      that of the what-if
    walked      how many tokens of earlier batches have walked
    pictures    whether to draw this layer, and to put the papers' statements beside it
    before      (T,): the first experts at the previous MoE layer
    """
    about = {"width": tokens.tokens.shape[1], "experts": tokens.experts, "k": tokens.k}
    found = LayerGeometry(layer, about=about, lengths=[tokens.lengths.cpu()])
    if tokens.k == tokens.experts:
        found.reason = "every token uses every expert, so there are no ties at a threshold."
        return found
    if not bool(tokens.lengths.any()):
        raise ValueError("all tokens that reach this layer are 0; the checkpoint's weights before it are 0.")
    distances = torch.zeros(len(tokens.tokens), len(ORDERS), dtype=torch.float64)
    for rows, order in tokens.groups():
        ties = nearest_ties(order, tokens.tokens[rows], tokens.k, ORDERS)
        distances[rows.cpu()] = (ties.distances / tokens.lengths[rows].unsqueeze(1)).cpu()
        found.exact = found.exact and bool(ties.exact.all())
    found.distances.append(distances)
    if batch.number == 0:
        found.laws = laws_of_ball(tokens, router, options.seed)
    if walked < options.walking:
        _add_walks(found, tokens, options, options.walking - walked, batch.number)
    flips = tokens.flips()
    _add_jumps(found, tokens, flips, batch, encoder, router)
    if pictures:
        found.pictures = draw_pictures(tokens, flips, batch, encoder, router)
        length = int(tokens.rows.max()) + 1 if batch.ids is None else batch.ids.shape[1]
        found.theory = measure_theory(tokens, length, before, _strip(router), options.seed)
    return found


def laws_of_ball(tokens: LayerTokens, router: Router | None, seed: int) -> dict[str, Any]:
    """Return what a ball with tokens of the same mean squared norm would have, if inputs were spread evenly over it.

    law         (n,M): the share within each width of ties of each order, by the exact integrals
    asymptotic  (n,M): the same for a large ball, which falls as the m-th power of the width
    extra       the shares with at least 1, 2 and 3 experts beyond k in the strip of the what-if, for linear scores
    """
    group, weight = _most_frequent(tokens)
    rows = tokens.tokens[tokens.keys.index == group]
    norm = float(rows.double().square().sum(1).mean().sqrt())
    order = Order(weight, tokens.keys.bias)
    widths = norm * torch.tensor(WIDTHS, dtype=torch.float64)
    found = thickening_share(order, rows, tokens.k, widths, orders=ORDERS, most_sets=MOST_SETS, seed=seed)
    laws: dict[str, Any] = {"law": found.exact.clamp_max(1).tolist(), "asymptotic": found.law.tolist()}
    strip = _strip(router)
    if router is not None and strip is not None and _has_logits(tokens, router):
        eps = torch.tensor([strip], dtype=torch.float64)
        extra = [extra_experts_law(weight, tokens.k, eps, found.radius, m=m, draws=DRAWS, seed=seed) for m in ORDERS]
        laws["extra"] = [min(1.0, float(each)) for each in extra]
    return laws


def _strip(router: Router | None) -> float | None:
    """Return the width of the strip of a router, in logits; None if it has none."""
    width = None if router is None else router.select.declares.snapshot().get("width")
    return float(width) if width is not None and float(width) > 0 else None


def _most_frequent(tokens: LayerTokens) -> tuple[int, Tensor]:
    """Return the factors that most tokens have, and their weights (E,d)."""
    group = int(tokens.keys.index.bincount().argmax())
    return group, tokens.key_weights(group)


def _has_logits(tokens: LayerTokens, router: Router) -> bool:
    """Return whether the router's logits are the keys, up to a number that is the same for all experts of a token."""
    first = torch.zeros(1, dtype=torch.int64)
    logits, keys = tokens.route(tokens.tokens[:1], first, router).logits.double().cpu(), tokens.keys.logits[:1].cpu()
    return torch.allclose(logits - logits.mean(), keys - keys.mean(), rtol=1e-3, atol=1e-4)


def hitting_sums(tokens: LayerTokens, rows: Tensor, times: Tensor) -> Tensor:
    """Return (2,n): sums over the tokens `rows` of the lower and the upper bound of P(tau <= t); `times (rows,n)`."""
    products = tokens.keys.products()
    keys = tokens.keys.rows(rows)
    chosen = ranks_of(keys.logits) < tokens.k
    across = chosen.unsqueeze(2) & ~chosen.unsqueeze(1)
    apart = pair_distances(products, keys.index, keys.logits).where(across, torch.inf).flatten(1)
    lower = torch.stack([meets_before(apart.amin(1), time) for time in times.t()], dim=1)
    upper = torch.stack([meets_before(apart, time.unsqueeze(1)).sum(1).clamp_max(1) for time in times.t()], dim=1)
    return torch.stack([lower.sum(0), upper.sum(0)]).cpu()


def _add_walks(found: LayerGeometry, tokens: LayerTokens, options: GeometryOptions, most: int, number: int) -> None:
    """Walk from some of the tokens, spread over the batch. Noise of a walk at time t: noise |x| sqrt(t / d) a feature."""
    count = len(tokens.tokens)
    chosen = torch.arange(count, device=tokens.tokens.device)
    if count > most:
        chosen = (torch.arange(most, device=chosen.device) * count) // most
    speeds = (options.noise * tokens.lengths).square() / tokens.tokens.shape[1]
    instants = torch.tensor(TIMES, dtype=torch.float64, device=speeds.device)
    found.bounds.append(hitting_sums(tokens, chosen, speeds[chosen].unsqueeze(1) * instants))
    exits = torch.zeros(len(TIMES), dtype=torch.float64)
    for rows, order in tokens.groups():
        rows = rows[torch.isin(rows, chosen)]
        if not len(rows):
            continue
        horizon = (speeds[rows] * max(TIMES)).cpu()
        seed = options.seed + 1_000_003 * number + 7919 * found.layer
        walks = simulate_walks(order, tokens.tokens[rows], tokens.k, horizon, walks=options.walks, seed=seed)
        scaled = walks.times.cpu() / speeds[rows].cpu().unsqueeze(1)
        exits += (scaled.unsqueeze(2) <= torch.tensor(TIMES, dtype=torch.float64)).sum((0, 1))
        found.exit_orders.append(walks.orders[walks.times.isfinite()].cpu())
        found.walks += scaled.numel()
        found.walked += len(rows)
    found.exits.append(exits)


def _add_jumps(
    found: LayerGeometry,
    tokens: LayerTokens,
    flips: FlipPoints,
    batch: AuditBatch,
    encoder: TextEncoder | None,
    router: Router | None,
) -> None:
    """Measure the jump at every token's nearest boundary, relative to the norm of the layer's output at the token."""
    sizes = tokens.output.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    routers = [None] if router is None else [None, router]
    relative = torch.stack([nearest_jumps(tokens, flips, by).limit / sizes for by in routers]).cpu()
    found.jumps.append(relative)
    for place in relative[0].argsort(descending=True, stable=True)[:LARGEST].tolist():
        found.largest.append(
            {
                "batch": batch.number,
                **where_in_batch(batch, int(tokens.rows[place]), encoder),
                "size": float(relative[0, place]),
                "size_with_what_if": float(relative[1, place]) if router is not None else None,
                "distance": float(flips.distances[place] / tokens.lengths[place]),
                "leaves": int(flips.leaving[place]),
                "enters": int(flips.entering[place]),
            }
        )


def draw_pictures(
    tokens: LayerTokens, flips: FlipPoints, batch: AuditBatch, encoder: TextEncoder | None, router: Router | None
) -> dict[str, Any]:
    """Return two slices and the output along a normal. Pictures of a token are left out if the geometry does not allow them.

    The token is the one whose distance to its nearest boundary is the median; the slice through three tokens also has the
    next two tokens of the batch that select other experts.
    """
    relative = flips.distances / tokens.lengths
    central = int((relative - relative.median()).abs().argmin())
    slices = []
    for make in (
        lambda: slice_through(tokens, _three(tokens, central), router),
        lambda: slice_around(tokens, central, router),
    ):
        try:
            made = make()
        except ValueError:  # parallel boundaries, or fewer than three tokens with different experts
            continue
        for mark in made["tokens"]:
            where = where_in_batch(batch, int(tokens.rows[mark["token"]]), encoder)
            mark |= {"x": mark["x"] / made["unit"], "y": mark["y"] / made["unit"], "text": where["text"]}
        slices.append(made)
    normal = output_along_normal(tokens, flips, central, router)
    where = where_in_batch(batch, int(tokens.rows[central]), encoder)
    text = {name: where[name] for name in ("text", "before", "after")}
    return {"token": {**text, "distance": float(relative[central])}, "slices": slices, "normal": normal}


def _three(tokens: LayerTokens, first: int) -> tuple[int, int, int]:
    """Return a token and the next two in the batch with other sets of experts; raise ValueError if there are none."""
    best = tokens.keys.logits.argsort(dim=1, descending=True, stable=True)[:, : tokens.k].sort(1).values.tolist()
    found, known = [first], [best[first]]
    for place in (*range(first + 1, len(best)), *range(first)):
        if best[place] not in known and len(found) < 3:
            found.append(place)
            known.append(best[place])
    if len(found) < 3:
        raise ValueError("there are no three tokens with different experts.")
    return found[0], found[1], found[2]


def overall_jump(layers: list[dict[str, Any]], router: int) -> float | None:
    """Return the mean jump over layers for the model's own router (0) or that of the what-if (1); None if not measured."""
    known = [layer["jumps"]["routers"] for layer in layers if layer["skipped"] is None]
    found = [rows[router]["mean"] for rows in known if len(rows) > router]
    return statistics.fmean(found) if found else None
