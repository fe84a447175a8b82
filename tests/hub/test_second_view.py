"""The loss consistency in Hugging Face models: a second forward that teaches nothing, and its loss, counted once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import changed, trainer_of
from test_losses_in_models import Overheard, assert_same, gradients, loss_of, rows, text
from tiny import with_checkpointing
from tiny_dense import inputs
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Losses, Routing
from holdfast.hub.families import routing_from_gate
from holdfast.hub.layers import moe_layers
from holdfast.hub.second_view import with_noise
from holdfast.layers.losses import consistency

NOISY, DROPPED = Losses(consistency=2.0, word_noise=0.3), Losses(consistency=2.0)
CASES = [("mixtral", "smoe", NOISY), ("mixtral", "native", NOISY), ("llama", "ac+symphony+smooth", NOISY)]
CASES += [("gpt2", "smoe", DROPPED), ("vit", "smoe", DROPPED)]


def batch_of(family: str) -> dict[str, Any]:
    return inputs("vit") if family == "vit" else text()


def model_of(family: str, router: str, losses: Losses | None) -> Any:
    model = changed(family, router, losses=losses).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and family in ("gpt2", "vit"):
            module.p = 0.2
    return model


def with_routings(model: Any, found: list[Routing]) -> None:
    """Append the routings of every layer in order, with their gradients."""
    for layer in moe_layers(model):
        if layer.router is not None:
            layer.router.register_forward_hook(lambda router, given, routing: found.append(routing))
        else:
            rule = layer.family.rule_of(layer.block)  # type: ignore[union-attr]
            layer.gate.register_forward_hook(lambda gate, given, out, rule=rule: found.append(routing_from_gate(out, rule)))


@pytest.mark.parametrize(("family", "router", "losses"), CASES)
def test_the_loss_is_the_consistency_of_two_forwards(family: str, router: str, losses: Losses) -> None:
    """The same two forwards by hand, with the same random numbers and state; value and every gradient."""
    batch, model = batch_of(family), model_of(family, router, losses)
    reference = model_of(family, router, None)
    found = loss_of(model, batch)
    found.backward()
    torch.manual_seed(5)
    first, second = list[Routing](), list[Routing]()
    with_routings(reference, first)
    out = reference(**batch)
    given = {name: value for name, value in batch.items() if name != "labels"}
    if losses.word_noise:
        given["input_ids"] = with_noise(batch["input_ids"], 0.3, batch["attention_mask"], [])
    for module in reference.modules():
        if isinstance(module, holdfast.Router):
            module.learning = False
    reference._holdfast.forwards.forward.learning = False
    with_routings(reference, second)
    reference.forward(**given)
    del first[len(second) :]  # its hooks have run again
    mask = batch.get("attention_mask")
    mask = None if mask is None else mask.bool()
    expected = torch.stack([2.0 * consistency(*views, mask) for views in zip(first, second, strict=True)]).sum()
    assert expected > 1e-5
    torch.testing.assert_close(found, out.loss + expected)
    (out.loss + expected).backward()
    assert_same(gradients(model), gradients(reference), 1e-6)


@pytest.mark.parametrize("router", ["ac+symphony+smooth", "remoe", "expert-choice"])
def test_the_second_forward_teaches_nothing(router: str) -> None:
    """Router state, and the router losses, are those of training without it."""
    plain = Losses(balance=0.1)
    both = [changed("mixtral", router, losses=losses) for losses in (plain, replace(NOISY, balance=0.1))]
    models = [model.train() for model in both]
    heard = [Overheard(model) for model in models]
    for _ in range(2):
        for model in models:
            loss_of(model, text()).backward()
    assert heard[1].losses == [each for step in (0, 3) for each in (*heard[0].losses[step : step + 3], {}, {}, {})]
    states = [dict(model.eval().named_buffers()) for model in models]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_training_with_consistency_makes_two_views_agree() -> None:
    model, batch = model_of("llama", "smoe", NOISY), text(8, 12, (12,) * 8)
    del batch["labels"]
    optimizer, values = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    torch.manual_seed(0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**batch).router_loss
        values.append(loss.item())
        loss.backward()
        optimizer.step()
    assert sum(values[-5:]) < 0.5 * sum(values[:5])


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_loss_from_logits_alone_trains_consistency_as_much(family: str) -> None:
    models = [model_of(family, "smoe", NOISY) for _ in range(2)]
    holdfast.router_loss_scale(models[1], 0.5)
    torch.manual_seed(5)
    out = models[0](**text())
    (out.logits.square().mean() + 0.5 * out.router_loss).backward()
    torch.manual_seed(5)
    models[1](**text(), return_dict=False)[1].square().mean().backward()
    assert_same(gradients(models[1]), gradients(models[0]), 1e-6)


def test_accumulated_consistency_counts_once() -> None:
    batch, items = text(3, 12, (12, 5, 9)), torch.tensor(23)
    model, plain = model_of("mixtral", "smoe", NOISY), model_of("mixtral", "smoe", Losses())
    for chosen, count in ((slice(0, 2), 15), (slice(2, 3), 8)):
        part = rows(batch, chosen)
        added = loss_of(model, part, num_items_in_batch=items) - loss_of(plain, part, num_items_in_batch=items)
        torch.manual_seed(5)
        whole = model(**part).router_loss
        torch.testing.assert_close(added, whole * count / 23, atol=1e-6, rtol=1e-4)


def test_the_trainer_counts_consistency_once_in_accumulated_batches(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(0))
    model = model_of("mixtral", "smoe", NOISY)
    seen: list[float] = []
    model.register_forward_hook(lambda _, given, out: seen.append(float(out.router_loss.detach())))
    options = {"gradient_accumulation_steps": 2, "learning_rate": 0.0, "logging_strategy": "steps", "logging_steps": 1}
    run = trainer_of(model, tmp_path, ids, max_steps=1, per_device_train_batch_size=2, **options)
    run.train()
    assert len(seen) == 2
    assert run.state.log_history[0]["router/consistency"] == pytest.approx(sum(seen) / 2, rel=1e-5)


def test_a_forward_without_gradients_has_one_view() -> None:
    model, forwards = model_of("llama", "smoe", NOISY), list[int]()
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    with torch.no_grad():
        model(**text())
        model.eval()(**text())
    assert len(forwards) == 2
    model.train()(**text())
    assert len(forwards) == 4


def test_views_that_would_not_be_right_are_refused() -> None:
    assert_refused("give word_noise", model_of("llama", "smoe", DROPPED), **text())
    assert_refused("checkpointing", with_checkpointing(model_of("llama", "smoe", NOISY)), **text())
    assert_refused("word_noise.*pixels", model_of("vit", "smoe", NOISY), **inputs("vit"))


@pytest.mark.slow
def test_a_compiled_model_runs_two_views_without_a_compiler() -> None:
    model, plain = (model_of("llama", "smoe", NOISY) for _ in range(2))
    compiled = torch.compile(model, backend="eager")
    for called in (compiled, plain):
        loss_of(called, text()).backward()
    assert_same(gradients(model), gradients(plain), 1e-6)


def test_a_refused_second_view_leaves_nothing_behind() -> None:
    model, fresh = model_of("llama", "symphony", DROPPED), model_of("llama", "symphony", None)
    assert_refused("give word_noise", model, **text())
    fresh(**text())
    for each in (model, fresh):
        each.eval()
    assert torch.equal(model(**text()).loss, fresh(**text()).loss)


def test_noise_replaces_real_tokens_by_real_tokens() -> None:
    torch.manual_seed(0)
    ids = torch.arange(3, 403).view(4, 100)
    mask = (torch.arange(100) < 80).expand(4, 100).long()
    image = list(range(10, 20))
    noised = with_noise(ids, 0.25, mask, image)
    changed_places: Tensor = noised != ids
    assert not changed_places[mask == 0].any() and not changed_places[torch.isin(ids, torch.tensor(image))].any()
    assert torch.isin(noised[changed_places], ids[(mask == 1)]).all()
    assert not torch.isin(noised[changed_places], torch.tensor(image)).any()
    assert 0.18 < changed_places.sum() / 310 < 0.32
    assert torch.equal(with_noise(ids, 0.0, mask, []), ids)


def test_a_trace_in_training_holds_the_first_view_only() -> None:
    losses = Losses(consistency=1.0, word_noise=1.0)
    model, alone = (changed("mixtral", "smoe", losses=each).train() for each in (losses, None))
    seen = list[int]()
    with holdfast.trace(model, each=lambda layer, *_: seen.append(layer)):
        model(**text())
    assert seen == [0, 1, 2]
    with holdfast.trace(model) as routes, holdfast.trace(alone) as expected:
        model(**text())
        alone(**text())
    for one, other in zip(routes, expected, strict=True):
        assert torch.equal(one.gates, other.gates)


def test_a_router_with_noise_is_refused() -> None:
    model = changed("llama", "smoe[noise=gaussian]", losses=NOISY).train()
    assert_refused("use a router without noise", model, **text())


@pytest.mark.parametrize("router", ["smoe[drop=0.4]", "smoe[drop=0.4,per=token]"])
def test_both_views_drop_the_same_experts(router: str) -> None:
    """So equal views have equal gates."""
    model = changed("llama", router, losses=Losses(consistency=1.0, word_noise=1e-9)).train()
    assert abs(float(model(**text()).router_loss)) < 1e-6
