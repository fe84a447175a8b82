"""Routers for some layers, by name, in real tiny models: placed, trained, saved, loaded and taken out again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny
from tiny_dense import inputs, outputs, tiny_dense
from wording import assert_refused

import holdfast
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers


def placed(model: Any) -> list[str | None]:
    """Return the router of each MoE layer, None where none was put in."""
    specs = specs_of(model)
    return [specs[layer.name].router if layer.name in specs else None for layer in moe_layers(model)]


def train_step(model: Any, batch: dict[str, Any]) -> None:
    model.train()
    loss = model(**batch).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    model.eval()


def test_mutual_inform_alternates_in_a_v_moe(tmp_path: Path) -> None:
    """001 uses both informers in one V-MoE, layer by layer."""
    model = tiny_dense("vit", num_hidden_layers=4)
    holdfast.sparsify(model, experts=4, router="similarity@even|attention@odd", init="random")
    assert placed(model) == ["similarity", "attention", "similarity", "attention"]
    routers = [layer.router for layer in moe_layers(model)]
    kinds = [type(router.inform[0]).__name__ for router in routers if router is not None]
    assert kinds == ["Similarity", "AttentionPosterior"] * 2
    train_step(model, inputs("vit"))
    before = outputs(model, inputs("vit"))
    holdfast.save(model, tmp_path / "saved")
    loaded = holdfast.load(tmp_path / "saved")
    assert placed(loaded) == placed(model)
    torch.testing.assert_close(outputs(loaded, inputs("vit")), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ("ac@1,3,5", ["smoe", "ac", "smoe", "ac", "smoe", "ac"]),  # alternating: the paper's layers 2, 4 and 6
        ("ac@last:3", ["smoe"] * 3 + ["ac"] * 3),  # back half
        ("ac@last:4", ["smoe"] * 2 + ["ac"] * 4),  # skip 1: its layers 3 to 6
        ("ac@all", ["ac"] * 6),  # full
    ],
)
def test_the_placement_of_ac_is_one_name(router: str, expected: list[str]) -> None:
    """002's ablation of placement in Switch, which has six layers (its Table 10)."""
    model = tiny_dense("gpt2", n_layer=6)
    holdfast.sparsify(model, experts=4, router=router, init="random")
    assert placed(model) == expected
    for seed in (1, 2):  # the second training forward commits the spreads of the first
        train_step(model, inputs("gpt2", seed))
    for index, layer in enumerate(moe_layers(model)):
        assert layer.router is not None
        spreads = layer.router.snapshot().get("spreads")
        clusters = expected[index] == "ac" and index > 0  # the first MoE layer has none before it, and is plain
        assert (spreads is not None and not torch.equal(spreads, torch.ones_like(spreads))) == clusters


def test_layers_of_a_name_are_counted_among_those_that_become_sparse() -> None:
    model = tiny_dense("gpt2", n_layer=4)
    holdfast.sparsify(model, experts=4, router="xmoe+symphony@last:1|smoe", layers="alternate")
    assert [layer.name for layer in moe_layers(model)] == ["transformer.h.1.mlp", "transformer.h.3.mlp"]
    assert placed(model) == ["smoe", "xmoe+symphony"]
    with pytest.raises(ValueError, match="'ac@3': there is no layer 3; layers are counted from 0 to 1"):
        holdfast.sparsify(tiny_dense("gpt2", n_layer=4), experts=4, router="ac@3", layers="alternate")


def test_layers_that_no_router_is_for_are_native_bit_for_bit(tmp_path: Path) -> None:
    model, batch = tiny("mixtral"), {"input_ids": torch.arange(3, 27).view(2, 12)}
    with torch.no_grad(), holdfast.trace(model) as before:
        model(**batch)
    holdfast.reroute(model, "smooth[budget=0.5]@2")
    assert placed(model) == [None, None, "smooth"]
    with torch.no_grad(), holdfast.trace(model) as after:
        changed = model(**batch).logits
    for layer in (0, 1):
        assert torch.equal(before[layer].weights, after[layer].weights)
    holdfast.save(model, tmp_path / "saved")
    loaded = holdfast.load(tmp_path / "saved")
    assert placed(loaded) == placed(model)
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, changed)


def test_several_routers_are_put_in_and_taken_out_at_once() -> None:
    model, batch = tiny("olmoe"), {"input_ids": torch.arange(3, 27).view(2, 12)}
    with torch.no_grad():
        before = model(**batch).logits
    holdfast.reroute(model, "smooth[k=3]@0|ac@2", k=1)
    assert placed(model) == ["smooth", "native", "ac"]  # `ac` reads the routing of the layer before it
    assert [spec.k for spec in specs_of(model).values()] == [3, 2, 1]
    holdfast.reroute(model, "native@1|symphony")
    assert placed(model) == ["symphony", "native", "symphony"]
    holdfast.restore(model)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, before)


def test_layers_of_a_name_are_counted_among_those_that_the_argument_chooses() -> None:
    model = tiny("mixtral", num_hidden_layers=4)
    holdfast.reroute(model, "smooth@0|switch@1", layers="last:2")
    assert placed(model) == [None, None, "smooth", "switch"]
    with pytest.raises(ValueError, match="there is no layer 2; layers are counted from 0 to 1"):
        holdfast.reroute(model, "smooth@2", layers="last:2")


@pytest.mark.parametrize(
    ("router", "sentence"),
    [
        ("smooth@0|ac@0", "layer 0 is named twice"),
        ("smooth@9", "there is no layer 9"),
        ("smooth@1|smoth", "did you mean 'smooth'"),
        ("smooth[k=99]@1", "k is 99"),
    ],
)
def test_a_mistake_changes_nothing(router: str, sentence: str) -> None:
    model = tiny("mixtral")
    assert_refused(sentence, holdfast.reroute, model, router)
    assert placed(model) == [None] * 3 and not specs_of(model)


def test_k_in_brackets_is_the_k_of_the_layers() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, router="smoe[k=3]")
    assert [spec.k for spec in specs_of(model).values()] == [3, 3, 3]
    mixed = holdfast.sparsify(tiny_dense("llama"), experts=4, router="smoe[k=3]@even|smoe", k=1)
    with torch.no_grad(), holdfast.trace(mixed) as routes:
        mixed(**inputs("llama"))
    assert [int(routing.used.sum(-1).max()) for routing in routes] == [3, 1, 3]
    rerouted = holdfast.reroute(tiny("mixtral"), "smoe[k=3]")
    assert {spec.k for spec in specs_of(rerouted).values()} == {3}
    assert_refused("the option k is given twice", holdfast.reroute, tiny("mixtral"), "smoe[k=3]", k=3)
    assert_refused("the option k is given twice", holdfast.sparsify, tiny_dense("llama"), experts=4, router="smoe[k=3]", k=3)


def test_unnamed_layers_get_smoe_with_the_models_k() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, router="xmoe[k=1]@1", k=3)
    assert [(spec.router, spec.k) for spec in specs_of(model).values()] == [("smoe", 3), ("xmoe", 1), ("smoe", 3)]
