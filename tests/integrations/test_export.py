"""`torch.export` of layers and models with every router: the numbers of the original, and no operator of ours to run."""

import copy
from typing import Any

import pytest
import torch
from exported import build, layer_inputs, model_inputs, real_logits, trained_layer
from router_names import IN_TEXT_MODELS
from tiers import quick_or_slow
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.kernels.select import exported_keys, top
from holdfast.routing.state import StatefulPart

LENGTHS = [(2, 12), (1, 7), (3, 20)]
DYNAMIC = {0: torch.export.Dim("sequences", max=64), 1: torch.export.Dim("length", max=64)}


def operators(program: torch.export.ExportedProgram) -> set[str]:
    """Our operators in a program."""
    targets = {str(node.target) for graph in program.graph_module.modules() for node in graph.graph.nodes}
    return {target for target in targets if target.startswith("holdfast.")}


def state(model: torch.nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        f"{name}.{key}"
        for name, part in model.named_modules()
        if isinstance(part, StatefulPart)
        for key, _ in part.named_buffers(recurse=False)
    }
    return {name: buffers[name] for name in names}


@pytest.mark.parametrize("router", quick_or_slow(holdfast.list_routers(), ["smooth"]))
def test_a_layer_in_evaluation_becomes_a_program_without_operators_of_ours(router: str) -> None:
    layer = trained_layer(router)
    inputs = layer_inputs(2, 12)
    program = torch.export.export(layer, (), inputs, dynamic_shapes={"tokens": DYNAMIC, "mask": DYNAMIC})
    assert not operators(program)
    run = program.module()
    for sequences, length in LENGTHS:
        inputs = layer_inputs(sequences, length)
        torch.testing.assert_close(run(**inputs), layer(**inputs), atol=1e-5, rtol=1e-5)


def compare_models(kind: str, router: str, training: bool) -> None:
    """Three forwards and a backward of a model and of its exported program, with what they learn."""
    torch.manual_seed(0)
    model: Any = build(kind, router)
    model(**model_inputs(3, 12), use_cache=False)
    model.train(training)
    twin = copy.deepcopy(model)
    labels = {"labels": model_inputs(2, 12)["input_ids"]} if training else {}
    program = torch.export.export(model, (), {**model_inputs(2, 12), **labels, "use_cache": False})
    run = program.module()
    for _ in range(3):
        inputs = model_inputs(2, 12)
        labels = {"labels": inputs["input_ids"]} if training else {}
        got, expected = run(**inputs, **labels, use_cache=False), twin(**inputs, **labels, use_cache=False)
        torch.testing.assert_close(
            real_logits(got.logits, inputs), real_logits(expected.logits, inputs), atol=1e-4, rtol=1e-4
        )
    for out in (got, expected):
        (out.loss if training else real_logits(out.logits, inputs).square().mean()).backward()
    parameters = dict(run.named_parameters())
    for name, parameter in twin.named_parameters():
        assert (parameter.grad is None) == (parameters[name].grad is None), name
        if parameter.grad is not None:
            difference = (parameters[name].grad - parameter.grad).norm()
            assert difference <= 1e-3 * parameter.grad.norm() + 1e-7, name
    buffers = state(twin, dict(run.named_buffers()))
    torch.testing.assert_close(buffers, state(twin, dict(twin.named_buffers())), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "router"), [("gpt2", "smooth"), ("mixtral", "symphony+smooth")])
def test_a_program_of_a_model_in_training_learns_what_the_model_learns(kind: str, router: str) -> None:
    compare_models(kind, router, training=True)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("router", IN_TEXT_MODELS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_programs_of_models_compute_and_learn_the_same(kind: str, router: str, training: bool) -> None:
    compare_models(kind, router, training)


def test_a_layer_with_its_routing_as_output_can_be_exported() -> None:
    layer = holdfast.MoE(holdfast.create_router("smooth", dim=8, experts=4, eps=0.5), holdfast.Experts(8, 8, 4)).eval()
    tokens = torch.randn(2, 5, 8)
    out, routing = torch.export.export(layer, (tokens,)).module()(tokens)
    expected, expected_routing = layer(tokens)
    torch.testing.assert_close(out, expected)
    assert torch.equal(routing.experts, expected_routing.experts)


def test_an_expert_that_overflows_and_was_not_chosen_does_not_show() -> None:
    layer = holdfast.MoE(holdfast.create_router("smoe", dim=8, experts=4), holdfast.Experts(8, 8, 4)).eval()
    with torch.no_grad():
        layer.router.score.get_parameter("weight").copy_(torch.tensor([1.0, 1.0, 1.0, 0.0]).unsqueeze(1).expand(4, 8))
        layer.experts.down_proj[3] = torch.inf
    tokens = torch.rand(1, 5, 8) + 0.1
    out, _ = torch.export.export(layer, (tokens,)).module()(tokens)
    assert out.isfinite().all()
    torch.testing.assert_close(out, layer(tokens)[0])


def test_exported_keys_order_numbers_as_top_does() -> None:
    hard = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 3e-45, 1.17549435e-38, 1.0, 1.0000001, -1.0, -1.0000001, 3.4e38, torch.inf, -torch.inf]
    )
    for experts in (1, 2, 7, 64, 1000):
        for values in (hard[torch.randint(0, len(hard), (50, experts))], (torch.randn(50, experts) * 3).round() / 3):
            for k in {1, (experts + 1) // 2, experts}:
                assert torch.equal(exported_keys(values).topk(k).indices, top(values, k))


def test_tracing_a_router_raises_an_error_with_advice() -> None:
    router = holdfast.create_router("smooth", dim=8, experts=4).eval()
    assert_refused(r"torch\.export\.export", torch.jit.trace, router, (torch.randn(2, 5, 8),))
