"""Comparisons of the mixing kernels with the explicit matrix in float64; test_comparisons.py has a case for each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from holdfast.kernels import token_mixing
from holdfast.kernels.attention import triton as attention_triton
from holdfast.kernels.token_mixing import launch, naive, parts_for_backward
from holdfast.kernels.token_mixing.blocks import SAMPLED_BLOCK as BLOCK
from holdfast.kernels.token_mixing.blocks import sampled


def close(got: Tensor, expected: Tensor, within: float, what: str) -> None:
    """The norm of the difference, as a part of the reference's norm, or of 1 where that is less."""
    got, expected = got.detach().cpu().double(), expected.detach()
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    error = float((got - expected).norm() / expected.norm().clamp_min(1.0))
    assert error <= within, f"{what}: {error}"


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that a kernel that reads what none has written is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    name: str
    queries: int = 100
    keys: int = 100
    width: int = 20
    values: int = 6
    second: int = 0
    causal: bool = True
    padded: bool = False
    mask: str = ""
    shared: bool = False  # the keys are the queries
    coarse: bool = False  # gradients of queries and keys as good as bfloat16
    total: bool = False  # log_total has a gradient too
    scale: float = 0.3
    dtype: torch.dtype = torch.float32
    slope: float = 1.0  # the size of the gradient of the output
    memory: int | None = None  # bytes of shared memory, for smaller tiles; None: those of the device


CASES = [
    Case("causal"),
    Case("full", causal=False),
    Case("shared", shared=True),
    Case("shared and padded", shared=True, padded=True),
    Case("one token", queries=1, keys=1),
    Case("decoding", queries=1, keys=90),
    Case("chunk", queries=37, keys=130),
    Case("padded", padded=True),
    Case("bool mask", mask="bool"),
    Case("broadcast bool mask", mask="column", causal=False),
    Case("added mask", mask="added", padded=True),
    Case("two products", second=24, width=16, padded=True),
    Case("total", total=True),
    Case("total, two products", total=True, second=24, width=16, padded=True),
    Case("two products, decoding", second=24, width=16, queries=1, keys=70),
    Case("wide values", values=70, width=64, queries=70, keys=70),
    Case("wide products", width=130, queries=70, keys=70),
]
GROUPS = 2
# Vectors that are too wide for a tile: their scores are summed over chunks, and slopes are written.
# A token's product with itself is about the width: at a larger scale it would look at itself alone, and have no gradient.
WIDE = Case("chunks", queries=140, keys=140, width=300, slope=100.0, shared=True, scale=0.015)
WIDE_CASES = [
    WIDE,
    replace(WIDE, name="chunks, full", causal=False, total=True),
    replace(WIDE, name="chunks, width of whole chunks", width=320, queries=200, keys=200),
    replace(WIDE, name="chunks, padded", padded=True),
    replace(WIDE, name="chunks, 32 values", values=32),
    replace(WIDE, name="chunks, tiles for 99 KiB", memory=99 * 1024),
    replace(WIDE, name="chunks, tiles for 16 KiB", memory=16 * 1024),
    replace(WIDE, name="chunks, bool mask", mask="bool"),
    replace(WIDE, name="chunks, added mask", mask="added", padded=True),
    replace(WIDE, name="chunks, coarse", coarse=True),
]


