"""In training, the strips of `smooth` end where the rows for their experts end: counts, naive loop, continuity, overflow."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from references import reference
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context, Experts, MoE
from holdfast.kernels.grouped import dispatch
from holdfast.layers import experts as experts_module
from holdfast.routing import Scores, Selection, SmoothTopK
from holdfast.routing.declarations import LayerSizes

LINES = 3
WIDE = 3.0  # a running width at which most experts lie in the strip


def select_from(select: SmoothTopK, logits: Tensor, real: Tensor | None = None) -> Selection:
    select.begin_training_forward()
    found: Selection = select(Scores(logits, logits.softmax(-1), False), logits, Context(token_mask=real))
    return found


def extra(selection: Selection, k: int = 2) -> Tensor:
    """How many experts each token uses besides its k best."""
    return (selection.experts < selection.gates.shape[-1]).sum(-1) - k


def padding(sequences: int, length: int) -> Tensor:
    real = torch.ones(sequences, length, dtype=torch.bool)
    real[1:, length // 2 :] = False
    return real


ADVERSARIAL = {
    "random": lambda: torch.randn(3, 21, 8),
    "all experts tie": lambda: torch.zeros(3, 21, 8),
    "all gaps are equal": lambda: torch.tensor([2.0, 1.5, *[1.0] * 6]).expand(3, 21, 8).clone(),
    "many equal gaps": lambda: (2 * torch.randn(3, 21, 8)).round() / 2,
    "one token has nearly all ties": lambda: torch.cat([torch.zeros(3, 1, 8), torch.randn(3, 20, 8)], dim=1),
    "infinite gaps": lambda: torch.randn(3, 21, 8).masked_fill(torch.arange(8) > 3, -torch.inf),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("budget", "most", "control"), [(0.5, None, "quantile"), (0.3, 5, "quantile"), (0.7, None, "loss")])
@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_no_batch_uses_more_rows_than_there_are(kind: str, budget: float, most: int, control: Any, padded: bool) -> None:
    logits, real = ADVERSARIAL[kind](), padding(3, 21) if padded else None
    select = SmoothTopK(8, 2, budget=budget, most=most, control=control, eps=WIDE)
    found = extra(select_from(select, logits, real))
    assert 0 <= int(found.sum()) <= math.ceil(2 * Fraction(str(budget)) * 63)
    assert select.most_rows(63) == 2 * 63 + math.ceil(2 * Fraction(str(budget)) * 63)
    if real is not None:
        assert int(found[real].sum()) <= math.ceil(2 * Fraction(str(budget)) * int(real.sum()))
    if kind == "random":  # all rows are in use: the strip is as wide as there are rows
        assert int(found.sum()) == math.ceil(2 * Fraction(str(budget)) * 63)


@pytest.mark.parametrize("control", ["quantile", "loss"])
def test_with_all_rows_a_training_batch_uses_every_expert_of_its_strips(control: Any) -> None:
    logits, sizes = ADVERSARIAL["random"](), LayerSizes(16, 8, 21, 2, 8, 8, 4)
    limited, whole = (SmoothTopK(8, 2, control=control, eps=WIDE, rows=rows) for rows in ("budget", "all"))
    found = select_from(whole, logits)
    assert int(extra(found).sum()) > 63 == int(extra(select_from(limited, logits)).sum())
    assert whole.most_rows(63) is None and float(whole.overflow) == 0
    assert whole.declares.active is not None and whole.declares.active(sizes).training_rows == 8
    evaluated = whole.eval()(Scores(logits, logits.softmax(-1), False), logits, Context())  # which has no limit
    if control == "loss":  # the other width has followed the batch
        assert torch.equal(found.experts, evaluated.experts) and torch.equal(found.weights, evaluated.weights)


@pytest.mark.parametrize("options", [{}, {"most": 4}, {"control": "loss"}, {"budget": 0.0}, {"a": 2.0, "b": 5.0}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_strip_without_rows_is_that_of_the_naive_loop(options: dict[str, Any], padded: bool) -> None:
    router = holdfast.create_router("smooth", dim=12, experts=7, **{"eps": WIDE, "budget": 0.25, **options})
    real = padding(3, 17) if padded else None
    tokens = torch.randn(3, 17, 12, requires_grad=True)
    results = []
    for routing in (reference(router, tokens, Context(token_mask=real)), router(tokens, Context(token_mask=real))):
        mix = torch.linspace(-1, 2, 51 * 7).view(51, 7)
        total = (routing.dense_weights * mix).sum() + routing.loss
        results.append((routing, torch.autograd.grad(total, [tokens, *router.parameters()], allow_unused=True)))
    (expected, slopes), (got, gradients) = results
    assert torch.equal(got.chosen, expected.chosen)
    torch.testing.assert_close(got.dense_weights, expected.dense_weights, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradients, slopes, atol=1e-5, rtol=1e-4)
    if options.get("budget") != 0:
        assert router.select.overflow > 0  # type: ignore[operator]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("event", ["rows begin to run out", "a row goes to another expert"])
def test_nothing_jumps(event: str, most: int | None, padded: bool) -> None:
    """Find the event on lines between two batches: on both sides of it, weights are the same."""
    real = padding(3, 21) if padded else None
    runs_out = event == "rows begin to run out"
    for seed in range(LINES):
        generator = torch.Generator().manual_seed(seed)
        start, end = (torch.randn(3, 21, 8, generator=generator, dtype=torch.float64) for _ in range(2))
        start, end = (3 * start, 0.3 * end) if runs_out else (0.5 * start, 0.5 * end)
        select = SmoothTopK(8, 2, most=most, eps=0.4)

        def at(place: float, select: SmoothTopK = select, start: Tensor = start, end: Tensor = end) -> tuple[Tensor, Tensor]:
            """Return the weights at a place on the line, and what changes in the event."""
            select.get_buffer("pending").zero_()  # the running width stays the same
            found = select_from(select, start + place * (end - start), real)
            dense = torch.zeros(3, 21, 9, dtype=torch.float64).scatter(-1, found.experts, found.weights)[..., :8]
            assert runs_out or select.overflow > 0
            return dense, select.overflow > 0 if runs_out else dense > 0

        low, high = 0.0, 1.0
        at_start = at(low)[1]
        assert not torch.equal(at(high)[1], at_start)
        while high - low > 1e-12:
            middle = (low + high) / 2
            low, high = (middle, high) if torch.equal(at(middle)[1], at_start) else (low, middle)
        assert (at(low)[0] - at(high)[0]).abs().max() < 1e-8


def test_the_strip_is_narrower_only_on_overflow() -> None:
    logits = torch.randn(4, 50, 8)
    ranked = logits.sort(-1, descending=True).values
    gaps = (ranked[..., 1:2] - ranked[..., 2:]).flatten().sort().values
    for in_strip in (0, 150, 200, 201, 300):  # there are rows for 200
        width = float((gaps[in_strip - 1] + gaps[in_strip]) / 2) if in_strip else 0.0
        select = SmoothTopK(8, 2, eps=width)
        free = SmoothTopK(8, 2, eps=width).eval()
        got, unlimited = select_from(select, logits), free(Scores(logits, logits.softmax(-1), False), logits, Context())
        assert extra(unlimited).sum() == in_strip and extra(got).sum() == min(in_strip, 200)
        assert torch.equal(got.experts, unlimited.experts) == (in_strip <= 200)
        assert torch.equal(got.weights, unlimited.weights) == (in_strip <= 200)
        torch.testing.assert_close(float(select.overflow), max(0, in_strip - 200) / max(in_strip, 1))


def test_overflow_is_0_in_steady_state() -> None:
    router = holdfast.create_router("smooth", dim=16, experts=16, eps=WIDE)
    shares = []
    for _ in range(40):
        router(torch.randn(4, 64, 16))
        shares.append(float(router.select.overflow))  # type: ignore[arg-type]
    assert shares[0] > 0.5 and shares[1:] == [0.0] * 39
    assert set(router.snapshot()) == {"width", "overflow"}


def test_overflow_is_not_saved_and_0_after_loading(tmp_path: Path) -> None:
    model: Any = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="smooth", eps=WIDE).train()
    model(input_ids=torch.randint(3, 64, (2, 13)), use_cache=False)
    shares = [module.overflow for module in model.modules() if isinstance(module, SmoothTopK)]
    assert len(shares) == 3 and all(share > 0 for share in shares)
    assert not any("overflow" in name for name in model.state_dict())
    holdfast.save(model, tmp_path)
    loaded: Any = holdfast.load(tmp_path)
    assert [float(module.overflow) for module in loaded.modules() if isinstance(module, SmoothTopK)] == [0.0] * 3


@pytest.mark.parametrize("control", ["quantile", "loss"])
def test_other_tokens_change_a_strip_only_on_overflow_and_only_in_training(control: Any) -> None:
    logits = torch.randn(2, 21, 8)
    crowd = torch.cat([logits[:1], 0.01 * torch.randn(1, 21, 8)])
    for eps, training, same in ((WIDE, True, False), (1e-3, True, True), (WIDE, False, True)):
        first, select = (SmoothTopK(8, 2, control=control, eps=eps).train(training) for _ in range(2))
        one, other = select_from(first, logits).weights[0], select_from(select, crowd).weights[0]
        assert torch.equal(one, other) == same
        assert (select.most_rows(42) is None) != training
        select.learning = False
        assert select.most_rows(42) is None


def test_padding_takes_no_rows_from_real_tokens() -> None:
    logits, real = torch.randn(3, 20, 8), padding(3, 20)
    zeros = logits.where(real.unsqueeze(-1), 0.0)  # padding that ties everywhere would use every expert
    found = []
    for batch in (logits, zeros):
        select = SmoothTopK(8, 2, eps=WIDE)
        selection = select_from(select, batch, real)
        found.append((selection.weights[real], select.overflow.clone()))
        assert extra(selection)[real].sum() == real.sum()
    alone = SmoothTopK(8, 2, eps=WIDE)
    found.append((select_from(alone, logits[real].unsqueeze(0)).weights[0], alone.overflow))
    for weights, overflow in found[1:]:
        assert torch.equal(weights, found[0][0]) and torch.equal(overflow, found[0][1])


def test_a_dispatch_has_the_rows_it_is_given_or_refuses() -> None:
    chosen = torch.tensor([[0, 2, 3], [1, 3, 3], [2, 0, 3]])  # 3 is unused
    plan = dispatch(chosen, 3, 5)
    assert plan.order.tolist() == [0, 7, 3, 1, 6] and plan.offsets.tolist() == [2, 3, 5]
    assert_refused("5 slots have an expert, but most_rows is 4", dispatch, chosen, 3, 4)
    traced = torch.compile(lambda: dispatch(chosen, 3, 4), backend="eager", fullgraph=True)()
    assert traced.order.tolist() == [0, 7, 3, 1] and traced.offsets.tolist() == [2, 3, 4]
    assert (traced.slots < traced.used).sum() == 4


class Allocated:
    """The rows of each dispatch, as on a GPU: `most_rows`, or one for each slot."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, chosen: Tensor, experts: int, most_rows: int | None = None) -> Any:
        self.rows.append(chosen.numel() if most_rows is None else most_rows)
        return dispatch(chosen, experts, most_rows)


