"""One MoE layer around its own tokens: where ties are, and what the layer returns at other points of token space.

`LayerTokens` has the tokens of a layer in one forward, and routes or runs any points near them: a router that reads more
than its token (AC reads the cluster) gets the context of the token that a point belongs to. From it come slices
(`slice_around`, `slice_through`), the output along the normal through a boundary (`output_along_normal`), the jumps at
boundaries (`nearest_jumps`), and what an audit says about some of its tokens (`near_boundaries`).

T tokens of the layer, d width, E experts, M points
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.auditing.forwards import Observation
from holdfast.auditing.layer_certificates import gate_inputs, route_again
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, TextEncoder, token_place
from holdfast.auditing.reports import Boundaries, Mark, Normal, Slice, TieOrder, TokenPlace
from holdfast.geometry import AffineKeys, affine_keys, affine_order, nearest_ties
from holdfast.geometry.jumps import FlipPoints, Jumps, jumps, nearest_flips
from holdfast.geometry.slices import Plane, PlaneKeys, grid, plane_through, slice_ties
from holdfast.hub import RouterCall
from holdfast.hub.layers import MoELayerRef
from holdfast.routing import Context, Router, Routing
from holdfast.routing.records import Previous

GRID = 128  # points on each side of a slice
ALONG = 240  # points of the output along a normal; even, so that none lies on the boundary itself
STEPS = tuple(10.0 ** (-power / 2) for power in range(2, 9))  # of the largest differences, relative to the token's norm
STARTS = 128  # places on the normal at which differences are measured
AUDIT_ORDERS = (1, 2)
AUDIT_WIDTHS = (0.001, 0.003, 0.01, 0.03, 0.1)  # in shares of a token's norm
MOST_AUDITED = 256  # tokens of a layer, evenly spaced over the first batch


@final
@dataclass(frozen=True)
class LayerTokens:
    """The real tokens of one MoE layer in one forward, with all that is needed to route points near them.

    Its tensors are on the CPU; `route` and `run` use the device of the model.
    """

    site: MoELayerRef
    call: RouterCall
    tokens: Tensor  # (T,d): inputs of the router
    inputs: Tensor  # (T,d): inputs of the experts; in most families the same
    output: Tensor  # (T,d): weighted sum of the experts' outputs
    rows: Tensor  # (T,): places of the tokens in the batch
    keys: AffineKeys
    k: int
    weights: torch.dtype  # of gate weights, as the experts get them
    batch: AuditBatch
    encoder: TextEncoder | None

    @classmethod
    def of(
        cls, audited: AuditedModel, layer: int, observed: Observation, batch: AuditBatch, encoder: TextEncoder | None = None
    ) -> "LayerTokens":
        """Return the tokens of one layer; raise NoGeometry with the reason if its keys are not affine."""
        call, record, rows = observed.router_calls[layer], observed.layers[layer], observed.real(layer)
        flat = call.tokens.reshape(-1, call.tokens.shape[-1])
        order, k = affine_order(audited.certified(layer), *gate_inputs(call))
        places = rows.cpu()
        return cls(
            audited.moe_layers[layer],
            call,
            tokens=flat[rows].cpu(),
            inputs=record.tokens[rows].cpu(),
            output=record.routed[rows].cpu(),
            rows=places,
            keys=affine_keys(order, flat).rows(places),
            k=k,
            weights=record.weights,
            batch=batch,
            encoder=encoder,
        )

    @property
    def experts(self) -> int:
        return self.keys.experts

    def place(self, token: int) -> TokenPlace:
        """Return where a token is in the data, with the text around it."""
        return token_place(self.batch, int(self.rows[token]), self.encoder)

    @cached_property
    def lengths(self) -> Tensor:
        """The norms (T,) of the tokens."""
        return self.tokens.double().norm(dim=-1)

    @cached_property
    def shared_inputs(self) -> bool:
        """Whether the experts read what the router reads, so that a point moves both."""
        return self.inputs.shape == self.tokens.shape and torch.equal(self.inputs, self.tokens)

    def route(self, points: Tensor, of: Tensor, router: Router | None = None) -> Routing:
        """Route points (M,d), each in the context of the token `of (M,)`; by another router if there is one."""
        points = points.to(self.call.tokens)
        if router is not None:
            found: Routing = router(points.float().unsqueeze(0), Context())
        elif isinstance(self.call.route, Router):
            context = None if self.call.context is None else _context_at(self.call.context, self.rows[of])
            found = route_again(replace(self.call, context=context), points.unsqueeze(0))
        else:
            found = route_again(self.call, points if self.call.tokens.dim() == 2 else points.unsqueeze(0))
        return found.map_tokens(lambda values: values.cpu())

    def run(self, points: Tensor, of: Tensor, router: Router | None = None) -> Tensor:
        """Return the weighted sum (M,d) of the experts' outputs at points (M,d), in float64."""
        routing = self.route(points, of, router)
        inputs = points.to(self.inputs) if self.shared_inputs else self.inputs[of]
        inputs = inputs.to(self.call.tokens.device)
        used = routing.experts < routing.gates.shape[1]  # native experts do not know unused slots, whose weight is 0
        experts, weights = routing.experts.where(used, 0), routing.weights.where(used, 0.0).to(self.weights)
        ran: Tensor = self.site.experts(inputs, experts.to(inputs.device), weights.to(inputs.device))
        return ran.reshape(len(points), -1).cpu().double()

    @property
    def sets(self) -> Tensor:
        """The k experts (T,k) of each token with the largest keys, in the order of their numbers."""
        best = self.keys.logits.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        return best.sort(1).values

    @property
    def most_frequent(self) -> int:
        """The factors that most tokens have."""
        return int(self.keys.index.bincount().argmax())

    def tie_distances(self, orders: tuple[int, ...], chosen: Tensor | None = None) -> tuple[Tensor, bool]:
        """Return the distances (T,M) to the nearest ties of some orders, in shares of each token's norm, and whether all
        are exact. Rows of tokens that are not among `chosen` are left out."""
        found, all_exact = self.lengths.new_zeros(len(self.tokens), len(orders)), True
        for rows, order in self.keys.orders():
            rows = rows if chosen is None else rows[torch.isin(rows, chosen)]
            if len(rows):
                ties = nearest_ties(order, self.tokens[rows], self.k, orders)
                found[rows] = ties.distances / self.lengths[rows].unsqueeze(1)
                all_exact = all_exact and bool(ties.exact.all())
        return (found if chosen is None else found[chosen]), all_exact

    def spread(self, most: int) -> Tensor:
        """Return at most `most` evenly spaced tokens."""
        count = len(self.tokens)
        return torch.arange(count) if count <= most else torch.arange(most) * count // most

    def flips(self) -> FlipPoints:
        """Return the nearest boundary of every token."""
        return nearest_flips(self.keys, self.tokens, self.k)


