"""Shared experts in sparsified models: they run on every token, start at 0 beside copies, and are saved and planned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_dense import CONFIGS, inputs, outputs, tiny_dense
from torch import Tensor, nn
from wording import assert_refused

import holdfast
from holdfast.hub.install import specs_of
from holdfast.hub.replacements import SparseLayer
from holdfast.hub.specs import read_specs
from holdfast.train.recipe import load_recipe

FAMILIES = sorted(CONFIGS)


def blocks(model: nn.Module) -> list[SparseLayer]:
    return [module for module in model.modules() if isinstance(module, SparseLayer)]


def weights_of(block: SparseLayer) -> dict[str, Tensor]:
    assert block.shared is not None
    return dict(block.shared.named_parameters())


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_copied_experts_with_shared_ones_compute_what_the_dense_model_did(family: str, shared: int) -> None:
    model, batch = tiny_dense(family), inputs(family)
    with torch.no_grad():
        before = outputs(model, batch)
        holdfast.sparsify(model, experts=4, shared=shared)
        torch.testing.assert_close(outputs(model, batch), before, atol=1e-5, rtol=1e-5)
    for block in blocks(model):
        weights = weights_of(block)
        assert bool((weights["down_proj.weight"] == 0).all())
        hidden = block.experts.hidden
        assert weights["up_proj.weight"].shape == (shared * hidden, block.experts.dim)
        copied = block.experts.get_parameter("gate_up_proj" if block.experts.gated else "up_proj")[0, -hidden:]
        assert torch.equal(weights["up_proj.weight"][:hidden], copied)
        if shared > 1:  # another copy would get the same gradients as the first forever
            assert not torch.equal(weights["up_proj.weight"][hidden:], copied)


@pytest.mark.parametrize("init", ["copy", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_shared_experts_learns(family: str, init: Any) -> None:
    model, batch = holdfast.sparsify(tiny_dense(family), experts=4, shared=2, init=init).train(), inputs(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # a projection of 0 passes no gradient to the maps before it in the first step
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    for block in blocks(model):
        for name, parameter in weights_of(block).items():
            assert parameter.grad is not None and bool(parameter.grad.any()), name


def test_the_output_of_shared_experts_is_added_to_that_of_the_selected_ones() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, shared=1, init="random")
    block, seen = blocks(model)[0], dict[str, Tensor]()
    assert block.shared is not None
    block.register_forward_hook(lambda module, given, out: seen.update(tokens=given[0], out=out))
    block.experts.register_forward_hook(lambda module, given, out: seen.update(routed=out))
    with torch.no_grad():
        model(**inputs("llama"))
        expected = seen["routed"].view(seen["out"].shape) + block.shared(seen["tokens"])
    torch.testing.assert_close(seen["out"], expected)


@pytest.mark.parametrize("router", ["symphony", "softmoe", "smooth"])
def test_two_shared_experts_are_one_of_twice_the_width(router: str) -> None:
    model = holdfast.sparsify(tiny_dense("vit"), experts=4, router=router, shared=2, init="random")
    block = blocks(model)[0]
    weights, tokens, total = weights_of(block), torch.randn(3, 32), torch.zeros(3, 32)
    activation = torch.nn.functional.gelu
    ups, biases = weights["up_proj.weight"].chunk(2), weights["up_proj.bias"].chunk(2)
    for up, bias, down in zip(ups, biases, weights["down_proj.weight"].chunk(2, 1), strict=True):
        total = total + activation(tokens @ up.t() + bias) @ down.t()
    assert block.shared is not None
    torch.testing.assert_close(block.shared(tokens), total + weights["down_proj.bias"])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_shared_experts_are_saved_loaded_and_kept_by_reroute(family: str, tmp_path: Path) -> None:
    model = holdfast.sparsify(tiny_dense(family), experts=4, shared=2, init="random")
    holdfast.save(model, tmp_path / "saved")
    again = holdfast.load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(outputs(again, inputs(family)), outputs(model, inputs(family)))
    assert {spec.shared for spec in specs_of(again).values()} == {2}
    before = [weights_of(block)["up_proj.weight"].clone() for block in blocks(again)]
    holdfast.reroute(again, "smooth")
    for block, weight in zip(blocks(again), before, strict=True):
        assert torch.equal(weights_of(block)["up_proj.weight"], weight)
    assert {spec.shared for spec in specs_of(again).values()} == {2}


@pytest.mark.parametrize("value", [0, -1, "2", 1.5, True, 2**62])
def test_a_wrong_number_of_shared_experts_in_a_config_is_refused(value: Any) -> None:
    described = json.loads(json.dumps(holdfast.sparsify(tiny_dense("llama"), experts=4).config.holdfast))
    next(iter(described["layers"].values()))["shared"] = value
    assert_refused("shared", read_specs, described)


def test_a_wrong_number_of_shared_experts_is_refused() -> None:
    assert_refused("shared is 0", holdfast.sparsify, tiny_dense("llama"), experts=4, shared=0)
    assert_refused(r"sparse\.shared", load_recipe, "tiny", {"sparse.shared": 0})


def test_a_recipe_gives_every_router_the_same_shared_experts(tmp_path: Path) -> None:
    from holdfast.train.building import build_model
    from holdfast.train.saved_model import make_task

    recipe = load_recipe("vmoe-tiny", {"sparse.shared": 1})
    task = make_task(recipe, None)
    models = [build_model(task, router, {}, seed=3) for router in ("smoe", "symphony", "softmoe")]
    for first, *others in zip(*(blocks(model) for model in models), strict=True):
        for name, weight in weights_of(first).items():
            assert all(torch.equal(weight, weights_of(other)[name]) for other in others), name
        assert weights_of(first)["down_proj.weight"].std() > 0


def test_active_parameters_count_shared_experts() -> None:
    without, with_two = (holdfast.plan("llama", ["smoe"], experts=4, k=1, shared=shared).columns[0] for shared in (None, 2))
    one_expert = (without.parameters - without.active_parameters) / 3  # all layers together
    assert with_two.active_parameters - without.active_parameters == pytest.approx(2 * one_expert)
    assert with_two.parameters - without.parameters == pytest.approx(2 * one_expert)