def limits_of(case: Case, *heads: int) -> tuple[Tensor | None, Tensor | None]:
    """Return which keys are real, and the mask, with an axis for `heads` if given."""
    real, one = torch.rand(GROUPS, case.keys) < 0.7, [1 for _ in heads]
    real[1, : case.keys // 2] = False  # in causal rows nothing is allowed
    masks = {
        "": None,
        "bool": torch.rand(1, *heads, case.queries, case.keys) < 0.8,
        "column": torch.rand(GROUPS, *one, 1, case.keys) < 0.8,
        "added": torch.randn(GROUPS, *one, case.queries, case.keys),
    }
    return real if case.padded else None, masks[case.mask]


def to(device: str, *tensors: Tensor | None) -> Any:
    return tuple(None if tensor is None else tensor.to(device) for tensor in tensors)


def compare(case: Case, device: str) -> None:
    with mock.patch.object(launch, "shared_memory", return_value=case.memory) if case.memory else nullcontext():
        _compare(case, device)


def _compare(case: Case, device: str) -> None:
    torch.manual_seed(0)
    groups, scale, second_scale = GROUPS, case.scale, 0.2

    def randoms(count: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(groups, count, width).to(dtype)

    query, key = randoms(case.queries, case.width, case.dtype), randoms(case.keys, case.width, case.dtype)
    if case.shared:
        key = query
    value = torch.softmax(randoms(case.keys, case.values, torch.float32), -1)
    leaves = {"query": query, "key": key, "value": value}
    if case.second:
        leaves["second query"] = randoms(case.queries, case.second, torch.float32)
        leaves["second key"] = randoms(case.keys, case.second, case.dtype)
        leaves["bias"] = torch.randn(groups, case.keys)
    real, mask = limits_of(case)

    wide = {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}
    second = (wide["second query"], wide["second key"], second_scale) if case.second else None
    bias = wide["bias"] if case.second else None
    weights = naive.mixing_weights(wide["query"], wide["key"], scale, case.causal, real, mask, second, bias)
    expected = weights @ wide["value"]
    grad = case.slope * torch.randn(groups, case.queries, case.values)
    totals = naive.log_totals(wide["query"], wide["key"], scale, case.causal, real, mask, second, bias)
    nothing = ~(weights.sum(-1) > 0)
    grad_total = torch.randn(groups, case.queries).masked_fill(nothing, 0.0) if case.total else None
    objective = (expected * grad.double()).sum()
    if grad_total is not None:
        objective = objective + (totals[~nothing] * grad_total[~nothing].double()).sum()
    gradients = dict(zip(wide, torch.autograd.grad(objective, list(wide.values())), strict=True))
    if case.shared:
        gradients["query"] = gradients["query"] + gradients["key"]

    given = {name: leaf.clone() for name, leaf in leaves.items()}
    if real is not None:  # values of padding must not reach the result
        for name in ("value",) if case.shared else ("key", "value", "second key"):
            if name in given:
                given[name][~real] = torch.nan
        if case.second:
            given["bias"][~real] = torch.nan
    given = {name: leaf.to(device) for name, leaf in given.items()}
    allowed = to(device, real, None if mask is None else mask.expand(groups, case.queries, case.keys))
    if case.shared:
        given["key"] = given["query"]
    second_rows = given.get("second query"), given.get("second key")
    rows = launch.Rows(given["query"], given["key"], given["value"], *second_rows)

    def problem(wants: launch.WantedGradients, *, again: bool) -> launch.Problem:
        parts = launch.split_operands(rows, allowed[0], wants)
        parts = parts_for_backward(parts) if again else parts
        return launch.Problem._make((rows, given.get("bias"), *allowed, parts, case.causal, scale, second_scale))

    everything = launch.WantedGradients(True, True, True, case.coarse)
    values_only = launch.WantedGradients(False, False, True)
    out, log_total = launch.mix(problem(everything, again=False))
    close(out, expected, 2e-6, "output")
    close(log_total.cpu()[~nothing], totals[~nothing], 1e-5, "total")
    assert (out.cpu()[nothing] == 0).all() and (log_total.cpu()[nothing] == -torch.inf).all()
    done = grad.to(device), out, log_total
    (total,) = to(device, grad_total)
    with uninitialised_memory_is_nan():
        whole = problem(everything, again=True)
        backward = launch.mix_backward(*done, whole, everything, total)
    again = launch.mix_backward(*done, problem(values_only, again=True), values_only)
    assert again[2] is not None
    close(again[2], gradients["value"], 1e-4, "gradient of values alone")
    assert all(found is None for index, found in enumerate(again) if index != 2)
    # A gradient in bfloat16 is rounded to it.
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 4e-3}
    for name, got in zip(("query", "key", "value", "second query", "second key", "bias"), backward, strict=True):
        if case.shared and name == "key":
            assert got is None
        elif name in leaves:
            assert got is not None and got.dtype == leaves[name].dtype
            coarse = case.coarse and name in ("query", "key", "second query", "second key")
            within = tolerance[torch.bfloat16 if coarse else got.dtype]
            close(got, gradients[name], within, "coarse gradient" if coarse else f"{got.dtype} gradient")


def compare_softmax_mix(device: str, compiled: bool) -> None:
    """Compare `softmax_mix` itself for vectors whose parts are not kept for the backward."""
    torch.manual_seed(0)
    query, value = torch.randn(2, 70, 300), torch.softmax(torch.randn(2, 70, 6), -1)
    real = torch.rand(2, 70) < 0.7
    wide = [rows.double().requires_grad_() for rows in (query, value)]
    expected = naive.mixing_weights(wide[0], wide[0], 0.015, True, real) @ wide[1]
    leaves = [rows.to(device).requires_grad_() for rows in (query, value)]
    with ExitStack() as patches:
        if device == "cpu":
            patches.enter_context(mock.patch.object(token_mixing, "_has_kernel", launch.supports))
            patches.enter_context(mock.patch.object(token_mixing, "on_device_of", return_value=nullcontext()))
        launches = [
            patches.enter_context(mock.patch.object(launch, name, side_effect=getattr(launch, name)))
            for name in ("split_operands", "mix", "mix_backward")
        ]
        run: Any = torch.compile(token_mixing.softmax_mix, backend="aot_eager") if compiled else token_mixing.softmax_mix
        out = run(leaves[0], leaves[0], leaves[1], scale=0.015, causal=True, real=real.to(device))
        assert out.grad_fn is not None
        kept = [] if compiled else out.grad_fn.saved_tensors
        grads = torch.autograd.grad(1e4 * out.square().sum(), leaves)
    assert sum(each.call_count for each in launches) >= 4  # both splits, `mix` and `mix_backward`
    assert sum(each is not None and each.dtype in (torch.float16, torch.bfloat16) for each in kept) == 0
    close(out, expected, 2e-6, "output")
    for got, exact in zip(grads, torch.autograd.grad(1e4 * expected.square().sum(), wide), strict=True):
        close(got, exact, 1e-4, "gradient")


def compare_entropy(heads: int, key_heads: int, case: Case, device: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, case.queries, heads, case.width).to(case.dtype).transpose(1, 2)
    key = torch.randn(2, key_heads, case.keys, case.width).to(case.dtype)
    real, mask = limits_of(case, heads)
    shared = key.double().repeat_interleave(heads // key_heads, 1)
    everywhere = None if mask is None else mask.expand(2, heads, case.queries, case.keys).flatten(0, 1)
    realities = None if real is None else real.repeat_interleave(heads, 0)
    weights = naive.mixing_weights(
        query.double().flatten(0, 1), shared.flatten(0, 1), 0.7, case.causal, realities, everywhere
    )
    expected = torch.special.entr(weights).sum(-1).unflatten(0, (2, heads))
    there: tuple[Any, Any, Any, Any] = to(device, query, key, real, mask)
    got = attention_triton.entropy(*there, case.causal, 0.7)
    close(got, expected, 5e-5, f"{case.dtype} entropy")
    assert (got.cpu()[weights.sum(-1).unflatten(0, (2, heads)) == 0] == 0).all()
    for step in (2, 3) if case.queries > 2 * BLOCK else ():
        some = attention_triton.entropy(*there, case.causal, 0.7, step)
        close(some, torch.cat([expected[:, :, rows] for rows in sampled(case.queries, step)], 2), 5e-5, "some entropies")


def compare_heads(device: str) -> None:
    rows, grad = torch.randn(2, 37, 3, 20).transpose(1, 2), torch.randn(2, 37, 20)
    shared, turned = torch.randn(2, 1, 37, 24), torch.randn(30, 3, 8).permute(1, 2, 0).unsqueeze(0)
    placed = torch.zeros(2, 3, 37, 20)
    placed[:, 2] = grad
    head = torch.tensor([2], device=device)
    taken = attention_triton.take_heads(head, [each.to(device) for each in (rows, shared, turned)], 3)
    for got, expected in zip(taken, (rows[:, 2], shared[:, 0], turned[:, 2]), strict=True):
        close(got, expected.double(), 0.0, "head")
    close(attention_triton.put_head(grad.to(device), head, 3, 3), placed.double(), 0.0, "head")


def compare_norms(device: str, dtype: torch.dtype) -> None:
    value, across = torch.randn(70, 20).to(dtype), torch.randn(20, 150).to(dtype)
    for bias in (None, torch.randn(150).to(dtype)):
        said = 3 * value.double() @ across.double() + (0 if bias is None else bias.double())
        there: tuple[Any, Any, Any] = to(device, value, across, bias)
        got = attention_triton.projected_norms(*there, 3)
        close(got, said.square().sum(-1), 1e-6, "norm")


def comparisons(device: str) -> dict[str, Callable[[], None]]:
    """Return what to compare on a device, by name."""
    found: dict[str, Callable[[], None]] = {"heads": partial(compare_heads, device)}
    narrow = [torch.bfloat16, torch.float16] if device == "cuda" else [torch.float16]

    def mixing(name: str, case: Case) -> None:
        assert f"mix: {name}" not in found
        found[f"mix: {name}"] = partial(compare, case, device)

    def entropy(name: str, heads: int, key_heads: int, case: Case) -> None:
        assert f"entropy: {name}" not in found
        found[f"entropy: {name}"] = partial(compare_entropy, heads, key_heads, case, device)

    for case in CASES:
        mixing(case.name, case)
        for kind in narrow if case.second or case.name in ("causal", "padded") else ():
            mixing(f"{case.name}, {kind}", replace(case, dtype=kind))
        if not case.second and case.name != "wide values":
            entropy(case.name, 4, 2, case)
    for case in WIDE_CASES:
        mixing(case.name, case)
    for kind in narrow:
        mixing(f"chunks, {kind}", replace(WIDE, width=320, dtype=kind))
    for compiled in (False, True):
        name = f"softmax_mix, wide vectors{', compiled' if compiled else ''}"
        found[name] = partial(compare_softmax_mix, device, compiled)
    entropy("long", 2, 1, Case("long", 270, 290, 16, causal=True, padded=True, mask="added"))
    mixing("coarse", Case("coarse", coarse=True))
    mixing("coarse and shared", Case("coarse and shared", shared=True, coarse=True, padded=True))
    for kind in narrow:
        found[f"norms {kind}"] = partial(compare_norms, device, kind)
        for width in (16, 20):
            entropy(f"narrow, width {width}, {kind}", 4, 1, Case("narrow", width=width, dtype=kind))
    if device == "cuda":
        many = Case("benchmark", 2048, 2048, 64, 64)
        mixing("benchmark", many)
        # At 0.3 every token would look at itself alone, and gradients would be small differences of large numbers.
        mixing("benchmark, shared", replace(many, shared=True, scale=0.12))
        mixing("benchmark, shared and coarse", replace(many, shared=True, scale=0.12, coarse=True))
        mixing("benchmark of two", replace(many, width=128, second=128, dtype=torch.bfloat16))
        entropy("benchmark", 2, 2, Case("benchmark", 2048, 2048, 128, dtype=torch.bfloat16))
    return found
