"""Routers whose tokens share their gates (similarity, attention posterior): every token of a sequence may move.

g_i = sum_j W_ij p_j A^T, W a distribution over the tokens of a sequence. With c = a_i - a_j and all tokens moved by up to r:

    |change of g_i - g_j| <= range(c) (max_j tanh(r D_j / 4) + strength tanh(delta(r) / 2))

since a softmax whose logit differences change by at most 2 t moves by at most tanh(t / 2) in total variation. D_j is the
largest |w_e - w_f|_* at token j. delta is 0 where W comes from the attention before the router, which a move of the router's
input leaves as it is; where it comes from the tokens themselves, u_i.u_j / tau changes by delta, at most
(r |u_i| + r |u_j| + r^2) / tau in l2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.certificates.arithmetic import Arithmetic, gamma, unit
from holdfast.certificates.pairs import Pairs
from holdfast.certificates.planes import SOFTMAX_ROUNDINGS
from holdfast.certificates.problem import Nearest, Problem, largest, least
from holdfast.certificates.scoring import NoBound, Scoring
from holdfast.routing import AttentionPosterior, Context, Informer, Similarity
from holdfast.routing.bounds import ABOVE, Norm, dual, stretch

TINY = torch.finfo(torch.float64).tiny
FARTHEST = 2.0**20  # times the longest token: an upper end for bisection


@dataclass(frozen=True)
class Mixing:
    """How the tokens (B,N) of a sequence inform each other."""

    strength: float
    real: Tensor  # (B,N) bool
    moving: "Moving | None"  # where W depends on the tokens themselves

    def over_sequence(self, values: Tensor) -> Tensor:
        """(T,): the largest of `values (T,)` among the real tokens of each one's sequence."""
        table = values.view(self.real.shape).where(self.real, 0.0)
        return table.amax(1, keepdim=True).expand_as(table).reshape(-1)


@dataclass(frozen=True)
class Moving:
    """u = R x and the change of u_i.u_j / tau."""

    lengths: Tensor  # (T,) of u, in the dual norm
    longest: Tensor  # (T,) of u in the token's sequence
    sizes: Tensor  # (T,), of |R| |x|, for rounding; at least as long as u
    speed: float  # how far u moves for each unit of x
    width: float  # what r^2 is multiplied with
    terms: int
    tau: float

    def change(self, radius: Tensor, rounded: bool, largest_size: Tensor) -> Tensor:
        far = radius * self.speed
        change = far * (self.lengths + self.longest) + self.width * far.square()
        if rounded:  # before and after
            growth = far * self.width
            error = gamma(self.terms, unit(torch.float32))
            change = change + 2 * error * (self.sizes + growth) * (largest_size + growth)
        return change / self.tau


def read_mixing(informer: Informer, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
    """Of an informer on the token side, at tokens (B,N,d)."""
    real = context.real_or_all(tokens)
    if isinstance(informer, AttentionPosterior):
        return Mixing(informer.strength, real, None)
    if not isinstance(informer, Similarity):
        raise NoBound(f"nothing is known about the token-side informer {type(informer).__name__}")
    still = Mixing(informer.strength, real, None)
    if context.attention is not None:
        return still
    rows = tokens.reshape(-1, tokens.shape[-1]).double()
    width = rows.shape[1]
    if informer.reduce is None:
        lengths = sizes = dual(rows, norm)
        speed, squared, terms = 1.0, 1.0 if norm == "l2" else float(width), width + 8
    else:
        reduce = informer.reduce.detach().double()
        lengths, sizes = (rows @ reduce.t()).norm(dim=-1), (rows.abs() @ reduce.abs().t()).norm(dim=-1)
        speed, squared, terms = stretch(reduce.abs(), norm), 1.0, 2 * width + len(reduce) + 8
    moving = Moving(lengths, still.over_sequence(lengths), sizes, speed, squared, terms, informer.tau)
    return Mixing(informer.strength, real, moving)


class Mixed(Problem):
    """keys (T,E+1): the router's own gates, and the threshold of nobody. graph (E+1,E): rows that gates are made with."""

    def __init__(self, scoring: Scoring, pairs: Pairs, chosen: Tensor, keys: Tensor, graph: Tensor, mixing: Mixing) -> None:
        ahead, behind = pairs.sums(keys)
        super().__init__(scoring, pairs, chosen, ahead - behind)
        self.graph, self.mixing = graph, mixing
        # Of the token that is easiest to move.
        self.speed = mixing.over_sequence(scoring.values.diameters) * ABOVE
        self.pace = mixing.over_sequence(scoring.pace)
        self.ranges = torch.stack([(graph - row).amax(1) - (graph - row).amin(1) for row in graph]) * ABOVE  # (E+1,E+1)

    def errors(self, arithmetic: Arithmetic, reach: Tensor) -> Tensor:
        return self.spread(self.scoring.value_errors(arithmetic, self.mixing.over_sequence(reach)))

    def spread(self, errors: Tensor) -> Tensor:
        """(T,1): of the worst logit of the sequence."""
        return self.mixing.over_sequence(errors.amax(1)).unsqueeze(1)

    def outward(self, radius: Tensor) -> Tensor:
        return radius

    def radii(self, errors: Tensor | None) -> Tensor:
        """(T,M): by how much, relative to the most there is, each condition may lose. Not yet radii."""
        ahead, behind = (side[..., 0] for side in self.pairs[:2])
        margins, ranges = self.margins, self.ranges[ahead, behind]
        if errors is not None:  # once in the gates that margins were read from, once at the moved tokens
            roundings = SOFTMAX_ROUNDINGS + 3 * self.graph.shape[0] + 2 * self.mixing.real.shape[1]
            largest_gates = self.graph.amax(1)
            rounded = torch.tensor(roundings * unit(torch.float32)).expm1() * (largest_gates[ahead] + largest_gates[behind])
            margins = margins - 2 * (ranges * torch.tanh(errors / 2) + rounded) - 1e-30
        never = (margins > 0) | ((margins == 0) & self.pairs.ties_hold)
        return (margins / ranges.clamp_min(TINY)).where(ranges > 0, torch.where(never, torch.inf, 0.0))

    def nearest(self, errors: Tensor | None) -> Nearest:
        shares, which = least(self.radii(errors), self.pairs)
        moving = self.mixing.moving
        largest_size = None if moving is None else self.mixing.over_sequence(moving.sizes)

        def holds(radius: Tensor) -> Tensor:
            drift = torch.tanh(self.scoring.moved(radius * self.pace) * self.speed / 4)
            if moving is not None and largest_size is not None:
                change = moving.change(radius, errors is not None, largest_size)
                drift = drift + self.mixing.strength * torch.tanh(change / 2)
            return drift < shares

        return Nearest(largest(holds, self._farthest(), steps=60).where(shares < torch.inf, torch.inf), which)

    def _farthest(self) -> Tensor:
        longest = self.mixing.over_sequence(self.scoring.planes.points.norm(dim=-1))
        return FARTHEST * (longest + 1)
