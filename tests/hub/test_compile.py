"""Compiled models with routers of ours."""

from typing import Any

import pytest
import torch
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor

import holdfast

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
LAYERS = {"num_hidden_layers": 2}  # a first one and one with a previous: each layer more is traced and compiled once more
ROUTERS = ["smoe", "symphony+smooth", "xmoe+top-p", "ac+symphony", "similarity", "attention"]


def build(kind: str, router: str) -> Any:
    if kind == "llama":
        return holdfast.sparsify(tiny_dense("llama", **LAYERS), experts=4, router=router, noise=0.5)
    return holdfast.reroute(tiny("mixtral", **LAYERS), router)


@pytest.mark.slow  # tests/layers/test_layer.py compiles layers in the quick tier
@pytest.mark.every_combination
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
# The default backend not with smooth: the strip of a fresh model is so narrow that rounding shows 500-fold.
@pytest.mark.parametrize(("router", "backend"), [*((router, "aot_eager") for router in ROUTERS), ("symphony", "inductor")])
def test_a_model_compiles_to_one_graph(kind: str, router: str, backend: str) -> None:
    torch.compiler.reset()
    model = build(kind, router)
    with torch.no_grad():
        before: Tensor = model(input_ids=IDS, use_cache=False).logits
        compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
        after: Tensor = compiled(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("router", "one_graph"), [("symphony+smooth", True), ("similarity", False)])
def test_a_compiled_model_fills_its_cache(router: str, one_graph: bool) -> None:
    """Routers that look at other tokens keep rows on the KV cache, and making room for them breaks the graph."""
    torch.compiler.reset()
    model = holdfast.reroute(tiny("mixtral", **LAYERS), router, layers=[1])
    compiled: Any = torch.compile(model, fullgraph=one_graph, backend="aot_eager")
    with torch.no_grad():
        before: Tensor = model(input_ids=IDS).logits
        first = compiled(input_ids=IDS[:, :8])
        second = compiled(input_ids=IDS[:, 8:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), before, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("router", ["symphony+smooth"])
def test_a_compiled_model_trains_the_same(kind: str, router: str) -> None:
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build(kind, router).train()
        run: Any = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(2):
            model.zero_grad()
            loss = run(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        results.append((loss.detach(), gradients))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-4, rtol=1e-3)


# Transformers' own experts functions on a CPU: where they compile to one graph (float32), training or not.
ONE_GRAPH = {("eager", False): False, ("eager", True): False, ("grouped_mm", False): True, ("grouped_mm", True): False}
ONE_GRAPH |= {("batched_mm", False): True, ("batched_mm", True): True}


def compiles(model: Any, training: bool) -> bool:
    """Whether a model without a cache compiles to one graph, backward included."""
    torch.compiler.reset()
    compiled: Any = torch.compile(model.train(training), fullgraph=True, backend="aot_eager")
    try:
        with torch.set_grad_enabled(training):
            logits = compiled(input_ids=IDS, use_cache=False).logits
            if training:
                logits.sum().backward()
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError):  # type: ignore[attr-defined]
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("router", [None, "symphony", "smooth"])
@pytest.mark.parametrize(
    ("experts", "training"),
    [case if case == ("grouped_mm", True) else pytest.param(*case, marks=pytest.mark.slow) for case in ONE_GRAPH],
)
def test_experts_functions_of_transformers_decide_whether_there_is_one_graph(
    experts: str, training: bool, router: str | None
) -> None:
    """Without a router of ours as with one of a fixed k; a router with a varying k runs our function, which compiles."""
    model = tiny("mixtral", num_hidden_layers=1)
    model.set_experts_implementation(experts)
    if router is not None:
        holdfast.reroute(model, router)
    assert compiles(model, training) == (router == "smooth" or ONE_GRAPH[experts, training])


@pytest.mark.slow
def test_half_precision_trains_in_one_graph_with_grouped_products() -> None:
    model = tiny("mixtral", num_hidden_layers=1).bfloat16()
    model.set_experts_implementation("grouped_mm")
    assert compiles(model, training=True)
    assert compiles(holdfast.reroute(model, "symphony"), training=True)
