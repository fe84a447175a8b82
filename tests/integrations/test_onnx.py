"""ONNX models of layers and models with every router, run by onnxruntime: the numbers of torch."""

from typing import Any

import pytest
import torch
from exported import RAGGED, build, layer_inputs, model_inputs, real_logits, trained_layer
from router_names import IN_TEXT_MODELS
from torch import Tensor, nn

import holdfast

pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX models are run by onnxruntime")

LENGTHS = [(2, 12), (1, 7), (3, 20)]

REFUSED = ["capacity"]


def session(module: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """The module as an ONNX model for any number of sequences of any length."""
    shapes = {name: {0: "sequences", 1: "length"} for name in inputs}
    program = torch.onnx.export(module, (), kwargs=inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])


def run(onnx_model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    return [torch.from_numpy(out) for out in onnx_model.run(None, {name: value.numpy() for name, value in inputs.items()})]


@pytest.mark.slow
@pytest.mark.parametrize("router", [name for name in holdfast.list_routers() if name not in REFUSED])
def test_onnxruntime_computes_a_layer_as_torch_does(router: str) -> None:
    layer = trained_layer(router)
    onnx_model = session(layer, layer_inputs(2, 12))
    unused = False
    for sequences, length in LENGTHS:
        inputs = layer_inputs(sequences, length)
        with torch.no_grad():
            expected, experts, weights = layer(**inputs)
        got, got_experts, got_weights = run(onnx_model, inputs)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got_weights, weights, atol=1e-4, rtol=1e-4)
        assert torch.equal(got_experts.where(weights > 1e-4, 0), experts.where(weights > 1e-4, 0))
        unused |= bool((experts == layer.moe.experts.experts).any())
    assert unused == (router in RAGGED)


@pytest.mark.slow
def test_ties_go_to_the_lower_index_in_onnx_too() -> None:
    layer = trained_layer("smoe")
    inputs = layer_inputs(2, 12)
    onnx_model = session(layer, inputs)
    inputs["tokens"].zero_()
    _, experts, _ = run(onnx_model, inputs)
    assert (experts == torch.tensor([0, 1])).all()


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize("router", [name for name in IN_TEXT_MODELS if name not in REFUSED])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_onnxruntime_computes_a_model_as_torch_does(kind: str, router: str) -> None:
    model = build(kind, router)
    model(**model_inputs(4, 20), use_cache=False)
    module = Logits(model).eval()
    onnx_model = session(module, model_inputs(2, 12))
    for sequences, length in LENGTHS:
        inputs = model_inputs(sequences, length)
        with torch.no_grad():
            expected = module(**inputs)
        (got,) = run(onnx_model, inputs)
        # A strip of `smooth` makes rounding errors as much larger as it is narrow.
        torch.testing.assert_close(
            real_logits(got, inputs), real_logits(expected, inputs), atol=1e-3 if router == "smooth" else 1e-4, rtol=1e-4
        )


@pytest.mark.slow
def test_a_router_that_onnx_has_no_operators_for_is_refused() -> None:
    with pytest.raises(Exception, match="ONNX lacks operators that Capacity needs"):
        session(trained_layer("capacity"), layer_inputs(2, 12))


def test_a_router_that_would_have_to_learn_is_refused() -> None:
    layer = trained_layer("smooth").train()
    with pytest.raises(Exception, match=r"ONNX.*model\.eval\(\)"):
        session(layer, layer_inputs(2, 12))
