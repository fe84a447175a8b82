"""Every combination on a GPU: the routes of a CPU, and no step that waits for the host."""

from typing import Any

import pytest
import torch
from combinations import COMBINATIONS, context_for
from contexts import on_device
from torch import Tensor

import holdfast
from holdfast import Context, MoE
from holdfast.kernels import fp32_linear, select
from holdfast.routing import Previous, Routing
from holdfast.testing.router_under_test import STEEP, differing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_gpu_routes_as_a_cpu_does_and_does_not_wait(combination: str) -> None:
    name, options = COMBINATIONS[combination]
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=16, experts=8, **options)
    batches = [torch.randn(4, 32, 16) for _ in range(3)]
    on_gpu = holdfast.create_router(name, dim=16, experts=8, **options).cuda()
    on_gpu.load_state_dict(router.state_dict())
    layer = MoE(on_gpu, holdfast.Experts(16, 16, 8).cuda())
    for index, tokens in enumerate(batches):
        router(tokens, context_for(tokens, 8))
        x, context = tokens.cuda().requires_grad_(), on_device(context_for(tokens, 8), "cuda")
        torch.cuda.set_sync_debug_mode("error" if index > 0 else "default")
        try:
            out, routing = layer(x, context)
            (out.square().mean() + routing.loss).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    tokens = batches[0]
    expected = router.eval()(tokens, context_for(tokens, 8))
    got = layer.eval().router(tokens.cuda(), on_device(context_for(tokens, 8), "cuda"))
    back = Routing(got.logits.cpu(), got.gates.cpu(), got.experts.cpu(), got.weights.cpu())
    assert not differing(back, expected, weights_within=STEEP).any()
    for key, value in router.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[key].cpu(), value, atol=1e-5, rtol=1e-4)


HALF: dict[str, tuple[str, dict[str, Any]]] = {
    "smoe": ("smoe", {}),
    "switch": ("switch", {"k": 2}),
    "xmoe": ("xmoe", {}),
    "symphony": ("symphony", {"init": "uniform"}),
    "ac": ("ac", {}),
    "ac, variance, mixed": ("ac", {"spread": "variance", "mix": 2}),
    "ac, of the batch": ("ac", {"stats": "batch"}),
    "smooth": ("smooth", {"eps": 0.1}),
    "symphony+smooth": ("symphony+smooth", {"init": "uniform", "eps": 0.1}),
}


