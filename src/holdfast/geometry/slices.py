"""Planar slices through the token space of a router with affine keys: cells, order-1 lines and order-2 points.

A router selects the k largest keys l(x) = W x + b. In the plane x = origin + u_1 e_1 + u_2 e_2 the keys are affine in u, so

    a cell           is a convex polygon with one selected set
    an order-1 line  has two equal keys l_i = l_j and exactly k - 1 keys above them: the selected set changes across it
    an order-2 point has three equal keys, and k - 2 or k - 1 keys above them: two order-1 lines or more end there

Lines and points are computed exactly from the keys, not from a grid of points.

d width of a token, E experts, L lines, P points, G grid points on each side
"""

from dataclasses import dataclass
from itertools import combinations
from typing import final

import torch
from torch import Tensor

PARALLEL = 1e-9  # relative length below which two directions count as one


@final
@dataclass(frozen=True)
class Plane:
    """A plane in token space: x = origin + u basis."""

    origin: Tensor  # (d,) float64
    basis: Tensor  # (2,d) float64, orthonormal

    def points(self, coordinates: Tensor) -> Tensor:
        """Return the points (..., d) with these coordinates (..., 2)."""
        return self.origin + coordinates.to(self.basis) @ self.basis

    def coordinates(self, points: Tensor) -> Tensor:
        """Return the coordinates (..., 2) of the orthogonal projections of points (..., d) onto the plane."""
        return (points.to(self.origin) - self.origin) @ self.basis.t()


def plane_through(origin: Tensor, one: Tensor, two: Tensor) -> Plane:
    """Return the plane through three points (d,). The first axis points from `origin` to `one`.

    Raise ValueError if the three points lie on one line.
    """
    start = origin.detach().double()
    first, second = one.detach().double() - start, two.detach().double() - start
    longest = max(float(first.norm()), float(second.norm()))
    across = first / first.norm().clamp_min(torch.finfo(torch.float64).tiny)
    rest = second - (second @ across) * across
    if not min(float(first.norm()), float(rest.norm())) > PARALLEL * longest:
        raise ValueError("the three points lie on one line, so they span no plane; choose other points.")
    return Plane(start, torch.stack([across, rest / rest.norm()]))


@final
@dataclass(frozen=True)
class PlaneKeys:
    """The keys of a router in a plane, l(u) = slopes u + offsets, of which the k largest are selected."""

    slopes: Tensor  # (E,2) float64
    offsets: Tensor  # (E,) float64
    k: int

    @classmethod
    def of(cls, plane: Plane, weight: Tensor, bias: Tensor | None, k: int) -> "PlaneKeys":
        """Restrict the keys W x + b to a plane; `weight (E,d)`, `bias (E,)`."""
        weight = weight.detach().double()
        if not 0 < k < len(weight):
            raise ValueError(f"k is {k} of {len(weight)} experts; ties at the threshold exist only for k from 1 to E - 1.")
        offsets = weight @ plane.origin + (0 if bias is None else bias.detach().double())
        return cls(weight @ plane.basis.t(), offsets, k)

    def at(self, coordinates: Tensor) -> Tensor:
        """Return the keys (..., E) at coordinates (..., 2)."""
        return coordinates.to(self.slopes) @ self.slopes.t() + self.offsets

    def sets(self, coordinates: Tensor) -> Tensor:
        """Return the selected sets (..., k) at coordinates (..., 2), sorted by index; ties go to the lower index."""
        best = self.at(coordinates).sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        return best.sort(dim=-1).values


@final
@dataclass(frozen=True)
class SliceTies:
    """The ties at the threshold inside a rectangle of a plane."""

    lines: Tensor  # (L,2,2): both ends of each order-1 line
    pairs: Tensor  # (L,2): the two experts that tie on it
    points: Tensor  # (P,2): order-2 points
    triples: Tensor  # (P,3): the three experts that tie there, sorted


