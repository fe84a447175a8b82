"""Comparisons of the kernels of routing with plain mathematics; test_comparisons.py has a case for each."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.clusters import TILE
from holdfast.kernels.clusters import triton as clusters_triton
from holdfast.kernels.fp32_linear import triton as fp32_linear_triton
from holdfast.kernels.select import POWERS, TINY, WEIGHINGS, Amounts, Weighing, smooth_strip, top_reference, weigh
from holdfast.kernels.select import triton as select_triton
from holdfast.kernels.statistics import midpoint, order_statistic
from holdfast.kernels.statistics import triton as statistics_triton
from holdfast.routing.clustering import FEWEST_TOKENS, MEMORY, SMALLEST_SPREAD, Clustered, feature_scales
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores
from holdfast.routing.scores import Linear
from holdfast.routing.selection import Softmax, TopK
from holdfast.routing.smoothing import MEMORY as WIDTH_MEMORY
from holdfast.routing.smoothing import SmoothTopK
from holdfast.routing.state import is_set
from holdfast.routing.token_graph import ENTROPY_MEMORY, AttentionPosterior

CASES: list[tuple[Weighing, bool]] = [("softmax", False), ("raw", False), ("raw", True), ("shares", True)]
WITHIN = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def close(got: Tensor, expected: Tensor, tolerance: float, cancelled: Tensor | None = None) -> None:
    """As a part of the expected norm, and of that of terms that cancel in it."""
    got, expected = got.detach().cpu().double(), expected.detach().double()
    assert got.shape == expected.shape
    size = expected.norm() + (0 if cancelled is None else cancelled.detach().double().norm())
    assert (got - expected).norm() <= tolerance * size, (got - expected).norm() / size


def same(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.cpu(), expected), (got.cpu() != expected).nonzero()[:5]


def from_a_mask(real: Tensor) -> Tensor:
    """`real (T,)` as the diagonal of an attention mask, which is how a model tells padding."""
    mask = torch.rand(len(real), len(real), device=real.device) < 0.5
    mask.diagonal().copy_(real)
    return mask.diagonal()


def products(device: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int, dim: int) -> None:
    """Float32, whatever the inputs: the error is that of float32 sums, a thousandth of that of a rounded product."""
    count = 70
    tokens, grad = torch.randn(count, dim).to(dtype), torch.randn(count, width)
    weight = (torch.randn(width, dim) / dim**0.5).to(weight_dtype)
    wide_tokens, wide_weight, wide_grad = tokens.double(), weight.double(), grad.double()
    x, w = tokens.to(device), weight.to(device)
    g = fp32_linear_triton.split_gradient(grad.to(device), x, w)
    close(fp32_linear_triton.linear(x, w, None), wide_tokens @ wide_weight.t(), 1e-6)
    close(fp32_linear_triton.linear(x, w.t().contiguous().t(), None), wide_tokens @ wide_weight.t(), 1e-6)
    close(fp32_linear_triton.grad_tokens(g, x, w, None), wide_grad @ wide_weight, WITHIN[dtype])
    in_shares = fp32_linear_triton.grad_tokens(g, x, w, None, features=16, share=48)
    close(in_shares, wide_grad @ wide_weight, WITHIN[dtype])
    exact = wide_grad.t() @ wide_tokens
    close(fp32_linear_triton.grad_weight(g, x, w, None), exact, WITHIN[weight_dtype])


def one_token_at_a_time(device: str) -> None:
    """A token's logits are the same to the bit whatever is beside it."""
    tokens, weight = torch.randn(130, 96).half().to(device), torch.randn(9, 96).to(device)
    together = fp32_linear_triton.linear(tokens, weight, None)
    same(fp32_linear_triton.linear(tokens[77:78].contiguous(), weight, None), together[77:78].cpu())


