"""The MoE layer: one graph under torch.compile, repeatable to the bit, shared experts, no waiting on a GPU."""

from typing import Any

import pytest
import torch
from router_names import WITHOUT_CONTEXT
from tiers import quick_or_slow
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint
from wording import assert_refused

import holdfast
from holdfast import MoE, Routing
from holdfast.layers import LAYERS, name_layers
from holdfast.layers.moe import RoutedLayer

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def layer(name: str, device: str, dtype: torch.dtype = torch.float32, *, shared: bool = False) -> RoutedLayer:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=32, experts=8, losses=holdfast.Losses(balance=0.1, z=0.01))
    experts = holdfast.Experts(32, 24, 8, bias=True)
    kind = LAYERS[router.select.layer_kind]
    return kind(router, experts, holdfast.FeedForward(32, 48) if shared else None).to(device, dtype)


def tokens_for(device: str, dtype: torch.dtype = torch.float32, length: int = 17) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, length, 32, device=device, dtype=dtype).requires_grad_()


def step(module: Any, tokens: Tensor) -> tuple[Tensor, Routing, list[Tensor]]:
    out, routing = module(tokens)
    total = (out.float() * torch.linspace(-1, 1, 32, device=out.device)).sum() + routing.loss
    wanted = [tokens, *(p for p in module.parameters() if p.requires_grad)]
    return out, routing, list(torch.autograd.grad(total, wanted))


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_layer_runs_the_operators_of_the_experts(device: str) -> None:
    """A layer that took `torch.compile` for `torch.export` would run every expert on every token, with the same result."""
    targets: set[str] = set()

    def collect(module: GraphModule, inputs: list[Tensor]) -> GraphModule:
        graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
        targets.update(str(node.target) for graph in graphs for node in graph.nodes)
        return module

    torch.compiler.reset()
    torch.compile(layer("smoe", device), fullgraph=True, backend=collect)(tokens_for(device))
    assert {"holdfast.gather_mm.default", "holdfast.mm_combine.default"} <= targets


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), [("smoe", torch.bfloat16), ("remoe", torch.float32)], ids=["smoe", "remoe"])
def test_the_compiled_layer_is_one_graph_and_equals_eager_in_training(name: str, dtype: torch.dtype, device: str) -> None:
    """With inductor, forward and backward; `smoe` has full slots, `remoe` ragged ones and state."""
    torch.compiler.reset()
    module, tokens = layer(name, device, dtype, shared=True), tokens_for(device, dtype)
    compiled = torch.compile(module, fullgraph=True)
    out, routing, grads = step(compiled, tokens)
    expected_out, expected_routing, expected_grads = step(layer(name, device, dtype, shared=True), tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.equal(routing.experts, expected_routing.experts)
    pairs = zip([out, routing.loss, *grads], [expected_out, expected_routing.loss, *expected_grads], strict=True)
    for got, expected in pairs:
        assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_CONTEXT)
