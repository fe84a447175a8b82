"""Comparisons of the kernels of experts with the naive mathematics; test_comparisons.py has a case for each."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from holdfast.kernels import balance
from holdfast.kernels.balance import triton as balance_triton
from holdfast.kernels.finite import decode_name, encode_name
from holdfast.kernels.finite import triton as finite_triton
from holdfast.kernels.grouped import ACTIVATIONS, dispatch
from holdfast.kernels.grouped import naive as naive_grouped
from holdfast.kernels.grouped import triton as grouped_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    assert got.shape == expected.shape
    assert (got - expected).norm() <= TOLERANCE[dtype] * expected.norm(), (got - expected).norm() / expected.norm()


def compare(device: str, dtype: torch.dtype, tokens: int = 63, experts: int = 6, slots: int = 3) -> None:
    torch.manual_seed(0)
    dim, hidden = 60, 70
    chosen = torch.rand(tokens, experts).argsort(-1)[:, :slots]
    chosen[torch.rand(tokens, slots) < 0.3] = experts
    chosen[chosen == 4] = experts
    plan = dispatch(chosen.to(device), experts)
    used = int(plan.used)
    x = torch.randn(tokens, dim).to(dtype)
    rows = torch.randn(tokens * slots, hidden).to(dtype)
    rows[used:] = torch.nan  # unused rows: reading one would give NaN
    weight = torch.randn(experts, hidden, dim).to(dtype)
    weights = torch.rand(tokens, slots)

    gathered = grouped_triton.gather(x.to(device), plan.slots, plan.used, tokens * slots)[:used]
    close(gathered, x[plan.order[:used].cpu() // slots], dtype)
    bias, ends = torch.randn(experts, hidden), plan.offsets.cpu()
    of_row = torch.searchsorted(ends, torch.arange(used, dtype=torch.int32), right=True)
    biased = rows.double()
    biased[:used] += bias[of_row]
    one, with_bias = torch.ones_like(weights), (bias.to(device), plan.offsets)
    for weighing, scale, given, values in (
        (weights.to(device), weights, (None, None), rows),
        (None, one, (None, None), rows),
        (weights.to(device), weights, with_bias, biased),
    ):
        combined = grouped_triton.combine(rows.to(device), plan.slots, weighing, plan.used, *given)
        close(combined, naive_grouped.combine_rows(values, plan.slots.cpu(), scale, used), dtype)
    added = grouped_triton.add_bias(rows.to(device, copy=True), bias.to(device), plan.offsets)
    close(added[:used], biased[:used], dtype)

    other, grad = torch.randn_like(rows), torch.randn_like(rows)
    order = plan.order[:used].cpu()
    row_weights = weights.flatten()[order, None].double()
    on_device = weights.to(device), plan.order, plan.used
    by_slot = weights.new_zeros(weights.shape).double().flatten()
    wide, wide_grad = rows[:used].double(), grad[:used].double()

    def compare_backward(given: Tensor, name: str, *expected: Tensor) -> None:
        *by_row, dots = grouped_triton.rows_backward(grad.to(device, copy=True), given.to(device), *on_device, name)
        for got, wanted in zip([*(each[:used] for each in by_row), dots.flatten()], expected, strict=True):
            close(got, wanted, dtype)

    dots = by_slot.scatter(0, order, (wide * wide_grad).sum(1))
    compare_backward(rows, "", wide_grad * row_weights, wide * row_weights, dots)

    sums = torch.zeros(experts, hidden).double()
    for weighing, scale in ((None, torch.ones(used, 1)), (weights.to(device), row_weights)):
        got = grouped_triton.sum_rows(rows.to(device), plan.offsets, weighing, plan.order)
        close(got, sums.index_add(0, of_row, wide * scale), torch.float32)
    before = torch.randn(tokens, slots)
    dots = before.to(device, copy=True)
    grouped_triton.add_bias_dots(rows.to(device), bias.to(device), plan.order, plan.offsets, dots)
    products = (wide * bias[of_row]).sum(1)
    close(dots.flatten(), before.double().flatten().scatter_add(0, order, products), torch.float32)

    gate_up = torch.cat([rows, other], dim=1)
    for name in ACTIVATIONS if dtype == torch.float32 else ("silu",):
        pair = gate_up[:used].double().requires_grad_()
        gate, up = pair.chunk(2, dim=-1)
        product = ACTIVATIONS[name](gate) * up
        close(grouped_triton.glu(gate_up.to(device), plan.used, name)[:used], product, dtype)
        (slope,) = torch.autograd.grad(product, pair, wide_grad * row_weights)
        dots = by_slot.scatter(0, order, (product * wide_grad).sum(1).detach())
        compare_backward(gate_up, name, slope, product * row_weights, dots)

    spoilt = gate_up.clone()
    spoilt[0, 1] = torch.nan
    for name in ACTIVATIONS:  # NaN stays NaN, in the row and column where it was
        found = grouped_triton.glu(spoilt.to(device), plan.used, name)[:used].isnan().nonzero()
        assert found.tolist() == [[0, 1]], name

    left = torch.randn(tokens * slots, dim).to(dtype)
    got = grouped_triton.mm(left.to(device), weight.to(device).transpose(1, 2), plan.offsets)
    close(got[:used], naive_grouped.grouped_mm(left.float(), weight.float(), ends)[:used], dtype)
    got = grouped_triton.mm(rows.to(device), weight.to(device), plan.offsets)
    close(got[:used], naive_grouped.grouped_mm(rows.float(), weight.float().transpose(1, 2), ends)[:used], dtype)
    got = grouped_triton.outer(rows.to(device), left.to(device), plan.offsets)
    close(got, naive_grouped.grouped_outer(rows[:used].float(), left[:used].float(), ends), dtype)


def sorting(device: str, tokens: int, slots: int, experts: int) -> None:
    """Rows of slots, by experts and then in the slots' own order; an expert may come twice."""
    chosen = torch.randint(0, experts + 1, (tokens, slots))
    order, rows, offsets = (part.cpu() for part in grouped_triton.dispatch(chosen.to(device), experts, tokens * slots))
    used = int((chosen < experts).sum())
    expected = chosen.flatten().argsort(stable=True)[:used]
    assert torch.equal(order[:used], expected)
    assert torch.equal(rows.flatten()[expected], torch.arange(used))
    assert (rows[chosen == experts] >= used).all()
    assert torch.equal(offsets, chosen.flatten().bincount(minlength=experts + 1)[:experts].cumsum(0).int())


