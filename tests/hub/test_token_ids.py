"""Routers that choose by token id, in models: right ids in every kind of forward, one sentence where there are none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import changed as with_router
from changed_models import trainer_of
from tiny_dense import inputs, outputs, tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Losses
from holdfast.hub.engines import set_progress
from holdfast.hub.layers import moe_layers

ROUTERS = ["hash", "stablemoe"]
KINDS = ["llama", "gpt2", "mixtral", "deepseek_v3"]
IDS = torch.randint(3, 64, (3, 10), generator=torch.Generator().manual_seed(0))
LEFT = torch.ones_like(IDS).index_put((torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0])), torch.tensor(0))


def changed(kind: str, router: str, **options: Any) -> Any:
    model = with_router(kind, router, losses=Losses(balance=0.1), **options)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def tables(model: Any) -> list[Tensor]:
    """The table of each layer; StableMoE's in stage 2."""
    routers = [layer.router for layer in moe_layers(model)]
    parts = [part for router in routers if router is not None for part in router.parts if hasattr(part, "table")]
    return [part.get_buffer("table") for part in parts]


def frozen(kind: str, router: str) -> Any:
    """Distilled routers that stage 2 has frozen; `hash` is from the start."""
    model = changed(kind, router)
    set_progress(model, 1.0)
    return model.eval()


def assert_by_ids(model: Any, forwards: list[tuple[Tensor, list[Any]]]) -> None:
    """The routing of each forward is the rows of its ids."""
    for ids, routes in forwards:
        for table, routing in zip(tables(model), routes, strict=True):
            expected = table[ids.flatten()].long().sort(1).values
            assert torch.equal(routing.experts.sort(1).values, expected)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache_beams_and_left_padding_uses_the_ids_of_the_new_tokens(kind: str, router: str) -> None:
    model = frozen(kind, router)
    for options in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
        forwards: list[tuple[Tensor, list[Any]]] = []

        def keep(model: Any, given: Any, named: dict[str, Any], out: Any, forwards: Any = forwards) -> None:
            forwards.append((named["input_ids"], list(routes)))

        with holdfast.trace(model) as routes:
            hook = model.register_forward_hook(keep, with_kwargs=True)
            asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
            cached = model.generate(IDS, attention_mask=LEFT, **asked)
            hook.remove()
        assert {ids.shape[1] for ids, _ in forwards} > {1} and len(forwards) >= 6
        assert_by_ids(model, forwards)
        uncached = model.generate(IDS, attention_mask=LEFT, use_cache=False, **{**asked, "prefill_chunk_size": None})
        assert torch.equal(cached, uncached)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_in_the_place_of_ids_are_refused(kind: str, router: str) -> None:
    model = changed(kind, router).eval()
    model(input_ids=IDS)
    embedded = model.get_input_embeddings()(IDS)
    for call in (lambda: model(inputs_embeds=embedded), lambda: model.base_model(inputs_embeds=embedded)):
        assert_refused("call the whole model with input_ids, not with inputs_embeds", call)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_part_of_the_model_called_alone_does_not_use_the_ids_of_an_earlier_forward(router: str) -> None:
    model = changed("llama", router).train()
    model(input_ids=IDS, labels=IDS)
    assert_refused("call the whole model", model.model, input_ids=IDS.flip(0))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", ["vit", "swin", "siglip"])
def test_a_model_without_token_ids_is_refused_before_it_is_changed(kind: str, router: str) -> None:
    model = tiny_dense(kind)
    before = sorted(model.state_dict())
    with pytest.raises(ValueError, match="chooses experts by token id, and this part of the model reads none"):
        holdfast.sparsify(model, experts=4, router=router)
    assert sorted(model.state_dict()) == before


def test_a_second_forward_before_the_backward_is_refused_with_checkpointing() -> None:
    """The recomputation of the first forward would route the ids of the second."""
    model = changed("llama", "hash")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    first = model(IDS, labels=IDS).loss
    assert_refused("one forward before each backward", model, IDS.flip(1), labels=IDS)
    first.backward()
    model(IDS.flip(1), labels=IDS).loss.backward()


