"""Perturbations of every kind inside a radius, and whether one of them flips a token."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from certificates.certified_routers import generator
from torch import Tensor

from holdfast.attacks.threat import project
from holdfast.certificates import Certificates, Gate, Norm
from holdfast.certificates.router_conditions import native_keys
from holdfast.kernels.select import top
from holdfast.routing import Context, Router

Sets = Callable[[Tensor], Tensor]  # tokens (..., d) to (T,E) bool


def directions(tokens: Tensor, norm: Norm, count: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield `count` perturbations of length 1 for each token: Gaussian, signs, a single feature, shrinking, growing."""
    source, shape = generator(seed), tokens.shape
    for number in range(count):
        kind = number % 4
        if kind == 0:
            drawn = torch.randn(shape, generator=source, dtype=torch.float64)
        elif kind == 1:
            drawn = torch.randn(shape, generator=source, dtype=torch.float64).sign()
        elif kind == 2:
            index = torch.randint(shape[-1], shape[:-1], generator=source)
            drawn = torch.nn.functional.one_hot(index, shape[-1]).double() * (1 - 2 * (number // 4 % 2))
        else:
            drawn = tokens.double() * (1 if number // 4 % 2 else -1)
        yield unit(drawn, norm)


def unit(rows: Tensor, norm: Norm) -> Tensor:
    """Return the rows normalised to length 1 in the norm."""
    length = rows.norm(dim=-1, keepdim=True) if norm == "l2" else rows.abs().amax(-1, keepdim=True)
    return rows / length.clamp_min(1e-300)


def steepest(slopes: Tensor, norm: Norm) -> Tensor:
    """Return the perturbation of length 1 that reduces a margin with these slopes fastest."""
    return -unit(slopes, norm) if norm == "l2" else -slopes.sign()


def moved(tokens: Tensor, direction: Tensor, radius: Tensor, norm: Norm) -> Tensor:
    """Return tokens perturbed by the radius, rounded to their dtype without leaving it."""
    there = (tokens.double() + direction * radius.unsqueeze(-1)).to(tokens.dtype)
    rows, width = radius.flatten(), tokens.shape[-1]
    return project(there.reshape(-1, width), tokens.reshape(-1, width), rows, norm).view(tokens.shape)


def finite(radius: Tensor, tokens: Tensor) -> Tensor:
    """Return finite radii: an infinite one is probed at a hundred times the token's size."""
    return radius.minimum(100 * (tokens.double().abs().amax(-1) + 1))


def probe(sets: Sets, tokens: Tensor, radius: Tensor, norm: Norm, tries: Iterable[Tensor]) -> tuple[int, int]:
    """Return the number of pairs of a token and a perturbation within its radius, and how many of them flipped."""
    with torch.no_grad():
        clean = sets(tokens)
        tried, changed, radius = 0, 0, finite(radius, tokens)
        for direction in tries:
            there = moved(tokens, direction, radius, norm)
            tried += int((there != tokens).any(-1).sum())
            changed += int((sets(there) != clean).any(-1).sum())
    return tried, changed


def require_sound(
    sets: Sets, keys: Callable[[Tensor], Tensor], tokens: Tensor, found: Certificates, count: int, least: float
) -> None:
    """Fail if a perturbation within the radius flips a token, or if fewer than `least` pairs of both were tried.

    Perturbations are those along the slopes of `keys`, in which margins are measured, and `count` others.
    """
    normal = steepest(slopes(keys, tokens, found), found.norm)
    tries = chain([normal, -normal], directions(tokens, found.norm, count))
    tried, changed = probe(sets, tokens, found.radius, found.norm, tries)
    assert tried > least and changed == 0


def share_of_search(sets: Sets, tokens: Tensor, found: Certificates) -> float:
    """Return the median share of the distances, of tokens (T,2), that a search of the plane finds; fail if one is larger."""
    shares = []
    for x, distance in zip(tokens, found.distance.flatten().tolist(), strict=True):
        line = torch.linspace(-3 * distance, 3 * distance, 201, dtype=torch.float64)
        offsets = torch.cat([torch.zeros(1, 2, dtype=torch.float64), torch.cartesian_prod(line, line)])
        lengths = offsets.norm(dim=1) if found.norm == "l2" else offsets.abs().amax(1)
        chosen = sets((x.double() + offsets).float())
        other = lengths[(chosen != chosen[0]).any(1)]
        if len(other):
            assert distance <= float(other.min()) * 1.0001
            shares.append(distance / float(other.min()))
    return sorted(shares)[len(shares) // 2]


def sets_of(router: Router, context: Context | None = None) -> Sets:
    """Return a function to the selected sets of a router, or to those that are certified: its `core` best experts."""
    core = router.select.declares.core

    def sets(tokens: Tensor) -> Tensor:
        routing = router(tokens, context)
        if core is None:
            return routing.chosen
        keys = routing.gates if router.informers else routing.logits
        return torch.zeros_like(routing.chosen).scatter(1, top(keys, core), True)

    return sets


def native(gate: Gate, dtype: torch.dtype = torch.float32) -> Sets:
    """Return a function to the sets of a gate as transformers computes them, with scores in `dtype`."""

    def sets(tokens: Tensor) -> Tensor:
        bias = None if gate.bias is None else gate.bias.to(dtype)
        rows = tokens.reshape(-1, tokens.shape[-1]).to(dtype)
        logits = torch.nn.functional.linear(rows, gate.weight.to(dtype), bias).float()
        sorted_by = logits.softmax(-1) if gate.rule is None else native_keys(gate.rule, logits)
        return torch.zeros_like(logits, dtype=torch.bool).scatter(1, top(sorted_by, gate.k), True)

    return sets


def slopes(keys: Callable[[Tensor], Tensor], tokens: Tensor, found: Certificates) -> Tensor:
    """Return the gradient at each token of the margin of its closest pair: one key minus the other, 0 for a threshold."""
    rows = tokens.detach().clone().requires_grad_()
    with torch.enable_grad():
        table = torch.nn.functional.pad(keys(rows).double(), (0, 1))
        pair = found.pair.reshape(-1, 2)
        margin = table.gather(1, pair[:, :1]) - table.gather(1, pair[:, 1:])
        (slope,) = torch.autograd.grad(margin.sum(), rows)
    return slope.double()
