"""PEFT's LoRA on changed models: adapters learn, nothing else does, and merging them changes no output."""

from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import IDS, changed, logits
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.hub.layers import moe_layers
from holdfast.hub.replacements import ReroutedGate

peft = pytest.importorskip("peft")

PROJECTIONS = ["q_proj", "v_proj"]


def adapted(model: Any, targets: list[str], **options: Any) -> Any:
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, **options))


def train(model: Any, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.train()(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("targets", [PROJECTIONS, [*PROJECTIONS, "o_proj"]])
def test_adapters_of_a_rerouted_model_train_and_merge(targets: list[str], tmp_path: Path) -> None:
    model = holdfast.reroute(tiny("mixtral"), "smooth", losses=holdfast.Losses(z=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wrapped = adapted(model, targets)
    losses = train(wrapped)
    assert sum(losses[-3:]) < sum(losses[:3]) - 3
    names = {
        name.replace("base_model.model.", "").replace("base_layer.", ""): name for name, _ in wrapped.named_parameters()
    }
    assert before.keys() <= names.keys()
    for name, value in before.items():
        assert torch.equal(wrapped.get_parameter(names[name]), value), name
    learned = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert learned and all(".lora_" in name for name in learned)

    unmerged = logits(wrapped)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(logits(merged), unmerged, atol=1e-4, rtol=1e-4)
    assert all(isinstance(moe_layer.gate, ReroutedGate) for moe_layer in moe_layers(merged))
    moved = {name for name, parameter in merged.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if any(target in name for target in targets)}
    loaded = holdfast.load(holdfast.save(merged, tmp_path / "saved"))
    assert torch.equal(logits(loaded), logits(merged))
    width = [moe_layer.router.get_buffer("select.width") for moe_layer in moe_layers(loaded) if moe_layer.router is not None]
    assert len(set(map(float, width))) == 3, "the strips have learned nothing"


def test_the_losses_of_routers_are_in_the_loss_of_a_wrapped_model() -> None:
    with_losses, without = (
        adapted(holdfast.reroute(tiny("mixtral"), "smoe", losses=losses), PROJECTIONS).train()
        for losses in (holdfast.Losses(z=0.5), None)
    )
    seen: list[Tensor] = []
    for module in with_losses.modules():
        if isinstance(module, holdfast.Router):
            module.register_forward_hook(lambda _, given, routing: seen.append(routing.loss))
    total = with_losses(input_ids=IDS, labels=IDS).loss
    assert len(seen) == 3
    torch.testing.assert_close(total, without(input_ids=IDS, labels=IDS).loss + torch.stack(seen).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "router", "targets"),
    [
        ("mixtral", "similarity", ["q_proj", "o_proj"]),
        ("mixtral", "attention", ["v_proj", "o_proj"]),
        ("llama", "attention", ["o_proj"]),
        ("gpt2", "attention", ["c_attn", "attn.c_proj"]),
    ],
)
@pytest.mark.parametrize("dora", [False, True])
def test_routers_that_read_attention_read_it_with_its_adapters(
    family: str, router: str, targets: list[str], dora: bool
) -> None:
    """At the attention's output, or at its projection too: what adapters do to them shows, merged or not.

    DoRA rescales the rows of the projection, as well as adding to them.
    """
    model = changed(family, router)
    plain = logits(model)
    wrapped = adapted(model, targets, use_dora=dora, fan_in_fan_out=family == "gpt2")
    torch.testing.assert_close(logits(wrapped), plain, atol=1e-5, rtol=1e-5)
    train(wrapped, steps=5)
    unmerged = logits(wrapped)
    assert (unmerged - plain).abs().max() > 0.1
    wrapped.merge_adapter()
    torch.testing.assert_close(logits(wrapped), unmerged, atol=1e-4, rtol=1e-4)
    wrapped.unmerge_adapter()
    torch.testing.assert_close(logits(wrapped), unmerged, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(wrapped.merge_and_unload()), unmerged, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("router", ["native", "smooth", "ac+symphony"])
@pytest.mark.parametrize("target", ["mlp.experts.gate_up_proj", "gate.weight"])
def test_adapters_of_experts_and_gates_train_and_merge(target: str, router: str) -> None:
    wrapped = adapted(holdfast.reroute(tiny("mixtral"), router), ["q_proj"], target_parameters=[target])
    with_adapter = [name for name, _ in wrapped.named_parameters() if "lora_B" in name and "q_proj" not in name]
    assert len(with_adapter) == 3
    train(wrapped, steps=5)
    assert all(wrapped.get_parameter(name).abs().max() > 0 for name in with_adapter)
    unmerged = logits(wrapped)
    torch.testing.assert_close(logits(wrapped.merge_and_unload()), unmerged, atol=1e-4, rtol=1e-4)


def test_a_wrapped_model_is_changed_inside_its_wrapper() -> None:
    """Or the changes would be lost when the wrapper comes off."""
    wrapped = adapted(tiny("mixtral"), PROJECTIONS)
    assert_refused("get_base_model", holdfast.reroute, wrapped, "smooth")
    assert_refused("get_base_model", holdfast.sparsify, adapted(tiny_dense("llama"), PROJECTIONS), experts=4)
    holdfast.reroute(wrapped.get_base_model(), "smooth", losses=holdfast.Losses(z=0.1))
    train(wrapped, steps=5)
    unmerged = logits(wrapped)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(logits(merged), unmerged, atol=1e-4, rtol=1e-4)
    assert merged.config.holdfast["layers"]


def test_adapters_that_are_switched_off_are_not_read_either() -> None:
    model = holdfast.reroute(tiny("mixtral"), "similarity")
    plain, wrapped = logits(model), adapted(model, ["o_proj"])
    train(wrapped, steps=5)
    with wrapped.disable_adapter():
        torch.testing.assert_close(logits(wrapped), plain, atol=1e-5, rtol=1e-5)


def test_an_adapter_that_changes_more_than_a_weight_is_refused_in_a_sentence() -> None:
    """The similarity router reads no weights and works; the attention router names the adapter and what to do."""
    ia3 = peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[], init_ia3_weights=False)
    logits(peft.get_peft_model(holdfast.reroute(tiny("mixtral"), "similarity"), ia3))
    wrapped = peft.get_peft_model(holdfast.reroute(tiny("mixtral"), "attention"), ia3)
    assert_refused(r"ia3.*merge", logits, wrapped)
    wrapped.merge_adapter()
    assert logits(wrapped).isfinite().all()
