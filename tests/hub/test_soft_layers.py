"""SoftMoE and SMEAR layers in Hugging Face models, and everything that works on such models or refuses them."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import soft_layers_on_ranks
import torch
from changed_models import trainer_of
from ranks import on_ranks
from soft_layers_on_ranks import ROUTERS, batches, built, train
from tiers import quick_or_slow
from tiny import tiny, with_checkpointing
from tiny_dense import LAYERS, inputs, outputs, tiny_dense
from wording import assert_refused

import holdfast
from holdfast.hub.install import specs_of
from holdfast.hub.replacements import SparseLayer
from holdfast.planning.meta_model import build_on_meta, read_config

FAMILIES = ["vit", "swin", "siglip", "bert"]
NAMES = ["softmoe", "softmoe[slots=3]+symphony", "softmoe+ac", "smear", "smear[average=gates]"]
PAIRS = [(family, name) for family in FAMILIES for name in NAMES if not (family == "swin" and "ac" in name)]
QUICK = [*zip(FAMILIES, ["softmoe", "smear", "softmoe+ac", "softmoe[slots=3]+symphony"], strict=True)]
QUICK += [("bert", "smear[average=gates]")]


def soft(family: str, router: str, **options: Any) -> Any:
    return holdfast.sparsify(tiny_dense(family), experts=4, router=router, **options)


@pytest.mark.parametrize(("family", "router"), quick_or_slow(PAIRS, QUICK))
def test_a_few_steps_reduce_the_loss_and_reach_every_parameter(family: str, router: str) -> None:
    model = soft(family, router, init="random", losses=holdfast.Losses(z=0.01)).train()
    batch, optimizer = inputs(family), torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        torch.manual_seed(0)  # the same dropout
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("family", "router"), quick_or_slow(PAIRS, QUICK))
def test_saved_models_compute_the_same_after_loading(family: str, router: str, tmp_path: Path) -> None:
    model = soft(family, router, shared=1, noise=0.1).train()
    for seed in range(2):
        model(**inputs(family, seed))
    model.eval()
    holdfast.save(model, tmp_path / "saved")
    again = holdfast.load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(outputs(again, inputs(family)), outputs(model, inputs(family)))
    assert specs_of(again) == specs_of(model)
    opened = type(model).from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(outputs(opened, inputs(family)), outputs(model, inputs(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_smear_of_copies_computes_what_the_dense_model_did_and_softmoe_does_not(family: str) -> None:
    with torch.no_grad():
        dense = outputs(tiny_dense(family), inputs(family))
        torch.testing.assert_close(outputs(soft(family, "smear"), inputs(family)), dense, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(outputs(soft(family, "softmoe"), inputs(family)), dense, atol=1e-3)


def test_layer_and_slots_are_another_way_to_write_the_router() -> None:
    one = soft("bert", "symphony", layer="soft", slots=3)
    other = soft("bert", "softmoe[slots=3]+symphony")
    assert specs_of(one) == specs_of(other)
    assert specs_of(soft("bert", "smoe", layer="soft")) == specs_of(soft("bert", "softmoe"))
    assert specs_of(soft("bert", "smoe", layer="smear")) == specs_of(soft("bert", "smear"))
    assert_refused("unknown layer 'sof': did you mean 'soft'", soft, "bert", "smoe", layer="sof")


@pytest.mark.parametrize("router", NAMES)
def test_padding_and_other_sequences_change_nothing(router: str) -> None:
    model, batch = soft("bert", router), inputs("bert")
    with torch.no_grad():
        together = model(**batch).logits[1, :9]
        alone = model(input_ids=batch["input_ids"][1:, :9], attention_mask=batch["attention_mask"][1:, :9]).logits[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_ac_in_a_model_learns_spreads_and_scales_the_second_layer_on() -> None:
    model = soft("bert", "softmoe+ac", init="random").train()
    ids = torch.randint(3, 96, (16, 12))
    for _ in range(3):
        model(input_ids=ids)
    model.eval()
    blocks = [module for module in model.modules() if isinstance(module, SparseLayer)]
    spreads = [block.router.score.get_buffer("spreads") for block in blocks]
    assert bool((spreads[0] == 1).all()) and not bool((spreads[1] == 1).all())
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, SparseLayer):
            module.router.score.get_buffer("spreads").fill_(1)
    with torch.no_grad():
        assert not torch.allclose(plain(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-6)


def bert_masks() -> dict[str, torch.Tensor]:
    """Return masks (2,1,12,12), True where a token of BERT may attend to another one."""
    real = inputs("bert")["attention_mask"].bool()
    places = torch.arange(real.shape[1])
    sequence = (places >= 5).long()
    parted, gap = sequence.unsqueeze(1) == sequence, real & (places != 5) & (places != 6)
    return {
        "packed": parted & real[:, None, None],
        "packed, padding between": parted & gap[:, None, None],
        "padding": real[:, None, None].expand(-1, 1, len(places), -1),
        "padding between": gap[:, None, None].expand(-1, 1, len(places), -1),
        "window": ((places.unsqueeze(1) - places).abs() < 3) & real[:, None, None],
    }


@pytest.mark.parametrize("router", ["softmoe", "smear"])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("kind", ["packed", "packed, padding between", "padding", "padding between", "window"])
def test_rows_with_several_sequences_are_refused(kind: str, added: bool, router: str) -> None:
    """Their layers would mix the sequences, which attention keeps apart."""
    model, ids, mask = soft("bert", router), inputs("bert")["input_ids"], bert_masks()[kind]
    if added:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        if kind.startswith("packed"):
            assert_refused("packs several sequences into one row", model, input_ids=ids, attention_mask=mask)
        else:
            assert model(input_ids=ids, attention_mask=mask).logits.isfinite().all()


def test_packed_rows_of_a_causal_model_are_refused_by_soft_layers_too() -> None:
    """Positions that start anew say where the next sequence begins: transformers makes the mask."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = holdfast.sparsify(tiny_dense("llama"), experts=4, router="softmoe[causal=false]").eval()
        ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
        model(input_ids=ids, use_cache=False)
        positions = torch.cat([torch.arange(7), torch.arange(5)]).unsqueeze(0)
        assert_refused("packs several sequences into one row", model, input_ids=ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("router", ["softmoe", "smear"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_causal_model_refuses_soft_layers_and_is_not_changed(family: str, router: str) -> None:
    model = tiny_dense(family)
    with pytest.raises(ValueError, match="causal=False to accept that the model cannot generate"):
        holdfast.sparsify(model, experts=4, router=router)
    assert not any(isinstance(module, SparseLayer) for module in model.modules())


@pytest.mark.parametrize("router", ["softmoe", "smear"])
def test_a_causal_model_that_asks_for_it_is_warned_about_and_cannot_generate(router: str) -> None:
    with pytest.warns(UserWarning, match="perplexity cannot be compared"):
        model = holdfast.sparsify(tiny_dense("llama"), experts=4, router=f"{router}[causal=false]")
    batch = inputs("llama")
    assert model(**batch).loss.isfinite()
    assert_refused("cannot generate", model.generate, input_ids=batch["input_ids"], max_new_tokens=2)


@pytest.mark.parametrize("router", ["softmoe", "smear+symphony"])
def test_reroute_refuses_soft_layers_in_both_directions(router: str) -> None:
    moe = holdfast.sparsify(tiny_dense("bert"), experts=4)
    for model, name in ((moe, router), (tiny("mixtral"), router), (soft("bert", router), "smoe")):
        assert_refused("layers of their own", holdfast.reroute, model, name)


def test_an_moe_folder_whose_config_names_a_soft_layer_is_refused(tmp_path: Path) -> None:
    from holdfast.hub.install import install_specs
    from holdfast.hub.layers import moe_layers
    from holdfast.hub.specs import LayerSpec

    model = tiny("mixtral")
    name = moe_layers(model)[0].name
    assert_refused("layers of their own", install_specs, model, {name: LayerSpec("softmoe", 2)})


@pytest.mark.parametrize("router", ["softmoe", "smear"])
def test_audits_and_certificates_refuse_soft_layers_in_one_sentence(router: str) -> None:
    model, batch = soft("bert", router), [{"input_ids": inputs("bert")["input_ids"]}]
    for instrument in (holdfast.audit, holdfast.certify):
        assert_refused("every token uses every expert", instrument, model, batch)


@pytest.mark.parametrize("router", ["softmoe[slots=2]", "smear"])
@pytest.mark.parametrize("family", FAMILIES)
def test_traces_have_all_experts_and_the_rows_that_they_compute(family: str, router: str) -> None:
    model = soft(family, router)
    with holdfast.trace(model) as routes, torch.no_grad():
        model(**inputs(family))
    assert len(routes) == LAYERS.get(family, 3)
    for routing in routes:
        assert bool(routing.chosen.all()) and routing.rows is not None
        tokens = len(routing.gates) / 2  # of one of the two sequences
        torch.testing.assert_close(routing.rows, torch.full((len(routing.gates),), 8 / tokens if "soft" in router else 1.0))


def test_checkpointed_training_gives_the_same_gradients_and_state() -> None:
    outcomes = []
    for checkpointing in (False, True):
        model = with_checkpointing(built("softmoe[slots=2]+symphony"), checkpointing)
        for seed in (1, 2):
            model(**inputs("bert", seed)).loss.backward()
        outcomes.append([*(p.grad for p in model.parameters() if p.grad is not None), *model.eval().state_dict().values()])
    torch.testing.assert_close(*outcomes)


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_and_shard_softmoe_but_not_smear(tmp_path: Path) -> None:
    on_ranks(Path(soft_layers_on_ranks.__file__), str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for router in ROUTERS:
        alone = train(built(router), batches())
        for found in ranks:
            torch.testing.assert_close(found[f"DDP {router}"], alone, atol=1e-5, rtol=1e-4)
    for found in ranks:
        assert found["sharded"] < 1e-5
        assert "SMEAR merges all experts" in found["refused"]


def test_a_trainer_and_adapters_train_soft_layers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = soft("bert", "softmoe[slots=2]+symphony", noise=0.1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"]))
    rows = [{name: value[0] for name, value in inputs("bert", seed).items()} for seed in range(4)]
    trainer = trainer_of(wrapped, tmp_path / "run", rows, max_steps=2, per_device_train_batch_size=2)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    wrapped.eval()
    with torch.no_grad():
        adapted = outputs(wrapped, inputs("bert"))
        merged = outputs(wrapped.merge_and_unload(), inputs("bert"))
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("router", ["softmoe[slots=3]+symphony", "softmoe+ac", "smear"])
@pytest.mark.parametrize("shared", [None, 2])
def test_a_plan_counts_the_parameters_and_the_state_of_the_model(router: str, shared: int | None) -> None:
    from tiny_dense import CLASSES, CONFIGS

    sizes = {name: size for name, size in CONFIGS["bert"].items() if size is not None}
    config = read_config("bert", {**sizes, "architectures": [CLASSES["bert"]]})
    planned = build_on_meta(config, router, experts=4, shared=shared)
    model = soft("bert", router, shared=shared)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in planned.parameters()) == count


def test_a_plan_of_softmoe_grows_with_slots_and_not_with_experts_per_token() -> None:
    plan = holdfast.plan("vit", ["smoe", "softmoe", "softmoe[slots=4]", "smear"], experts=8, k=2)
    smoe, one, four, smear = plan.columns
    assert four.forward.experts == pytest.approx(4 * one.forward.experts)
    assert four.experts_a_token == pytest.approx(4 * 8 / 197) and smear.experts_a_token == 1
    assert four.forward.experts / smoe.forward.experts == pytest.approx(4 * 8 / 197 / 2, rel=0.05)
    assert four.forward.parts["slots"] == pytest.approx(4 * one.forward.parts["slots"])
    assert smear.forward.parts["merging"] > 0


def test_no_warning_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        soft("bert", "softmoe")(**inputs("bert"))