def _context_at(context: Context, rows: Tensor) -> Context:
    """Return what a router that reads one token at a time may read about these rows of the batch, as one sequence."""

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.reshape(-1)[rows].unsqueeze(0)

    previous = context.previous
    if previous is not None:
        tokens = previous.tokens.reshape(-1, previous.tokens.shape[-1])[rows].unsqueeze(0)
        previous = Previous(tokens, previous.routing.map_tokens(lambda values: values[rows]))
    return Context(
        causal=context.causal, previous=previous, token_ids=pick(context.token_ids), modality=pick(context.modality)
    )


def nearest_jumps(layer: LayerTokens, flips: FlipPoints, router: Router | None = None) -> Jumps:
    """Return the jump of the layer's output at the nearest boundary of every token."""
    every = torch.arange(len(layer.tokens), device=layer.tokens.device)
    return jumps(lambda points: layer.run(points, every, router), flips, dtype=layer.tokens.dtype)


def slice_through(layer: LayerTokens, tokens: tuple[int, int, int], router: Router | None = None) -> Slice:
    """Return the slice through three tokens, around all of them, with the keys of the first."""
    plane = plane_through(*(layer.tokens[token] for token in tokens))
    places = plane.coordinates(layer.tokens[list(tokens)])
    low, high = places.amin(0), places.amax(0)
    return _slice(layer, plane, (low + high) / 2, float((high - low).max()) * 0.7, tokens, router)