def sorting_into_fewer_rows(device: str, tokens: int, slots: int, experts: int) -> None:
    """With as many rows as slots in use, the rows are those of a dispatch without a limit; with fewer, the first of them.

    In the interpreter, a write after the last row is an error (pointer_check.py).
    """
    chosen = torch.randint(0, 2 * experts, (tokens, slots)).clamp_max(experts)  # half of the slots are unused
    order, rows, offsets = (part.cpu() for part in grouped_triton.dispatch(chosen.to(device), experts, tokens * slots))
    used = int(offsets[-1])
    for most in (used, max(used - 3, 1), 1):
        limited = [part.cpu() for part in grouped_triton.dispatch(chosen.to(device), experts, most)]
        expected = order[:most], rows.where(rows < most, tokens * slots), offsets.clamp_max(most)
        assert all(torch.equal(*pair) for pair in zip(limited, expected, strict=True))


def looking(device: str, size: int, place: int, value: float) -> None:
    """NaN and infinities of either sign are found, wherever they are, and the largest number is not.

    The first layer that finds one writes its name, later ones do not; rows of padding are not looked at.
    """
    scores = torch.randn(size, 1)
    scores[place] = value
    pinned = device == "cuda"
    found = torch.zeros((), dtype=torch.int32, pin_memory=pinned)
    name = torch.zeros(128, dtype=torch.uint8, pin_memory=pinned)
    first, second = (encode_name(layer).to(device) for layer in ("first", "second"))
    hidden = torch.ones(size, dtype=torch.bool)
    hidden[place] = False

    def check(layer: Tensor, real: Tensor | None) -> None:
        there = None if real is None else torch.stack([real, ~real], dim=1).to(device)[:, 0]  # not contiguous
        finite_triton.check(scores.to(device), there, layer, name, found)
        if device == "cuda":
            torch.cuda.synchronize()

    check(first, hidden)
    assert not found
    for layer in (first, second):
        check(layer, torch.ones(size, dtype=torch.bool) if layer is first else None)
        assert bool(found) != math.isfinite(value)
        assert decode_name(name) == ("" if math.isfinite(value) else "first")


