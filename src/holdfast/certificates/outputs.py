"""How much the output of one MoE layer can change if its input token moves by up to r in l2.

    y(x) = s sum_e g_e(x) f_e(x) + f_shared(x),  weights g that sum to 1

    |y(x') - y(x)| <= s (TV max over e, f in R of |f_e(x) - f_f(x)| + M) + M_shared
    M = min(max over R of M_e,  sum_e g_e(x) M_e + TV (max over R of M_e - min over R of M_e))

because y(x') - y(x) = s sum_e (g'_e - g_e) f_e(x) + s sum_e g'_e (f_e(x') - f_e(x)) + the change of the shared expert, and
the differences g' - g sum to 0. R are the experts that can be in use anywhere in the ball and TV is how much of the weights
can move (`weight_change`), M_e is how far an expert's output can move. If the weights sum to less than 1, a
function that is 0 has the rest: it belongs to R, with M = 0. If every weight moves by itself (sigmoids or ReLUs that are not
divided by their sum), the bound in brackets is sum_e (the largest |g'_e - g_e|) |f_e(x)| + sum_e (the largest g'_e) M_e.

**How far the output of a feed-forward network can move** when its input moves by up to r (`Networks`):

    plain   f(x) = W2 act(W1 x + b1) + b2               M = |W2| L |W1| r
    gated   f(x) = Wd (act(Wg x + bg) * (Wu x + bu))    M = |Wd| |v|, the smaller of two bounds of |v|:

    v_q = L r |g_q| (|b_q| + r |u_q|) + |a_q| r |u_q|
    |v| <= L r |Wg| (max_q |b_q| + r max_q |u_q|) + max_q |a_q| r |Wu|

L is the steepest slope of act, |W| a spectral norm, g_q and u_q the rows of Wg and Wu, b = Wu x + bu and a = act(Wg x + bg).
Both follow from a'b' - ab = (a' - a) b' + a (b' - b). The first bounds each hidden unit by itself, the second, which is
smaller in wide networks, all of them together. A network may be multiplied by a number of its own, s = sigmoid(w x), as the
shared expert of Qwen2-MoE is: then

    M_s = min(1, s + r |w| / 4) M + r |w| / 4 |f(x)|

The bound is for the layer in real numbers, with the weights that it has. It is computed in float64, which holds 16-bit and
float32 weights exactly, and its own rounding is added. What float32 or bfloat16 rounds in a forward is not included.

T tokens, E networks, d width, h hidden width
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, final

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic
from holdfast.certificates.certificates import Json, TokenRecord
from holdfast.certificates.radii import certify_described, describe
from holdfast.certificates.router_conditions import CertifiedRouter, Gate
from holdfast.certificates.weight_change import WeightChange, declared_shares
from holdfast.routing import Context, Router
from holdfast.routing.bounds import ABOVE
from holdfast.routing.declarations import NoCertificate, best


@final
@dataclass(frozen=True)
class Networks:
    """E feed-forward networks, as in `holdfast.Experts`."""

    up: Tensor  # (E,h,d); gated: (E,2h,d), the rows of Wg before those of Wu
    down: Tensor  # (E,d,h)
    activation: Callable[[Tensor], Tensor]
    slope: float  # the steepest slope of the activation
    gated: bool
    up_bias: Tensor | None = None  # (E,h) or (E,2h)
    down_bias: Tensor | None = None  # (E,d)
    switch: Tensor | None = None  # (d,), w; None: outputs are not multiplied by s

    @cached_property
    def norms(self) -> list[tuple[float, ...]]:
        """Return the spectral norms of each network: of W1 and W2, or of Wg, Wu and Wd."""
        return [
            tuple(
                float(torch.linalg.matrix_norm(matrix, ord=2)) * ABOVE
                for matrix in (*up.double().chunk(2 if self.gated else 1), down.double())
            )
            for up, down in zip(self.up.detach(), self.down.detach(), strict=True)
        ]

    @torch.no_grad()
    def at(self, tokens: Tensor) -> "NetworksAtTokens":
        """Evaluate the networks at `tokens (T,d)`, one network after the other."""
        tokens = tokens.double()
        each = [self._one(number, tokens) for number in range(len(self.up))]
        outputs, moves = (torch.stack(parts, dim=1) for parts in zip(*each, strict=True))
        if self.switch is None:
            return NetworksAtTokens(outputs, moves)
        weight = self.switch.detach().to(tokens)
        opened = torch.sigmoid(tokens @ weight).unsqueeze(1)
        return NetworksAtTokens(
            outputs * opened.unsqueeze(-1), moves, opened, float(weight.norm()) / 4, outputs.norm(dim=-1)
        )

    def _one(self, number: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (T,d) of one network, and the coefficients (T,5) of its move: see `NetworksAtTokens`."""
        up, down = self.up[number].detach().to(tokens), self.down[number].detach().to(tokens)
        hidden = tokens @ up.t()
        hidden = hidden if self.up_bias is None else hidden + self.up_bias[number].detach().to(tokens)
        norms, zeros = self.norms[number], torch.zeros_like(tokens[:, 0])
        if not self.gated:
            outputs = self.activation(hidden) @ down.t()
            together = torch.full_like(zeros, self.slope * norms[0] * norms[1])
            coefficients = [zeros + torch.inf, zeros, zeros, together, zeros]
        else:
            (wg, wu), (before, b) = up.chunk(2), hidden.chunk(2, dim=-1)
            a = self.activation(before)
            outputs = (a * b) @ down.t()
            of_g, of_u = wg.norm(dim=1), wu.norm(dim=1)
            first, second = self.slope * of_g * b.abs() + of_u * a.abs(), self.slope * of_g * of_u
            by_unit = [first.square().sum(-1), 2 * (first * second).sum(-1), second.square().sum().expand_as(zeros)]
            largest_b, largest_a = (values.abs().amax(-1) for values in (b, a))
            together = self.slope * norms[0] * largest_b + norms[1] * largest_a
            again = (self.slope * norms[0] * of_u.max()).expand_as(zeros)
            coefficients = [norms[2] ** 2 * part for part in by_unit] + [norms[2] * together, norms[2] * again]
        outputs = outputs if self.down_bias is None else outputs + self.down_bias[number].detach().to(tokens)
        return outputs, torch.stack(coefficients, dim=-1)