def slice_around(layer: LayerTokens, token: int, router: Router | None = None) -> Slice:
    """Return the slice through a token and its projections onto its two nearest boundaries.

    Raise ValueError if there are no two boundaries with different normals.
    """
    projected = nearest_two(layer, token)
    plane = plane_through(layer.tokens[token], *projected)
    projections = plane.coordinates(torch.stack(projected))
    places = torch.cat([torch.zeros_like(projections[:1]), projections])
    centre = places.mean(0)
    size = 1.8 * float((places - centre).norm(dim=-1).max())
    return _slice(layer, plane, centre, size, (token,), router)


def nearest_two(layer: LayerTokens, token: int) -> list[Tensor]:
    """Return the projections (d,) of a token onto its nearest boundary, and onto the next one with another normal."""
    weight, point = layer.keys.order_of(int(layer.keys.index[token])).matrix, layer.tokens[token].double()
    logits = weight @ point + layer.keys.bias
    order = logits.sort(descending=True, stable=True).indices
    inside, outside = torch.cartesian_prod(order[: layer.k], order[layer.k :]).unbind(1)
    normals, gaps = weight[outside] - weight[inside], logits[inside] - logits[outside]
    lengths = normals.norm(dim=1)
    distances, nearest = (gaps / lengths).where(lengths > 0, torch.inf).sort(stable=True)
    if not distances[0].isfinite():
        raise ValueError("all experts of this token have equal weights, so there is no boundary.")
    normals = normals[nearest] / lengths[nearest].unsqueeze(1)
    others = ((normals @ normals[0]).abs() < 1 - 1e-6).nonzero().flatten().tolist()  # not those of equal weights: NaN
    if not others:
        raise ValueError("all boundaries of this token are parallel, so there is no second one.")
    return [point + max(float(distances[place]), 1e-9) * normals[place] for place in (0, others[0])]


def _slice(
    layer: LayerTokens, plane: Plane, centre: Tensor, size: float, tokens: tuple[int, ...], router: Router | None
) -> Slice:
    """Return the slice of a square: exact lines and points, and the sets on a grid, checked by routing every grid point.

    The plane is through these tokens, or through one of them and its boundaries.
    Keys are those of the first token, and coordinates are divided by its norm.
    """
    token = tokens[0]
    order = layer.keys.order_of(int(layer.keys.index[token]))
    keys = PlaneKeys.of(plane, order.matrix, order.bias, layer.k)
    low, high, unit = centre - size, centre + size, float(layer.lengths[token])
    ties, places = slice_ties(keys, low, high), grid(low, high, GRID)
    sets = keys.sets(places).reshape(-1, layer.k)
    known, cells = sets.unique(dim=0, return_inverse=True)
    points, of = plane.points(places.reshape(-1, 2)), torch.full((GRID * GRID,), token)
    routings = [layer.route(points, of, by) for by in ([None] if router is None else [None, router])]
    member = torch.zeros(len(sets), layer.experts, dtype=torch.bool).scatter(1, sets, True)
    extra = [(routing.used.sum(-1) - layer.k).clamp_min(0) for routing in routings]
    marks = (plane.coordinates(layer.tokens[list(tokens)]) / unit).tolist()
    return Slice(
        kind="tokens" if len(tokens) > 1 else "boundaries",
        unit=unit,
        low=(low / unit).tolist(),
        high=(high / unit).tolist(),
        keys=torch.cat([keys.slopes * unit, keys.offsets.unsqueeze(1)], dim=1).tolist(),
        sets=known.tolist(),
        cells=cells.view(GRID, GRID).tolist(),
        lines=_joined(ties.lines.flatten(1) / unit, ties.pairs),
        points=_joined(ties.points / unit, ties.triples),
        disagree=int((member & ~routings[0].chosen.cpu()).any(1).sum()),
        extra=[each.view(GRID, GRID).tolist() if bool(each.any()) else None for each in extra],
        tokens=[Mark(number, x, y, layer.place(number).text) for number, (x, y) in zip(tokens, marks, strict=True)],
    )


def _joined(places: Tensor, experts: Tensor) -> list[list[float]]:
    return [[*place, *tied] for place, tied in zip(places.tolist(), experts.tolist(), strict=True)]


