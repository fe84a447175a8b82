"""Changed vision-language models in use: saving, loading, generating, tracing, replaying, audits and adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import dense_inputs, tiny_dense
from tiers import quick_or_slow
from tiny import with_checkpointing
from tiny_vlm import IMAGE, PARTS, batch, llava, qwen, smolvlm
from torch import Tensor
from trained_by_others import tokenizer
from wording import assert_refused

import holdfast
from holdfast.hub.layers import moe_layers
from holdfast.replaying.routes import Routes

LOSSES = holdfast.Losses(balance=0.1, z=0.1)
FAMILIES: dict[str, Any] = {"llava": (llava, PARTS), "qwen": (qwen, PARTS), "smolvlm": (smolvlm, ("vision", "language"))}
GREEDY = {"do_sample": False, "suppress_tokens": [IMAGE, 91, 92, 93]}  # a new image token would have no image
LAYERS = {"llava": 6, "qwen": 6, "smolvlm": 5}
ROUTER = "symphony+smooth"


def sparse(family: str = "llava", router: str = ROUTER, parts: Any = None, **options: Any) -> Any:
    make, own = FAMILIES[family]
    return holdfast.sparsify(make(), experts=4, router=router, parts=parts or own, noise=0.5, losses=LOSSES, **options)


def labelled(family: str = "llava") -> dict[str, Any]:
    given = batch(family)
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


@torch.no_grad()
def logits(model: Any, given: dict[str, Any]) -> Tensor:
    found: Tensor = model(**given).logits[given["attention_mask"].bool()]
    return found


def learned(family: str) -> Any:
    """A model whose routers have state from two training batches."""
    model = sparse(family).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(**labelled(family)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_the_same_when_it_is_loaded(family: str, tmp_path: Path) -> None:
    model, given = learned(family), batch(family)
    folder = holdfast.save(model, tmp_path / "saved")
    loaded = holdfast.load(folder)
    assert torch.equal(logits(loaded, given), logits(model, given))
    assert [layer.part for layer in moe_layers(loaded)] == [layer.part for layer in moe_layers(model)]
    by_auto = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    assert torch.equal(logits(by_auto, given), logits(model, given))


def test_parts_that_were_made_sparse_in_two_calls_are_saved_too(tmp_path: Path) -> None:
    model, given = llava("clip", "phi3", vision_feature_layer=-2), batch()
    holdfast.sparsify(model, experts=4, router="similarity", noise=0.5)
    holdfast.sparsify(model, experts=2, k=1, parts=("vision", "connector"), router="modality", noise=0.5)
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved"))
    assert torch.equal(logits(loaded, given), logits(model, given))
    assert loaded.config.holdfast["layers"] == model.config.holdfast["layers"]


@pytest.mark.parametrize("router", [ROUTER, "similarity", "modality"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_generation_equals_uncached(family: str, router: str) -> None:
    router = "modality" if family == "qwen" and router == "similarity" else router
    model, given = sparse(family, router), batch(family)
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, **GREEDY}
    assert torch.equal(model.generate(**given, **asked), model.generate(**given, **asked, use_cache=False))


def test_a_trace_has_all_layers_of_a_forward_and_of_generation() -> None:
    model, given = sparse(router="smoe"), batch()
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(**given)
    assert [len(routing.experts) for routing in routes] == [32] * 4 + [48] * 2
    assert routes.token_mask is not None and torch.equal(routes.token_mask, given["attention_mask"].bool())
    with holdfast.trace(model, keep="all") as generated:
        model.generate(**given, max_new_tokens=3, min_new_tokens=3, **GREEDY)
    assert [step.shape for step in generated.steps] == [(2, 24), (2, 1), (2, 1)]
    for layer in range(6):  # images are encoded before the first forward
        assert torch.equal(generated.steps[0][layer].experts, routes[layer].experts)
    assert_refused("layer 0 is not recorded", lambda: generated.steps[1][0])
    masks: list[bool] = []
    with torch.no_grad(), holdfast.trace(model, each=lambda layer, routing, mask: masks.append(mask is None)):
        model(**given)
    assert masks == [True] * 4 + [False] * 2


@pytest.mark.parametrize("family", ["llava", "t5"])
def test_generation_in_training_mode_changes_no_state_of_an_encoder(family: str) -> None:
    """`generate` runs it before the model's first forward."""
    if family == "t5":
        model, labels = holdfast.sparsify(tiny_dense("t5"), experts=4, router=ROUTER, noise=0.5), dense_inputs("t5")
        given = {name: labels[name] for name in ("input_ids", "attention_mask")}
    else:
        model, labels, given = sparse(router=ROUTER), labelled(), batch()
    model.train()(**labels).loss.backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.generate(**given, max_new_tokens=2, min_new_tokens=2, **GREEDY)
    for name, value in [*model.state_dict().items(), *model.named_buffers()]:
        assert torch.equal(value, {**before, **buffers}[name]), name
    model(**labels).loss.backward()  # and it learns again afterwards
    assert any(not torch.equal(value, buffers[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_of_the_language_part_are_recorded_and_replayed(family: str) -> None:
    model, given = sparse(family), batch(family)
    with holdfast.record(model) as recorder:
        sequences = model.generate(**given, max_new_tokens=4, min_new_tokens=4, **GREEDY)
    routes = recorder.routes(sequences)
    assert routes.experts.shape[:3] == (2, 28, 2)
    holdfast.reroute(model, "symphony+smooth", parts="language")
    for layer in moe_layers(model):
        if layer.part == "language":
            assert layer.router is not None
            torch.nn.init.normal_(layer.router.score.get_parameter("weight"))
    mask = torch.cat([given["attention_mask"], torch.ones(2, 4, dtype=torch.long)], dim=1)
    longer = {**given, "input_ids": sequences, "attention_mask": mask}
    if "mm_token_type_ids" in longer:
        longer["mm_token_type_ids"] = (sequences == IMAGE).int()
    with holdfast.trace(model.train()) as traced:
        model(**longer, labels=sequences, routed_experts=routes).loss.backward()
    replayed = Routes.from_trace(traced, model)
    known = routes.recorded
    assert known.sum() > 40 and not replayed.differs(routes)[known].any()
    with torch.no_grad(), holdfast.replay(model.eval(), routes), holdfast.trace(model) as again:
        model(**longer)
    assert not Routes.from_trace(again, model).differs(routes)[known].any()
    tower_only = holdfast.sparsify(FAMILIES[family][0](), experts=4, parts="vision")
    assert_refused("are all of images", lambda: Routes.from_trace(traced, tower_only))


def test_the_base_model_alone_has_parts_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given = holdfast.sparsify(llava().model, experts=4, router="modality", parts=PARTS, noise=0.5), batch()
    assert [layer.part for layer in moe_layers(model)] == ["vision"] * 3 + ["connector"] + ["language"] * 2
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved"))
    with torch.no_grad():
        assert torch.equal(loaded(**given).last_hidden_state, model(**given).last_hidden_state)


def test_activation_checkpointing_computes_the_same_gradients() -> None:
    for parts, router in ((PARTS, "modality+smooth"), (("vision", "language"), "ac")):
        gradients = []
        for recompute in (False, True):
            model = with_checkpointing(sparse(router=router, parts=parts).train(), recompute)
            model(**labelled(), use_cache=False).loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("family", quick_or_slow(FAMILIES, ["llava"]))
def test_losses_of_all_parts_are_in_the_loss_once(family: str) -> None:
    model, given = sparse(family).train(), labelled(family)
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, holdfast.Router):
            module.register_forward_hook(lambda _, inputs, routing: seen.append(routing.loss))
    out = model(**given)
    assert len(seen) == LAYERS[family]
    torch.testing.assert_close(out.router_loss, torch.stack(seen).sum())
    own = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
    torch.testing.assert_close(out.loss, own + out.router_loss)


def test_one_expert_of_a_tower_can_be_lost() -> None:
    model, given = sparse(router="smoe"), batch()
    with torch.no_grad(), holdfast.disable(model, {0: 1, 3: [0, 2]}), holdfast.trace(model) as routes:
        model(**given)
    assert not (routes[0].experts == 1).any() and set(routes[3].experts.unique().tolist()) == {1, 3}


def test_a_model_with_fewer_experts_in_every_part_computes_what_disabled_ones_do() -> None:
    model, given = sparse(router="smoe"), batch()
    pruned = holdfast.prune(model, [given], keep=3)
    lost = {}
    for index, layer in enumerate(moe_layers(model)):
        kept = layer.experts.down_proj[:, 0, 0].tolist()
        own = moe_layers(pruned.model)[index].experts.down_proj[:, 0, 0].tolist()
        lost[index] = [expert for expert, value in enumerate(kept) if value not in own]
    with holdfast.disable(model, lost):
        expected = logits(model, given)
    torch.testing.assert_close(logits(pruned.model, given), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_audit_takes_a_sparse_language_part_with_images_and_without() -> None:
    for given in (batch(), {"input_ids": torch.arange(3, 23).view(2, 10)}):
        report = holdfast.audit(sparse(router="smoe", parts="language"), [given], perturb=["none", "batch"])
        for name in ("none", "batch.alone"):
            found = report.perturbations[name].overall
            assert found.flips == 0 and found.loss is not None and (found.loss.before or 0) > 0
    texts = ["w1 w2 w3 w4 w5", "w6 w7 w8"]
    report = holdfast.audit(sparse(router="smoe", parts="language"), texts, tokenizer=tokenizer(), perturb=["none"])
    assert report.data.kind == "texts" and report.perturbations["none"].overall.flips == 0
    packed = holdfast.audit(sparse("qwen", "smoe", parts="language"), [batch("qwen")], perturb=["batch"])
    assert "packed images" in packed.skipped["batch.alone"].reason


def test_the_loss_of_an_audit_leaves_image_tokens_out() -> None:
    model, given = sparse(router="smoe", parts="language"), batch()
    report = holdfast.audit(model, [given], perturb=["none"])
    labels = given["input_ids"].masked_fill((given["attention_mask"] == 0) | (given["input_ids"] == IMAGE), -100)
    with torch.no_grad():
        rows = model(**given).logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].masked_fill(given["attention_mask"][:, :-1] == 0, -100).flatten()
    loss = report.perturbations["none"].overall.loss
    assert loss is not None
    assert loss.before == pytest.approx(float(torch.nn.functional.cross_entropy(rows, targets)), abs=1e-5)


def test_reports_about_texts_refuse_layers_of_images() -> None:
    model, given = sparse(router="smoe"), batch()
    for report in (holdfast.audit, holdfast.measure_geometry):
        assert_refused("its tokens are parts of images", report, model, [given])


def test_certificates_cover_every_part() -> None:
    found = holdfast.certify(sparse(router="smoe"), [batch()])
    assert [part.radius.numel() for layer in found.layers for part in layer.found] == [32] * 4 + [46] * 2  # without padding


@pytest.mark.slow
def test_an_adapter_of_the_language_model_learns_and_experts_stay() -> None:
    peft = pytest.importorskip("peft")
    model, given = sparse(router="smooth"), labelled()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(2)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets))
    optimizer = torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], lr=0.01)
    found = []
    for _ in range(20):
        loss = wrapped.train()(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    assert sum(found[-3:]) < sum(found[:3]) - 1
    learned_names = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert learned_names and all(".lora_" in name and "language_model" in name for name in learned_names)
    unmerged = logits(wrapped.eval(), batch())
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(logits(merged, batch()), unmerged, atol=1e-4, rtol=1e-4)
    moved = {name for name, parameter in merged.named_parameters() if not torch.equal(parameter, before[name])}
    assert len(moved) == 4 and all("language_model" in name for name in moved)