def slice_ties(keys: PlaneKeys, low: Tensor, high: Tensor) -> SliceTies:
    """Return the order-1 lines and order-2 points inside the rectangle from corner `low (2,)` to corner `high (2,)`.

    Each pair of experts has a line of equal keys. Along it the number of keys above changes by one where a third expert
    crosses. The parts with k - 1 keys above are the order-1 lines, and their ends inside the rectangle the order-2 points.
    """
    experts = len(keys.slopes)
    pairs = torch.tensor(list(combinations(range(experts), 2))).reshape(-1, 2)
    normals = keys.slopes[pairs[:, 0]] - keys.slopes[pairs[:, 1]]
    gaps = keys.offsets[pairs[:, 0]] - keys.offsets[pairs[:, 1]]
    lengths = normals.norm(dim=-1)
    crossing = lengths > PARALLEL * keys.slopes.norm(dim=-1).max()
    pairs, normals, gaps, lengths = (each[crossing] for each in (pairs, normals, gaps, lengths))
    starts = -(gaps / lengths.square()).unsqueeze(1) * normals  # the point of each line that is nearest to the origin
    along = torch.stack([-normals[:, 1], normals[:, 0]], dim=1) / lengths.unsqueeze(1)
    first, last = _clip(starts, along, low.to(starts), high.to(starts))
    inside = first < last
    pairs, starts, along, first, last = (each[inside] for each in (pairs, starts, along, first, last))

    # l_e - l_i along each line is offsets + rates t, for every expert e
    rates = along @ keys.slopes.t()
    rates = rates - rates.gather(1, pairs[:, :1])
    offsets = keys.at(starts)
    offsets = offsets - offsets.gather(1, pairs[:, :1])
    third = torch.ones_like(rates, dtype=torch.bool).scatter(1, pairs, False)
    times = (-offsets / rates).where(third & (rates != 0), torch.inf)
    above = ((offsets + first.unsqueeze(1) * rates > 0) & third).sum(1, keepdim=True)
    times = times.where((times > first.unsqueeze(1)) & (times < last.unsqueeze(1)), torch.inf)
    times, order = times.sort(dim=1)
    change = rates.sign().gather(1, order).where(times.isfinite(), 0.0)
    counts = torch.cat([above, above + change.cumsum(1).long()], dim=1)  # keys above, in each part of the line
    edges = torch.cat([first.unsqueeze(1), times.minimum(last.unsqueeze(1)), last.unsqueeze(1)], dim=1)
    tied = (counts == keys.k - 1) & (edges[:, :-1] < edges[:, 1:])

    line, part = tied.nonzero(as_tuple=True)
    ends = torch.stack([edges[line, part], edges[line, part + 1]], dim=1)
    lines = starts[line].unsqueeze(1) + ends.unsqueeze(2) * along[line].unsqueeze(1)

    # The ends of order-1 lines that are not on the edge of the rectangle, each once.
    points: dict[tuple[int, ...], Tensor] = {}
    for place, (row, index) in enumerate(zip(line.tolist(), part.tolist(), strict=True)):
        for end, crossing in ((0, index - 1), (1, index)):
            if 0 <= crossing < times.shape[1] and bool(times[row, crossing].isfinite()):
                triple = tuple(sorted([*pairs[row].tolist(), int(order[row, crossing])]))
                points.setdefault(triple, lines[place, end])
    triples = torch.tensor(list(points), dtype=torch.int64).view(-1, 3)
    return SliceTies(lines, pairs[line], torch.cat([lines.new_zeros(0), *points.values()]).view(-1, 2), triples)


def _clip(starts: Tensor, along: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parameters (L,) at which lines enter and leave a rectangle; the first is larger if a line misses it."""
    one, two = (low - starts) / along, (high - starts) / along
    outside = (along == 0) & ((starts < low) | (starts > high))
    enter = torch.minimum(one, two).where(along != 0, -torch.inf).where(~outside, torch.inf)
    leave = torch.maximum(one, two).where(along != 0, torch.inf).where(~outside, -torch.inf)
    return enter.amax(1), leave.amin(1)


def grid(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Return coordinates (G,G,2) of evenly spaced points, the centres of `count` x `count` equal parts of a rectangle.

    The first index follows the second axis of the plane, as the rows of a picture do.
    """
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    across, up = (low[axis] + (high[axis] - low[axis]) * shares for axis in (0, 1))
    return torch.stack(torch.meshgrid(across, up, indexing="xy"), dim=-1)