@final
@dataclass(frozen=True)
class NetworksAtTokens:
    """The outputs of E networks at T tokens, and bounds of how far they move.

    outputs  (T,E,d), multiplied by s if there is one
    moves    (T,E,5): M is the smaller of r sqrt(c_0 + c_1 r + c_2 r^2) and r (c_3 + c_4 r)
    opened   (T,1): s; `speed` is |w| / 4, and `lengths (T,E)` are the norms of f(x) without s
    """

    outputs: Tensor
    moves: Tensor
    opened: Tensor | None = None
    speed: float = 0.0
    lengths: Tensor | None = None

    def move(self, radius: Tensor) -> Tensor:
        """Return an upper bound M (T,E) of the change of each output, for inputs that move by up to `radius (T,)`."""
        far = radius.unsqueeze(1)
        zero, one, two, three, four = self.moves.unbind(-1)
        alone = far * (zero + one * far + two * far.square()).sqrt()
        bound = alone.nan_to_num(nan=torch.inf).minimum(far * (three + four * far))
        if self.opened is not None and self.lengths is not None:
            turn = self.speed * far
            bound = (self.opened + turn).clamp_max(1) * bound + turn.clamp_max(1) * self.lengths
        return bound * ABOVE


MOST_ELEMENTS = 2**22  # of the largest tensor; more tokens are processed in several steps
WRONG_WEIGHT = 1e-3  # a larger difference of a declared and a computed weight is neither rounding of it nor of logits
OTHER_OUTPUT = 0.05  # a larger difference, relative to an output's length and as a median over tokens, is not rounding
CHANGES = (0.01, 0.1, 0.5, 1.0)  # relative changes of which `summary` says the share of tokens


@final
@dataclass(frozen=True)
class LayerParts:
    """What computes the output of an MoE layer. `scale` is what weights are multiplied by."""

    router: Router | Gate
    experts: Networks
    shared: Networks | None = None  # one network that every token uses
    scale: float = 1.0


class LayerWithParts(Protocol):
    """A layer that declares its parts, as `holdfast.MoE` does."""

    def output_parts(self) -> LayerParts: ...

    def __call__(self, tokens: Tensor, context: Context | None = None) -> tuple[Tensor, Any]: ...


