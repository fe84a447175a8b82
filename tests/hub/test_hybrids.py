"""Families with layers that have no attention: every MoE layer is rerouted, or the model is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import HYBRIDS, tiny
from tiny_dense import tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.auditing import certify_model
from holdfast.hub import MOE_FAMILIES
from holdfast.hub.engines import _expert_modules
from holdfast.hub.layers import moe_layers
from holdfast.planning.meta_model import read_config

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_put((torch.tensor([1, 1]), torch.tensor([0, 1])), torch.tensor(0))
PER_TOKEN = ["smoe", "symphony", "ac", "smooth", "xmoe", "ac+symphony+smooth"]  # look at one token at a time


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits
    return out[MASK.bool()]


def generated(model: Any, **options: Any) -> Tensor:
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


@pytest.mark.parametrize("router", PER_TOKEN)
@pytest.mark.parametrize("family", HYBRIDS)
def test_routers_of_single_tokens_act_in_every_layer_and_come_out_again(family: str, router: str, tmp_path: Path) -> None:
    model = tiny(family)
    before = logits(model)
    holdfast.reroute(model, router)
    assert all(moe_layer.router is not None for moe_layer in moe_layers(model))
    after = logits(model)
    if router in ("smoe", "symphony", "ac"):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
    else:
        assert not torch.allclose(after, before, atol=1e-3)
    cached, uncached = generated(model), generated(model, use_cache=False)
    assert torch.equal(cached, uncached)
    holdfast.save(model, tmp_path / "saved")
    assert torch.equal(logits(holdfast.load(tmp_path / "saved")), after)
    holdfast.restore(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_layer_without_attention_learns_from_real_tokens_only(family: str) -> None:
    """The state of the first layers, after one training forward, does not depend on what padding holds."""
    labels = IDS.where(MASK.bool() & MASK.roll(1, 1).bool(), torch.tensor(-100))  # none is predicted from padding
    states = []
    for filler in (3, 60):
        model = holdfast.reroute(tiny(family), "ac+symphony+smooth", losses=holdfast.Losses(balance=0.1)).train()
        out = model(input_ids=IDS.where(MASK.bool(), torch.tensor(filler)), attention_mask=MASK, labels=labels)
        out.loss.backward()
        first = moe_layers(model)[0]
        assert first.router is not None
        states.append([*first.router.buffers(), first.gate.weight.grad])
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("router", ["similarity", "attention", "symphony+similarity"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_routers_that_look_at_other_tokens_are_for_layers_with_attention(family: str, router: str) -> None:
    model = tiny(family)
    before = logits(model)
    assert_refused(r"attention.*layers=\[2\]", holdfast.reroute, model, router)
    assert torch.equal(logits(model), before)
    holdfast.reroute(model, router, layers=[2])
    assert not torch.allclose(logits(model), before, atol=1e-3)
    assert torch.equal(generated(model), generated(model, use_cache=False))


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_router_that_sees_later_tokens_takes_no_tokens_after_a_state(family: str) -> None:
    with pytest.warns(UserWarning, match="later tokens"):
        model = holdfast.reroute(tiny(family), "ac", stats="batch", layers=[1])
    first = model(input_ids=IDS, use_cache=True)
    assert_refused("KV cache", model, input_ids=IDS[:, :1], past_key_values=first.past_key_values)


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_layer_is_audited_certified_and_found_for_sharding(family: str) -> None:
    model = tiny(family)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    assert len(holdfast.audit(model, [batch], perturb=()).layers) == 3
    assert len(certify_model(model, [batch]).layers) == 3
    assert len(_expert_modules(model)) == 3


READERS: dict[str, Callable[[Any], Any]] = {
    "reroute": lambda model: holdfast.reroute(model, "native"),
    "trace": lambda model: holdfast.trace(model).__enter__(),
    "audit": lambda model: holdfast.audit(model, [{"input_ids": IDS}]),
    "certify": lambda model: certify_model(model, [{"input_ids": IDS}]),
    "shard_experts": _expert_modules,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_row_that_misses_layers_is_refused_by_everything(
    family: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row as for a family that has attention in every layer, which only the last layer fits."""
    monkeypatch.setitem(MOE_FAMILIES, family, replace(MOE_FAMILIES[family], recurrent=None))
    assert_refused(r"layers\.0\..*\b1 layer", READERS[reader], tiny(family))


def test_a_row_that_fits_no_layer_of_a_model_with_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOE_FAMILIES, "mixtral", replace(MOE_FAMILIES["mixtral"], block="feed_forward"))
    assert_refused(r"layers\.0\..*\b0 layer", holdfast.reroute, tiny("mixtral"), "smoe")


def test_experts_without_a_gate_of_the_familys_name_are_refused() -> None:
    model = tiny("mixtral")
    model.model.layers[1].mlp.other = model.model.layers[1].mlp._modules.pop("gate")
    assert_refused(r"model\.layers\.1\.mlp\.experts", holdfast.reroute, model, "smoe")


def test_sparsify_refuses_a_model_with_a_layer_of_another_kind() -> None:
    model = tiny_dense("llama")
    model.model.layers[1].mlp = torch.nn.Linear(32, 32)
    assert_refused(r"model\.layers\.1\.mlp", holdfast.sparsify, model, experts=4)


def test_a_sparse_layer_that_was_moved_is_refused() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4)
    model.extra = model.model.layers[0].mlp
    model.model.layers[0].mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match="extra"), holdfast.trace(model):
        pass


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_plan_refuses_layers_without_attention(family: str) -> None:
    assert_refused("attention", read_config, family)