def balancing(device: str, tokens: int, experts: int, slots: int, masked: bool) -> None:
    """The loss and its gradient, with unused slots, a token without gates, padding, and experts in two slots."""
    gates = torch.rand(tokens, experts)
    gates[0] = 0.0
    chosen = torch.randint(0, experts + 1, (tokens, slots))
    real = torch.rand(tokens) < 0.7 if masked else None
    there = None if real is None else torch.stack([real, ~real], dim=1).to(device)[:, 0]  # not contiguous
    expected = gates.double().requires_grad_()
    wanted = balance.reference(expected, chosen, real, None)
    (slope,) = torch.autograd.grad(3 * wanted, expected)
    loss, slopes = balance_triton.loss(balance_triton.sums(gates.to(device), chosen.to(device), there), experts)
    close(loss, wanted, torch.float32)
    grad = torch.full((), 3.0, device=device)
    close(balance_triton.gradient(grad, gates.to(device), there, slopes), slope, torch.float32)


def many_rows_a_program(device: str) -> None:
    """Programs take several rows each, as they do where slots are many and ragged."""
    with patch.object(grouped_triton, "MOST_PROGRAMS", 20):
        compare(device, torch.float32, tokens=5, experts=18, slots=grouped_triton.FEW_SLOTS + 1)


def in_three_kernels(what: Callable[..., None], *given: Any) -> None:
    with patch.object(grouped_triton, "FEW_COUNTS", 0):
        what(*given)


def sorting_in_steps(device: str, tokens: int, slots: int, experts: int) -> None:
    """Counts are added up in several steps, by every program or by one kernel."""
    with patch.object(grouped_triton, "SPAN", 2), patch.object(grouped_triton, "IN_REGISTERS", 2**9):
        sorting(device, tokens, slots, experts)
        in_three_kernels(sorting, device, tokens, slots, experts)


def comparisons(device: str) -> dict[str, Callable[[], None]]:
    """Return what to compare on a device, by name."""
    kinds = [torch.float32, torch.float16]
    kinds += [torch.bfloat16] if device == "cuda" else []  # numpy, and so the interpreter, has no bfloat16 product
    found: dict[str, Callable[[], None]] = {f"experts {kind}": partial(compare, device, kind) for kind in kinds}
    found["experts, few tokens"] = partial(compare, device, torch.float16, tokens=17, experts=5, slots=2)
    found["experts, many rows a program"] = partial(many_rows_a_program, device)
    for size, place, value in itertools.product((1, 5000), (0, -1), (torch.nan, torch.inf, -torch.inf, 3.4e38, -0.0)):
        found[f"finite {value} at {place} of {size}"] = partial(looking, device, size, place, value)
    for sizes in ((1, 1, 1), (40, 3, 1), (200, 3, 6), (300, 2, 64), (70, 20, 300)):
        found[f"dispatch {sizes}"] = partial(sorting, device, *sizes)
        found[f"dispatch in three kernels {sizes}"] = partial(in_three_kernels, sorting, device, *sizes)
    for sizes in ((40, 3, 1), (200, 3, 6), (70, 20, 300)):
        fewer = f"dispatch into fewer rows {sizes}"
        found[fewer] = partial(sorting_into_fewer_rows, device, *sizes)
        found[f"{fewer}, in three kernels"] = partial(in_three_kernels, sorting_into_fewer_rows, device, *sizes)
    for sizes in ((1, 1, 1), (70, 6, 3), (300, 64, 2), (130, 300, 4)):
        for masked in (False, True):
            found[f"balance {sizes} {masked}"] = partial(balancing, device, *sizes, masked)
    for sizes in ((200, 3, 6), (300, 2, 64), (70, 20, 300)):
        found[f"dispatch in steps {sizes}"] = partial(sorting_in_steps, device, *sizes)
    return found