def test_every_layer_has_a_table_of_its_own_for_the_models_vocabulary() -> None:
    found = tables(changed("llama", "hash"))
    assert [table.shape for table in found] == [(96, 2)] * 3
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_hash_keeps_the_outputs_of_a_dense_model_whose_experts_are_copies() -> None:
    for kind in ("llama", "gpt2", "bert"):
        model, batch = tiny_dense(kind), inputs(kind)
        before = outputs(model, batch)
        torch.testing.assert_close(outputs(holdfast.sparsify(model, experts=4, router="hash"), batch), before)


@pytest.mark.parametrize("router", ["hash[seed=3,balanced=true]", "stablemoe[stage=0.5,width=8]"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_tables_and_stages_are_saved_and_loaded(kind: str, router: str, tmp_path: Path) -> None:
    model = changed(kind, router)
    set_progress(model, 0.5)
    model.eval()
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved")).eval()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tables(loaded), tables(model), strict=True))
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    loaded.train()
    trainable = {name.rpartition(".")[2] for name, p in loaded.named_parameters() if p.requires_grad}
    assert not trainable & {"embedding", "predictor"}


def train(model: Any, folder: Path, steps: int, **options: Any) -> Any:
    rows = torch.randint(3, 64, (40, 12), generator=torch.Generator().manual_seed(1))
    settings = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 0.01, "weight_decay": 0.3}
    trainer = trainer_of(model, folder, rows, **settings, save_strategy="steps", save_steps=4, seed=3)
    trainer.train(**options)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_trainer_freezes_stablemoe_and_resumes_in_stage_2(kind: str, tmp_path: Path) -> None:
    """Weight decay included: what is frozen at step 3 of 8 is the same at its end, and after a resumed second half."""
    router = "stablemoe[stage=0.3]"
    begun = train(changed(kind, router), tmp_path / "whole", 8)
    at_four = holdfast.load(tmp_path / "whole" / "checkpoint-4")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tables(at_four), tables(begun), strict=True))
    frozen_then = {name: value for name, value in at_four.named_parameters() if name.endswith(("embedding", "predictor"))}
    assert len(frozen_then) == 2 * len(tables(begun))
    for name, value in frozen_then.items():
        assert torch.equal(begun.get_parameter(name), value), name
    half = str(tmp_path / "whole" / "checkpoint-4")
    resumed = train(changed(kind, router), tmp_path / "whole", 8, resume_from_checkpoint=half)
    torch.testing.assert_close(resumed.state_dict(), begun.state_dict())
    with holdfast.trace(begun) as routes:
        begun(input_ids=IDS)
    assert_by_ids(begun, [(IDS, list(routes))])


@pytest.mark.parametrize("router", ROUTERS)
def test_a_larger_vocabulary_after_the_change_is_an_error_at_the_first_new_id(router: str) -> None:
    model = changed("llama", router).eval()
    model.resize_token_embeddings(100)
    assert_refused("built for 0 to 95", model, input_ids=IDS.index_fill(1, torch.tensor(3), 98))


REFUSED = {"sparsemax": "its threshold is the sum of the selected logits", "hierarchical": "it declares no order"}


@pytest.mark.parametrize("router", ["hash", "stablemoe", "sparsemax", "grouped", "hierarchical"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_certificates_and_audits_know_the_new_routers(kind: str, router: str) -> None:
    model = changed(kind, router).eval()
    batches = [{"input_ids": IDS}]
    report = holdfast.audit(model, batches)
    assert report is not None
    found = holdfast.certify(model, batches)
    json.dumps(found.summary(), allow_nan=False)
    for layer in found.layers:
        if router in REFUSED:
            assert layer.reason is not None and REFUSED[router] in layer.reason
        else:
            radii = torch.cat([part.radius for part in layer.found])
            assert (radii == torch.inf).all() if router in ROUTERS else (radii > 0).any()