def clusters(
    device: str, dtype: torch.dtype, weight_dtype: torch.dtype, padded: bool, dim: int = 72, groups: int = 5
) -> None:
    count, width = 300, 6
    first = torch.randint(0, groups + 1, (count, 3))[:, 0]  # not contiguous, and some without a cluster
    first[first == 2] = 3  # a cluster without tokens
    real = torch.rand(count) < 0.7 if padded else None
    counted = torch.ones(count, dtype=torch.bool) if real is None else real
    tokens, previous = (torch.randn(count, dim).to(dtype) + shift for shift in (0, 1))
    grad = torch.randn(count, width)
    weight, spreads = torch.randn(width, dim).to(weight_dtype), torch.rand(groups, dim)
    spreads[3] = 0
    there = None if real is None else from_a_mask(real.to(device))
    order, owners, bounds, totals = clusters_triton.group(first.to(device), there, groups)

    members = first[:, None] == torch.arange(groups + 1)
    same(totals, (members & counted[:, None]).sum(0)[:groups].float())
    listed = order.cpu()[: int(bounds[-1]) * TILE]
    same(owners[int(bounds[-1]) :], torch.full((owners.shape[0] - int(bounds[-1]),), -1, dtype=torch.int32))
    same(listed[listed < count].sort().values, torch.arange(count, dtype=torch.int32))
    for tile, owner in enumerate(owners.tolist()):
        mine = listed[tile * TILE : (tile + 1) * TILE]
        assert (first[mine[mine < count]] == owner).all()
    where = previous.to(device), there, order, bounds
    inputs = previous.double() * counted[:, None]
    by_cluster = (members & counted[:, None]).double()[:, :groups]
    sums = by_cluster.t() @ inputs
    got = clusters_triton.sums(*where)
    close(got, sums, 1e-6)
    centred = inputs - by_cluster @ (sums / by_cluster.sum(0).clamp_min(1)[:, None])
    for squared, amounts in ((False, centred.abs()), (True, centred.square())):
        for around in (None, got):  # their own mean, or a given one
            spread = clusters_triton.sums(*where, around, totals, squared)
            close(spread, by_cluster.t() @ amounts, 1e-6)

    scales = clusters_triton.feature_scales(spreads.to(device), SMALLEST_SPREAD)
    close(scales, torch.cat([feature_scales(spreads), torch.ones(1, dim)]), 1e-6)
    scaling = scales.cpu().double()[first]
    parts = fp32_linear_triton.Clusters(order, owners, bounds, scales)
    x, w = tokens.to(device), weight.to(device)
    g = fp32_linear_triton.split_gradient(grad.to(device), x, w)
    within = 2**-18 if weight_dtype == torch.bfloat16 and dim >= fp32_linear_triton.WIDE else 1e-6
    close(fp32_linear_triton.linear(x, w, *parts), (tokens.double() * scaling) @ weight.double().t(), within)
    close(fp32_linear_triton.grad_tokens(g, x, w, parts), (grad.double() @ weight.double()) * scaling, WITHIN[dtype])
    exact = grad.double().t() @ (tokens.double() * scaling)
    close(fp32_linear_triton.grad_weight(g, x, w, parts), exact, WITHIN[weight_dtype])


def spreads(device: str, due: bool) -> None:
    """What a batch teaches, let in or not, as routing/clustering.py has it."""
    part = Clustered(70, 6, base=Linear(70, 6))
    for buffer in (part.spreads, part.get_buffer("staged_deviations")):
        buffer.copy_(torch.rand(6, 70))
    part.get_buffer("staged_counts").copy_(torch.tensor([0.0, 7.0, 8.0, 9.0, 50.0, 3.0]))
    state = [part.spreads, part.get_buffer("staged_deviations"), part.get_buffer("staged_counts")]
    got, deviations, counts = (each.clone().to(device) for each in state)
    clusters_triton.update_spreads(got, deviations, counts, torch.tensor(due, device=device), MEMORY, FEWEST_TOKENS)
    part.update_state_where(torch.tensor(due))
    close(got, part.spreads, 1e-7)


def means(device: str, tokens: float, seen: bool, due: bool, empty: bool) -> None:
    """What is let into the entropies of heads and into a strip's width, as their parts have it."""
    for part, name, is_sum in ((AttentionPosterior(8, heads=5), "entropies", True), (SmoothTopK(6, 2), "width", False)):
        state = part.get_buffer("entropy" if is_sum else "width")
        staged, count = part.get_buffer(f"staged_{name}"), part.get_buffer("staged_tokens")
        state.copy_(torch.rand(state.shape))
        staged.copy_(torch.rand(state.shape) * (not empty))
        part.get_buffer("seen").fill_(seen)
        count.fill_(tokens)
        before = state, is_set(part.get_buffer("seen")), staged, count
        mean, known, taught, number = (each.clone().to(device) for each in before)
        memory = ENTROPY_MEMORY if is_sum else WIDTH_MEMORY
        statistics_triton.update_running_mean(mean, known, taught, number, torch.tensor(due, device=device), memory, is_sum)
        part.update_state_where(torch.tensor(due))
        close(mean.view(-1), state.view(-1), 1e-6)
        same(known, is_set(part.get_buffer("seen")))