def test_the_layer_compiles_for_any_number_of_tokens(name: str) -> None:
    torch.compiler.reset()
    eager = layer(name, "cpu")
    compiled = torch.compile(layer(name, "cpu"), fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (17, 5, 40):
        tokens = tokens_for("cpu", length=length)
        torch.testing.assert_close(step(compiled, tokens)[0], step(eager, tokens)[0])


@pytest.mark.parametrize("name", quick_or_slow(["smoe", "remoe", "symphony", "smooth"], ["smoe"]))
def test_many_layers_share_one_compilation(name: str) -> None:
    """Layers compiled one by one, as large models are, must not compile anew for each layer's name or state."""
    torch.compiler.reset()
    compiled = CompileCounter()
    layers = torch.nn.ModuleList([layer(name, "cpu") for _ in range(12)])
    name_layers(layers)
    tokens = tokens_for("cpu")
    for module in layers:
        module.compile(fullgraph=True, backend=compiled)
        module(tokens)
    assert compiled.frame_count == 1


@pytest.mark.parametrize("name", WITHOUT_CONTEXT)
def test_two_runs_with_one_seed_agree_to_the_bit(name: str) -> None:
    """Three training steps each: outputs, losses, gradients and parameters."""
    outcomes = []
    for _ in range(2):
        module, tokens = layer(name, "cpu"), tokens_for("cpu")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        seen: list[Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            out, routing = module(tokens)
            (out.square().mean() + routing.loss).backward()
            optimizer.step()
            seen += [out, routing.loss, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        outcomes.append([*seen, *module.state_dict().values()])
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoe", "remoe"])
def test_a_compiled_function_that_recomputes_the_layer_equals_eager_and_counts_once(name: str) -> None:
    outcomes = []
    for compiled in (False, True):
        torch.compiler.reset()
        module = layer(name, "cpu")

        def forward(tokens: Tensor, module: RoutedLayer = module) -> Tensor:
            def body(x: Tensor) -> tuple[Tensor, Tensor]:
                out, routing = module(x)
                return out, routing.loss

            out, loss = checkpoint(body, tokens, use_reentrant=False)
            return out.square().mean() + loss

        run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
        for _ in range(3):
            run(tokens_for("cpu")).backward()
        outcomes.append([*(p.grad for p in module.parameters() if p.grad is not None), *module.eval().buffers()])
    torch.testing.assert_close(*outcomes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in WITHOUT_CONTEXT if name != "base"])  # its auction reads prices
def test_no_step_on_a_gpu_waits_for_the_host(name: str, dtype: torch.dtype) -> None:
    module, tokens = layer(name, "cuda", dtype), tokens_for("cuda", dtype)
    step(module, tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_reports_nan_tokens_late_but_by_layer() -> None:
    module, tokens = layer("smoe", "cuda"), tokens_for("cuda").detach()
    module.router.layer = "layers.3.mlp"
    module(torch.full_like(tokens, torch.nan))
    torch.cuda.synchronize()
    assert_refused(r"layers\.3\.mlp: .*NaN", module, tokens)


def test_shared_experts_are_added_for_every_token() -> None:
    with_shared, tokens = layer("smoe", "cpu", shared=True), tokens_for("cpu")
    assert with_shared.shared is not None
    alone = MoE(with_shared.router, with_shared.experts)
    torch.testing.assert_close(with_shared(tokens)[0], alone(tokens)[0] + with_shared.shared(tokens))


@pytest.mark.parametrize("name", WITHOUT_CONTEXT)
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(name: str) -> None:
    module = layer(name, "cpu")
    out, routing = module(torch.randn(0, 5, 32))
    assert out.shape == (0, 5, 32)
    (out.sum() + routing.loss).backward()
    for parameter in module.experts.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_nan_tokens_are_an_error_that_names_the_layer() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Identity(), layer("smoe", "cpu")])})
    name_layers(model)
    tokens = torch.randn(2, 5, 32)
    tokens[0, 1, 2] = torch.nan
    moe = model["layers"][1]  # type: ignore[index]
    assert_refused(r"^layers\.1\.router: .* because 1 of 10 tokens", moe, tokens)
    out, _ = moe.eval()(tokens)
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all() and out[1].isfinite().all()


def test_nan_router_weights_are_an_error_that_says_so() -> None:
    module = layer("smoe", "cpu")
    with torch.no_grad():
        module.router.score.weight.fill_(torch.nan)  # type: ignore[union-attr, operator]
    assert_refused("weights", module, torch.randn(2, 5, 32))


def test_nan_tokens_pass_when_asked_to() -> None:
    router = holdfast.create_router("smoe", dim=32, experts=8, check_finite=False)
    out, _ = MoE(router, holdfast.Experts(32, 24, 8))(torch.full((1, 2, 32), torch.nan))
    assert out.isnan().all()


def test_a_router_and_experts_that_do_not_fit_are_one_clear_sentence() -> None:
    router = holdfast.create_router("smoe", dim=32, experts=8)
    assert_refused(r"\b8 experts.*\b4\b", MoE, router, holdfast.Experts(32, 24, 4))
    assert_refused(r"width 32.*16", MoE, router, holdfast.Experts(16, 24, 8))


def test_tokens_that_are_no_floats_are_refused() -> None:
    layer = MoE(holdfast.create_router("smoe", dim=32, experts=8), holdfast.Experts(32, 24, 8))
    assert_refused(r"torch\.int64.*floating", layer, torch.ones(1, 2, 32, dtype=torch.int64))


def test_experts_of_ones_own_need_only_three_arguments() -> None:
    class Doubled(holdfast.Experts):
        def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(tokens, experts, weights)

    torch.manual_seed(0)
    router, own = holdfast.create_router("smoe", dim=8, experts=4, k=2), Doubled(8, 8, 4)
    plain = holdfast.Experts(8, 8, 4)
    plain.load_state_dict(own.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(holdfast.MoE(router, own)(x)[0], 2 * holdfast.MoE(router, plain)(x)[0])
