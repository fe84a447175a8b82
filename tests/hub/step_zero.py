"""Whether a sparse model starts where the dense one was: the outputs of each network that experts have replaced."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.hub.layers import moe_layers

FEWEST = 16  # rows of an expert: products of fewer have other kernels, which round in another way (docs/notes.md)
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="rounding is measured with MKL only")


def with_biases(model: Any) -> Any:
    """Return the model with biases that are not 0, as those of a trained model."""
    torch.manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(bias := getattr(module, "bias", None), nn.Parameter) and bias.dim() == 1:
                bias.normal_(std=0.1)
    return model


@torch.no_grad()
def outputs(model: Any, names: list[str], given: dict[str, Any], then: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the logits and the outputs of these modules, which later layers read, or those of `then` in their place."""
    found: dict[str, Tensor] = {}

    def record(name: str, output: Tensor) -> Tensor | None:
        found[name] = output
        return None if then is None else then[name]

    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *call, name=name: record(name, call[2])) for name in names
    ]
    found["logits"] = model(**given).logits
    for hook in hooks:
        hook.remove()
    return found


def assert_step_0(dense: Any, given: dict[str, Any], k: int, **options: Any) -> None:
    """Assert that copied experts return what the dense network does, in every layer.

    If k is 1, bit for bit, and so are the logits; else within 1e-6 of the largest output, for the inputs of the dense model.
    """
    before: dict[str, Tensor] = {}
    for seed in range(50):  # until no router gives an expert only a few tokens
        torch.manual_seed(seed)
        sparse = holdfast.sparsify(copy.deepcopy(dense), experts=3, k=k, **options)
        before = before or outputs(dense, [layer.name for layer in moe_layers(sparse)], given)
        with holdfast.trace(sparse) as routes:
            after = outputs(sparse, [*before][:-1], given, None if k == 1 else before)
        loads = torch.stack([routing.chosen.sum(0) for routing in routes])
        if ((loads == 0) | (loads >= FEWEST)).all() and ((loads > 0).sum(1) > 1).all():
            break
    else:
        pytest.fail(f"every seed gives an expert a few tokens only: {loads}")
    for name, expected in before.items():
        if k == 1:
            assert torch.equal(after[name], expected), name
        assert float((after[name] - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max())), name