def central_token(layer: LayerTokens, flips: FlipPoints) -> int:
    """Return the token whose distance to its nearest boundary, in shares of its norm, is the median."""
    relative = flips.distances / layer.lengths
    return int((relative - relative.median()).abs().argmin())


def near_boundaries(
    audited: AuditedModel, observed: Observation, batch: AuditBatch, encoder: TextEncoder | None
) -> list[Boundaries]:
    """Return for each layer the share of some tokens near ties of two and of three experts, or the reason why it has none.

    The layer with the most tokens near ties of two experts has a slice as well.
    """
    found: list[Boundaries] = []
    known: dict[int, LayerTokens] = {}
    for layer in range(len(audited.moe_layers)):
        try:
            tokens = LayerTokens.of(audited, layer, observed, batch, encoder)
        except ValueError as reason:  # its ties are not flats
            found.append(Boundaries(str(reason)))
            continue
        if tokens.k == tokens.experts:
            found.append(Boundaries("every token uses every expert."))
            continue
        known[layer] = tokens
        distances, exact = tokens.tie_distances(AUDIT_ORDERS, tokens.spread(MOST_AUDITED))
        shares = [shares_within(of_order, AUDIT_WIDTHS) for of_order in distances.t()]
        orders = [TieOrder(*each) for each in zip(AUDIT_ORDERS, shares, strict=True)]
        found.append(Boundaries(None, len(distances), list(AUDIT_WIDTHS), exact, orders))
    if known:
        worst = max(known, key=lambda layer: (found[layer].orders[0].shares[2], -layer))
        tokens = known[worst]
        try:
            drawn = slice_around(tokens, central_token(tokens, tokens.flips()))
        except ValueError:  # there are no two boundaries with different normals
            return found
        found[worst] = replace(found[worst], slice=drawn)
    return found


def shares_within(distances: Tensor, widths: tuple[float, ...]) -> list[float]:
    """Return the share of `distances (T,)` within each width."""
    return [float((distances <= width).double().mean()) for width in widths]


def output_along_normal(layer: LayerTokens, flips: FlipPoints, token: int, router: Router | None = None) -> Normal:
    """Return the layer's output on the normal through the nearest boundary of a token, for both routers.

    `change` is the output minus that just before the boundary, along the direction of its own jump there (if it is
    continuous, of its change over the whole way), as a share of the output's norm at the token. `largest` is the largest
    difference between two points that are `steps` apart.
    """
    length, distance = float(layer.lengths[token]), float(flips.distances[token])
    reach = max(2 * distance, 1e-3 * length)
    positions = reach * ((torch.arange(ALONG, dtype=torch.float64) + 0.5) / ALONG * 2 - 1)
    size = float(layer.output[token].double().norm()) or 1.0

    def outputs(at: Tensor, by: Router | None) -> Tensor:
        points = flips.points[token] + at.unsqueeze(1).to(flips.points) * flips.normals[token]
        return layer.run(points, torch.full((len(at),), token), by)

    routers = [None] if router is None else [None, router]
    curves = [outputs(positions, by) for by in routers]
    before = curves[0][ALONG // 2 - 1]
    jump = curves[0][ALONG // 2] - before
    whole = curves[0][-1] - curves[0][0]
    along = jump if float(jump.norm()) > 0.05 * float(whole.norm()) else whole
    along = along / along.norm().clamp_min(torch.finfo(torch.float64).tiny)
    starts = reach * (torch.arange(STARTS, dtype=torch.float64) / (STARTS - 1) * 2 - 1)

    def largest(step: float, by: Router | None) -> float:
        first = torch.cat([starts, starts.new_tensor([-step * length / 2])])
        return float((outputs(first + step * length, by) - outputs(first, by)).norm(dim=-1).max()) / size

    return Normal(
        token=token,
        distance=distance / length,
        leaves=int(flips.leaving[token]),
        enters=int(flips.entering[token]),
        positions=(positions / length).tolist(),
        change=[((curve - before) @ along / size).tolist() for curve in curves],
        steps=list(STEPS),
        largest=[[largest(step, by) for step in STEPS] for by in routers],
    )