def awkward_logits(count: int, experts: int) -> Tensor:
    """Ordinary rows, then rows of ties, of both zeros, of far and of infinite gaps."""
    logits = torch.randn(count, experts)
    logits[0] = 1.0
    logits[1] = torch.where(torch.arange(experts) % 2 == 0, 0.0, -0.0)
    logits[2] = torch.arange(experts).flip(0) * 100.0
    logits[3, max(experts // 2, 1) :] = -torch.inf
    logits[4] = logits[4].round()
    return logits


def choices(
    device: str,
    experts: int,
    k: int,
    how: Weighing,
    informed: bool,
    eps: float | None,
    most: int,
    powers: tuple[float, float] = POWERS,
) -> None:
    """Top-k, and with `eps` its strip, as the selectors do it in plain PyTorch: experts exactly, weights, slopes, gaps."""
    raw = awkward_logits(37, experts)
    primary = (raw.softmax(-1) if informed else raw).requires_grad_()
    if informed:
        with torch.no_grad():
            primary[5], primary[6, 1:] = 0.0, 0.0
    scores = Scores.from_gates(primary) if informed else Scores(primary, primary.softmax(-1), informed=False)
    amounts = primary if informed or how == "softmax" else scores.gates
    rule = Softmax(renormalise=how != "raw")
    selector: TopK | SmoothTopK = TopK(1, experts, k, rule=rule)
    if eps is not None:
        selector = SmoothTopK(experts, k, eps=eps, most=most, rule=rule, a=powers[0], b=powers[1])
    selected = selector.eval()(scores, primary, Context())
    grad = torch.randn_like(selected.weights)
    (slope,) = torch.autograd.grad(selected.weights, amounts, grad, retain_graph=True)

    width = None if eps is None else torch.tensor(eps, device=device)
    there = primary.detach().to(device), amounts.detach().to(device), width
    rest: Any = (WEIGHINGS.index(how), informed, *powers)
    chosen, weights, slots, gaps, edges = select_triton.select(*there, k, k if eps is None else most, *rest)
    same(chosen, selected.experts)
    steep = 1e-4 if most < experts else 1e-5  # a strip that ends early may be narrow, and is as steep as it is narrow
    close(weights, selected.weights, steep if eps else 1e-6)
    # A weight's gradient less the mean of all: with one expert nothing is left but rounding.
    terms = grad * selected.weights
    if how == "shares":
        chosen_amounts = amounts.gather(1, selected.experts.clamp_max(experts - 1))
        terms = torch.where(selected.weights > 0, terms / chosen_amounts, 0.0)
    slopes = select_triton.select_backward(grad.to(device), *there, weights, slots, edges, k, *rest)
    close(slopes, slope, steep, terms)
    if eps is not None:
        levels = scores.logits.detach()
        best = top_reference(primary.detach(), experts)
        expected = (levels.gather(1, best[:, k - 1 : k]) - levels).scatter(1, best[:, :k], torch.inf)
        expected = expected.scatter(1, best[:, most:], torch.inf)
        assert torch.allclose(gaps.cpu().nan_to_num(), expected.nan_to_num(), atol=1e-5)


def strips_of_their_own(device: str, experts: int, k: int, how: Weighing, informed: bool, most: int) -> None:
    """Each token has a strip of its own width: as if it were alone with that width; gaps do not depend on it."""
    raw = awkward_logits(37, experts)
    primary = raw.softmax(-1) if informed else raw
    amounts = (primary if informed or how == "softmax" else primary.softmax(-1)).requires_grad_()
    eps, grad = torch.rand(37) * 1.5, torch.randn(37, most)
    eps[:5] = 0.0
    levels = primary.clamp_min(TINY).log() if informed else primary
    strip = smooth_strip(primary.detach(), levels.detach(), k, eps, most)
    weights = weigh(Amounts(amounts, how), strip.experts, strip.in_use, strip.fade)
    (slope,) = torch.autograd.grad(weights, amounts, grad)
    there = primary.detach().to(device), amounts.detach().to(device), eps.to(device)
    rest: Any = (WEIGHINGS.index(how), informed)
    gaps = select_triton.strip_gaps(there[0], k, most, informed)
    same(gaps.nan_to_num(), select_triton.select(*there, k, most, *rest)[3].cpu().nan_to_num())
    chosen, got, slots, empty, edges = select_triton.select(*there, k, most, WEIGHINGS.index(how), informed, *POWERS, gaps)
    assert empty.numel() == 0
    same(chosen, strip.experts.where(strip.in_use, experts))
    close(got, weights, 1e-4)
    close(select_triton.select_backward(grad.to(device), *there, got, slots, edges, k, *rest), slope, 1e-4)


def graphs(device: str, experts: int, k: int, padded: bool) -> None:
    logits = awkward_logits(150, experts)
    real = torch.rand(150) < 0.7
    chosen = torch.zeros(150, experts).scatter(1, top_reference(logits, k), 1.0)
    chosen = chosen * real[:, None] if padded else chosen
    got = select_triton.count_pairs(logits.to(device), from_a_mask(real.to(device)) if padded else None, k, 64)
    same(got.sum(0), chosen.t() @ chosen)


def order(device: str, padded: bool, wanted: int) -> None:
    values = torch.randn(41, 13)
    values[:, ::3] = values[:, ::3].round()
    values[::5, 1], values[1::5, 2], values[7, 3] = torch.inf, -torch.inf, torch.nan
    real = torch.rand(41) < 0.6 if padded else None
    below = torch.tensor(wanted)
    counts = torch.zeros(2, 4, 256, dtype=torch.int64, device=device)
    for byte in range(4):
        there = None if real is None else from_a_mask(real.to(device))
        statistics_triton.count_bytes(values.to(device), there, below.to(device), counts, byte)
    same(statistics_triton.midpoint(below.to(device), counts), midpoint(values, real, below, lambda x: x))
    same(statistics_triton.at_rank(below.to(device), counts), order_statistic(values, real, below))


def comparisons(device: str) -> dict[str, Callable[[], None]]:
    """Return what to compare on a device, by name."""
    found: dict[str, Callable[[], None]] = {}

    def add(what: Callable[..., None], *given: Any, **named: Any) -> None:
        name = " ".join([what.__name__, *map(str, given), *(f"{key}={value}" for key, value in named.items())])
        assert name not in found, name
        found[name] = partial(what, device, *given, **named)

    short_dtypes = [torch.float16, torch.bfloat16]
    for dtype, (width, dim) in itertools.product(short_dtypes, ((5, 100), (140, 128))):
        for weight_dtype in (dtype, torch.float32):
            add(products, dtype, weight_dtype, width, dim)
    add(one_token_at_a_time)
    for dtype, padded in itertools.product(short_dtypes, (False, True)):
        add(clusters, dtype, torch.float32 if padded else dtype, padded)
    for due in (False, True):
        add(spreads, due)
    for state in itertools.product((0.0, 3.0), (False, True), (False, True), (False, True)):
        add(means, *state)
    for experts, k in ((1, 1), (6, 1), (6, 6), (13, 4), (64, 8)):
        for how, informed in CASES:
            for eps in (None, 0.0, 0.3):
                add(choices, experts, k, how, informed, eps, experts)
        for padded in (False, True):
            add(graphs, experts, k, padded)
    for (experts, k, most), (how, informed) in itertools.product(((6, 1, 6), (13, 4, 6), (64, 8, 64), (40, 17, 40)), CASES):
        add(strips_of_their_own, experts, k, how, informed, most)
    for padded, wanted in itertools.product((False, True), (0, 1, 2, 17, 200, 400, 533, 1000)):
        add(order, padded, wanted)
    for (experts, k, most), (how, informed) in itertools.product(((6, 1, 1), (13, 4, 6), (64, 8, 16)), CASES):
        add(choices, experts, k, how, informed, 1.5, most)
    for (how, informed), powers in itertools.product(CASES, ((2.5, 7.0), (0.5, 0.5))):
        add(choices, 13, 4, how, informed, 1.5, 13, powers)
        add(choices, 13, 4, how, informed, 1.5, 6, powers)
    for eps in (None, 0.3):
        add(choices, 200, 8, *CASES[0], eps, 200)  # more experts than a warp's threads have one each of
    add(clusters, torch.bfloat16, torch.bfloat16, False, dim=fp32_linear_triton.WIDE)
    add(clusters, torch.bfloat16, torch.bfloat16, False, groups=30)  # more tiles than tokens fill
    for how, informed in CASES:  # more slots than are filled one after the other
        for eps, most in ((None, 40), (0.3, 40), (1.5, select_triton.FEW_SLOTS + 4)):
            add(choices, 40, select_triton.FEW_SLOTS + 1, how, informed, eps, most)
    add(graphs, 40, select_triton.FEW_SLOTS + 1, True)
    for weight_dtype in (torch.float32, torch.float16):
        for width, dim in ((5, 100), (70, 128)):
            add(products, torch.float32, weight_dtype, width, dim)
        add(clusters, torch.float32, weight_dtype, weight_dtype == torch.float32)
    return found