@final
@dataclass(frozen=True)
class OutputCertificate(TokenRecord):
    """For each token and radius, how much the output of a layer changes at most. (...) are the dimensions of tokens."""

    tensors = ("radii", "bound", "change", "reach", "lengths", "real")
    radii: Tensor  # (...,R) float64: largest perturbations, in l2
    bound: Tensor  # (...,R) float64: the largest change of the output, in l2
    change: Tensor  # (...,R) float64: TV, how much of the weights can move: a bound of half the sum of |g' - g|
    reach: Tensor  # (...,R,E) bool: the experts that can be in use
    lengths: Tensor  # (...) float64: |y(x)|
    real: Tensor  # (...) bool: False for padding
    given: tuple[float, ...]  # the radii as passed
    relative: bool  # whether these are multiples of each token's own length

    def share(self, change: float) -> list[float]:
        """Return for each radius the share of real tokens whose output changes by at most `change` times its length."""
        good = (self.bound <= change * self.lengths.unsqueeze(-1))[self.real]
        return [float(one) for one in good.double().mean(0)] if len(good) else [0.0 for _ in self.given]

    def summary(self) -> dict[str, Json]:
        """Return what to store with a result: for each radius the medians over real tokens, and shares of tokens."""
        relative = (self.bound / self.lengths.unsqueeze(-1))[self.real].nan_to_num(nan=0.0, posinf=torch.inf)
        shares = {f"{level:g}": self.share(level) for level in CHANGES}
        rows: list[Json] = [
            {
                "radius": radius,
                "relative_change": _median(relative[:, place]),
                "weight_change": _median(self.change[self.real][:, place]),
                "experts": _median(self.reach[self.real][:, place].sum(-1)),
                "share_at": {level: found[place] for level, found in shares.items()},
            }
            for place, radius in enumerate(self.given)
        ]
        return {"tokens": int(self.real.sum()), "relative": self.relative, "radii": rows}


@torch.no_grad()
def certify_output(
    layer: LayerParts | LayerWithParts,
    tokens: Tensor,
    radii: Sequence[float],
    context: Context | None = None,
    *,
    relative: bool = False,
) -> OutputCertificate:
    """Bound the change of a layer's output for every perturbation of up to each of `radii`, in l2, of each token.

    layer     a `holdfast.MoE` in evaluation mode, or the parts of a layer
    tokens    (B,N,d) or (T,d), the layer's input
    context   the context that the router is called with; it is not perturbed
    relative  radii are multiples of each token's own length

    Raise NoCertificate, with the reason, if a part of the layer does not declare what the bound needs.

    Example:
        found = certify_output(layer, tokens, [0.01, 0.1], relative=True)
        found.share(0.5)  # for each radius, the share of tokens whose output changes by at most half of its length
    """
    parts = layer if isinstance(layer, LayerParts) else layer.output_parts()
    given = tuple(float(radius) for radius in radii)
    if not given or not all(0 <= radius < float("inf") for radius in given):
        raise ValueError(f"radii are {list(given)}; expected at least one finite number, none of them negative.")
    if isinstance(parts.router, Router) and parts.router.select.layer_kind != "moe":
        raise NoCertificate(f"with {type(parts.router.select).__name__} every token uses every expert.")
    described = describe(parts.router, tokens, context, "l2")
    shares = declared_shares(described)
    arithmetic = Arithmetic.of(torch.float32) if isinstance(parts.router, Router) else None
    found = certify_described(described, described.real.shape, "l2", arithmetic)
    sets = torch.cat([problem.conditions.chosen for _, problem in described.problems()]) if described.real.numel() else None
    computed = None
    if isinstance(parts.router, Router):
        assert arithmetic is not None
        batch = tokens.detach().unsqueeze(0) if tokens.dim() == 2 else tokens.detach()
        routing = parts.router(batch, context)
        computed = routing.dense_weights / parts.router.scale
        sets = routing.chosen if shares.equal else sets
        steepest = 1 + (shares.slope if shares.width > 0 else 0.0)  # how fast a weight can follow a logit, or a gap
        errors = 2 * steepest * described.scoring.value_errors(arithmetic, None).amax(1)
        allowed = WRONG_WEIGHT * computed.abs().amax(1).clamp_min(1) + errors
    rows = tokens.detach().reshape(-1, tokens.shape[-1]).where(described.real.view(-1, 1), 0.0).double()
    lengths = rows.norm(dim=1) if relative else torch.ones_like(rows[:, 0])
    limits = torch.tensor(given, dtype=torch.float64, device=rows.device) * lengths.unsqueeze(1)
    if sets is None:
        return _empty(described, limits, tokens.shape[:-1], given, relative)
    distance, sure = found.distance.flatten(), found.radius.flatten() > 0
    results = []
    for part in torch.arange(len(rows), device=rows.device).split(_at_a_time(parts)):
        at = slice(int(part[0]), int(part[-1]) + 1)
        moving = WeightChange(_rows(described, at), shares, distance[at], sets[at])
        if shares.best is not None:
            moving = replace(moving, chosen=best(moving.keys, shares.best))
        if computed is not None:
            apart = (moving.mass * moving.weights - computed[at]).abs().amax(1)
            wrong = (apart > allowed[at]) & sure[at] & described.real.flatten()[at]
            if wrong.any():
                how = f"{int(wrong.sum())} tokens have other weights than the router's parts declare, beyond rounding error"
                raise ValueError(f"{how}; a router with wrong declarations cannot be certified.")
        results.append(_bounds(parts, moving, rows[at], limits[at]))
    shape = tokens.shape[:-1]
    bound, change, reach, outputs = (torch.cat(each) for each in zip(*results, strict=True))
    if not isinstance(layer, LayerParts):
        _require_output(layer, tokens, context, outputs, described.real.flatten())
    return OutputCertificate(
        limits.view(*shape, -1),
        bound.view(*shape, -1),
        change.view(*shape, -1),
        reach.view(*shape, *reach.shape[1:]),
        outputs.norm(dim=1).view(shape),
        described.real.view(shape),
        given,
        relative,
    )