@pytest.mark.parametrize("control", ["quantile", "loss"])
@pytest.mark.parametrize("kind", ["layer", "sparsified", "rerouted"])
def test_experts_allocate_k_and_twice_the_budget_in_training_and_all_slots_in_evaluation(kind: str, control: Any) -> None:
    options: dict[str, Any] = {"eps": WIDE, "budget": 0.25, "control": control}
    ids, inputs = torch.randint(3, 64, (2, 13)), torch.randn(2, 13, 16)
    model: Any
    if kind == "layer":
        model = MoE(holdfast.create_router("smooth", dim=16, experts=8, **options), Experts(16, 16, 8))
    elif kind == "sparsified":
        model = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="smooth", **options)
    else:
        model = holdfast.reroute(tiny("mixtral"), "smooth", **options)

    def allocated(*, training: bool) -> set[int]:
        model.train(training)
        with patch.object(experts_module, "dispatch", Allocated()) as seen:
            model(inputs) if kind == "layer" else model(input_ids=ids, use_cache=False)
        return set(seen.rows)

    slots = 26 * 8 if kind != "rerouted" else 26 * model.config.num_local_experts
    assert allocated(training=True) == {2 * 26 + 13} and allocated(training=False) == {slots}
    if kind == "rerouted":
        holdfast.reroute(model, "top-p")
        assert allocated(training=True) == {slots}
        holdfast.restore(model)
        assert not any("context_capture" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("control", ["quantile", "loss"])
def test_a_compiled_layer_has_the_same_strips(control: Any, padded: bool) -> None:
    results = []
    context = Context(token_mask=padding(2, 20) if padded else None)
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        layer = MoE(holdfast.create_router("smooth", dim=16, experts=8, eps=WIDE, control=control), Experts(16, 16, 8))
        run: Any = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        tokens = torch.randn(2, 20, 16, requires_grad=True)
        for _ in range(2):
            out, routing = run(tokens, context)
            (out.square().sum() + routing.loss).backward()
        select: Any = layer.router.select
        results.append([out, tokens.grad, routing.weights, select.overflow.clone(), select.width])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@on_gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "options"), [("smooth", {}), ("smooth", {"control": "loss"}), ("symphony+smooth", {"most": 6})]
)
def test_a_gpu_has_the_strips_of_a_cpu_and_does_not_wait(name: str, options: dict[str, Any], padded: bool) -> None:
    real = padding(3, 40) if padded else None
    options = {"eps": 0.5, "budget": 0.4, **options} | ({"init": "uniform"} if "symphony" in name else {})
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = MoE(holdfast.create_router(name, dim=32, experts=12, k=3, **options), Experts(32, 24, 12)).to(device)
        tokens = torch.randn(3, 40, 32).to(device).requires_grad_()
        context = Context(token_mask=None if real is None else real.to(device))
        layer(tokens, context)[0].sum().backward()  # compiles the kernels
        layer.zero_grad(set_to_none=True)
        tokens.grad = None
        layer.router.load_state_dict(holdfast.create_router(name, dim=32, experts=12, k=3, **options).state_dict())
        torch.manual_seed(1)
        layer.router.get_parameter("score.weight").data.copy_(torch.randn(12, 32) / 8)
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            out, routing = layer(tokens, context)
            (out.square().sum() + routing.loss).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        select: Any = layer.router.select
        found.append([out, tokens.grad, routing.dense_weights, select.overflow, layer.experts.down_proj.grad])
        assert routing.used.sum() <= select.most_rows(120)
    assert found[0][3] > 0
    for mine, theirs in zip(*found, strict=True):
        assert (theirs.cpu() - mine).norm() <= 2e-3 * mine.norm()