def previous_of(tokens: Tensor, experts: int) -> Previous:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        router = holdfast.create_router("smoe", dim=tokens.shape[-1], experts=experts).to(tokens.device).eval()
        return Previous(tokens, router(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", HALF)
def test_tokens_of_any_precision_are_routed_as_float32_ones_without_kernels(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, gradients and what is learnt: through tensor cores, clusters in order and all."""
    name, options = HALF[kind]
    torch.manual_seed(0)
    routers = [holdfast.create_router(name, dim=96, experts=12, **{"k": 3, **options}).cuda() for _ in range(2)]
    routers[1].load_state_dict(routers[0].state_dict())
    token_mask = torch.rand(4, 100).cuda() < 0.8
    for _ in range(3):
        half = torch.randn(4, 100, 96).cuda().to(dtype)
        previous = previous_of(half, 12)
        results = []
        for router, tokens in zip(routers, (half, half.float()), strict=True):
            tokens.requires_grad_()
            before = Previous(tokens.detach(), previous.routing)
            with monkeypatch.context() as plain:
                if router is routers[1]:
                    plain.setattr(fp32_linear, "has_linear_kernel", lambda *_: False)
                routing = router(tokens, Context(token_mask=token_mask, previous=before))
            total = (
                routing.weights * torch.arange(1, routing.weights.shape[-1] + 1).cuda()
            ).sum() + routing.gates.square().sum()
            results.append((routing, torch.autograd.grad(total, [tokens, *router.parameters()])))
        (got, grads), (expected, exact) = results
        torch.testing.assert_close(got.logits, expected.logits, atol=2e-5, rtol=2e-5)
        assert not differing(got, expected, weights_within=STEEP).any()
        for ours, theirs in zip(grads, exact, strict=True):
            tolerance = 2e-4 if ours.dtype == torch.float32 else 1e-2
            assert (ours.float() - theirs).norm() <= tolerance * theirs.norm() + 1e-6
    torch.testing.assert_close(routers[0].state_dict(), routers[1].state_dict(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("experts", [select.MOST_IN_GRAPH, select.MOST_IN_GRAPH + 40])
def test_a_wide_expert_graph_is_learnt_as_on_a_cpu(experts: int) -> None:
    router = holdfast.create_router("symphony", dim=16, experts=experts, k=8)
    on_gpu = holdfast.create_router("symphony", dim=16, experts=experts, k=8).cuda()
    on_gpu.load_state_dict(router.state_dict())
    tokens, token_mask = torch.randn(4, 50, 16), torch.rand(4, 50) < 0.8
    router(tokens, Context(token_mask=token_mask))
    on_gpu(tokens.cuda(), Context(token_mask=token_mask.cuda()))
    learnt = {key: value for key, value in router.state_dict().items() if key.endswith("staged_together")}
    assert [bool(value.any()) for value in learnt.values()] == [True]
    for key, value in learnt.items():
        assert torch.equal(on_gpu.state_dict()[key].cpu(), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clusters_of_tokens_that_lie_apart_are_those_of_a_copy(dtype: torch.dtype) -> None:
    wide, real = torch.randn(4, 100, 200).cuda().to(dtype), torch.rand(4, 200).cuda() < 0.8
    tokens, token_mask = wide[..., :96], real[:, ::2]
    routing = previous_of(tokens.contiguous(), 12).routing
    spreads = []
    for previous, own in ((tokens, token_mask), (tokens.contiguous(), token_mask.contiguous())):
        router = holdfast.create_router("ac", dim=96, experts=12, k=3).cuda()
        router(tokens, Context(token_mask=own, previous=Previous(previous, routing)))
        spreads.append(router.eval().score.spreads)
    assert torch.equal(spreads[0], spreads[1]) and not (spreads[0] == 1).all()  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("rank", [None, 24])
def test_half_precision_similarity_is_that_of_its_float32_copy(rank: int | None) -> None:
    """Weights too are bfloat16: what `reduce` learns from a gradient that is rounded to it anyway."""
    half = holdfast.create_router("similarity", dim=96, experts=12, k=3, rank=rank, tau=9.0).cuda().bfloat16()
    exact = holdfast.create_router("similarity", dim=96, experts=12, k=3, rank=rank, tau=9.0).cuda()
    exact.load_state_dict(half.state_dict())
    tokens = torch.randn(4, 200, 96).cuda().bfloat16()
    results = []
    for router, copy in ((half, tokens.clone()), (exact, tokens.float())):
        copy.requires_grad_()
        routing = router(copy, Context(causal=True))
        results.append((routing, torch.autograd.grad(routing.gates.square().sum(), [copy, *router.parameters()])))
    (got, grads), (expected, wanted) = results
    assert not differing(got, expected, weights_within=STEEP).any()
    for ours, theirs in zip(grads, wanted, strict=True):
        assert (ours.float() - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.parametrize("kind", ["smoe", "symphony", "ac", "smooth"])
def test_a_router_with_its_kernels_is_one_graph(kind: str) -> None:
    name, options = HALF[kind]
    torch.manual_seed(0)
    torch.compiler.reset()
    router = holdfast.create_router(name, dim=96, experts=12, **{"k": 3, **options}).cuda().eval()
    tokens = torch.randn(4, 100, 96).cuda().bfloat16().requires_grad_()
    context = Context(token_mask=torch.rand(4, 100).cuda() < 0.8, previous=previous_of(tokens.detach(), 12))
    results = []
    for run in (router, torch.compile(router, fullgraph=True)):
        routing = run(tokens, context)
        results.append(
            (routing.weights, *torch.autograd.grad(routing.weights.square().sum(), [tokens, *router.parameters()]))
        )
    for compiled, eager in zip(*results, strict=True):
        assert (compiled.float() - eager.float()).norm() <= 1e-3 * eager.float().norm() + 1e-6


def test_results_repeat_to_the_bit() -> None:
    tokens = torch.randn(4, 500, 96).cuda().bfloat16().requires_grad_()
    for kind in ("smoe", "symphony", "ac", "smooth"):
        name, options = HALF[kind]
        seen = []
        for _ in range(2):
            torch.manual_seed(0)
            router = holdfast.create_router(name, dim=96, experts=12, **{"k": 3, **options}).cuda()
            routing = router(tokens, Context(previous=previous_of(tokens.detach(), 12)))
            grads = torch.autograd.grad(routing.weights.square().sum(), [tokens, *router.parameters()])
            seen.append([routing.weights, *grads, *router.eval().state_dict().values()])
        assert all(torch.equal(first, second) for first, second in zip(*seen, strict=True)), kind