def _median(values: Tensor) -> float | None:
    """Return the median; None instead of infinity, which JSON does not have, and if there are no values."""
    median = float(values.double().median()) if len(values) else float("inf")
    return median if median < float("inf") else None


def _bounds(parts: LayerParts, moving: WeightChange, rows: Tensor, limits: Tensor) -> tuple[Tensor, ...]:
    """Return the bounds (T,R), TV (T,R), R (T,R,E) and the outputs (T,d) of some tokens."""
    experts = parts.experts.at(rows)
    shared = None if parts.shared is None else parts.shared.at(rows)
    apart = torch.cdist(experts.outputs, experts.outputs, compute_mode="donot_use_mm_for_euclid_dist")  # (T,E,E)
    alone, scale = experts.outputs.norm(dim=-1), abs(parts.scale) * moving.mass
    bounds, changes, reaches = [], [], []
    for radius in limits.unbind(1):
        moves = experts.move(radius)
        if moving.alone:
            reach, each, largest = moving.each(radius)
            bound, change = scale * ((each * alone).sum(1) + (largest * moves).sum(1)), each.sum(1) / 2
        else:
            reach, share = moving.within(radius)
            widest = (apart * (reach.unsqueeze(1) & reach.unsqueeze(2))).flatten(1).amax(1)
            farthest, nearest = (moves * reach).amax(1), moves.where(reach, torch.inf).amin(1)
            if moving.of_all:
                widest, nearest = widest.maximum((alone * reach).amax(1)), torch.zeros_like(nearest)
            move = farthest.minimum((moving.weights * moves).sum(1) + share * (farthest - nearest))
            bound, change = scale * (share * widest + move), moving.mass * share
        bounds.append((bound if shared is None else bound + shared.move(radius).squeeze(1)) * ABOVE)
        changes.append(change)
        reaches.append(reach)
    outputs = parts.scale * moving.mass * (moving.weights.unsqueeze(-1) * experts.outputs).sum(1)
    outputs = outputs if shared is None else outputs + shared.outputs.squeeze(1)
    return torch.stack(bounds, 1), torch.stack(changes, 1), torch.stack(reaches, 1), outputs


def _require_output(layer: LayerWithParts, tokens: Tensor, context: Context | None, declared: Tensor, real: Tensor) -> None:
    """Raise NoCertificate if a layer computes something else than its parts, as classes of one's own or hooks may."""
    computed = layer(tokens.detach(), context)[0].flatten(0, -2).double()
    apart = ((computed - declared).norm(dim=1) / declared.norm(dim=1))[real].nan_to_num(nan=0.0)
    if len(apart) and bool(apart.median() > OTHER_OUTPUT):
        computes = "its output is not that of its router, its experts and a shared expert"
        raise NoCertificate(f"no bound of the output is known for this {type(layer).__name__}: {computes}")


def _at_a_time(parts: LayerParts) -> int:
    """Return how many tokens are processed together."""
    count, inner, width = parts.experts.up.shape
    return max(1, MOST_ELEMENTS // max(count * count, count * width, inner))


def _rows(described: CertifiedRouter, at: slice) -> CertifiedRouter:
    return replace(described, scoring=described.scoring.rows(at), gates=None, chosen=None)


def _empty(
    described: CertifiedRouter, limits: Tensor, shape: torch.Size, given: tuple[float, ...], relative: bool
) -> OutputCertificate:
    none, experts = limits.view(*shape, len(given)), described.scoring.planes.experts
    reach = torch.zeros(*shape, len(given), experts, dtype=torch.bool, device=limits.device)
    return OutputCertificate(none, none, none, reach, limits.new_zeros(shape), described.real.view(shape), given, relative)