@on_gpu
def test_a_captured_step_has_the_strips_of_an_eager_one() -> None:
    layer = MoE(holdfast.create_router("smooth", dim=32, experts=12, eps=0.5), Experts(32, 24, 12)).cuda()
    layer.router.check_finite = False
    layer.router.select.get_buffer("seen").fill_(1)
    batches = [torch.randn(3, 40, 32, device="cuda") * (0.3 if step % 2 else 1.0) for step in range(6)]
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    eager = [
        (layer(tokens)[0].detach().clone(), layer.router.select.get_buffer("staged_overflow").clone()) for tokens in batches
    ]
    given = batches[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = layer(given)
    layer.load_state_dict(start)
    for tokens, (expected, overflow) in zip(batches, eager, strict=True):
        given.copy_(tokens)
        graph.replay()
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.router.select.overflow, overflow)
    assert any(overflow > 0 for _, overflow in eager)


@on_gpu
def test_a_training_step_takes_memory_for_its_rows_only() -> None:
    peaks = {}
    for name in ("smoe", "smooth"):
        router = holdfast.create_router(name, dim=512, experts=64, k=8).cuda()
        layer = MoE(router, Experts(512, 256, 64)).cuda().bfloat16()
        tokens = torch.randn(4, 1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer(tokens)[0].sum().backward()
            peaks[name] = torch.cuda.max_memory_allocated() - before
            layer.zero_grad(set_to_none=True)
            tokens.grad = None
    assert peaks["smooth"] < 1.35 * peaks["smoe"], peaks
