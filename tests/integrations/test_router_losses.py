"""The gradient of the routers' losses is the same whoever computes the loss, from whatever it reads."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from test_losses_in_models import LOSSES, changed, gradients, quiet, rows, text
from tiers import quick_or_slow
from tiny import tiny, with_checkpointing
from torch import Tensor
from trained_by_others import assert_near, losses_by_hand
from wording import assert_refused

import holdfast

UNREAD = "routers' losses"


def cross_entropy(out: Any, labels: Tensor, items: Tensor | None = None) -> Tensor:
    """A trainer's own loss, from logits or outputs that have them."""
    logits = out if isinstance(out, Tensor) else out.logits
    logits, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if items is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / items


def model_of(family: str, router: str, losses: holdfast.Losses | None = LOSSES) -> Any:
    return quiet(changed(family, router, losses).train())


def reference(family: str, router: str, batches: list[dict[str, Tensor]], scale: float = 1.0) -> dict[str, Tensor]:
    """A hand-written loop: cross entropy of the logits of a model that knows no losses, and each router's loss by hand."""
    model = model_of(family, router, None)
    seen = losses_by_hand(model, LOSSES)
    for batch in batches:
        seen.clear()
        out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        ((cross_entropy(out, batch["labels"]) + torch.stack(seen).sum()) * scale / len(batches)).backward()
    return gradients(model)


def assert_same(model: Any, expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    assert_near(gradients(model), expected, tolerance)


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


# Each way in which a loop may compute its loss: from the model and a batch, the loss to differentiate.
READERS: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "outputs.loss": lambda model, batch: model(**batch).loss,
    "logits alone": lambda model, batch: cross_entropy(model(**inputs(batch)), batch["labels"]),
    "logits, with labels": lambda model, batch: cross_entropy(model(**batch), batch["labels"]),
    ".forward()": lambda model, batch: cross_entropy(model.forward(**inputs(batch)), batch["labels"]),
    "inner model": lambda model, batch: cross_entropy(
        model.lm_head(model.base_model(**inputs(batch)).last_hidden_state), batch["labels"]
    ),
    "router_loss": lambda model, batch: with_router_loss(model(**inputs(batch)), batch),
    "aux_loss": lambda model, batch: with_aux_loss(model, batch),
    "tuple": lambda model, batch: model(**batch, return_dict=False)[0],
    "tuple without labels": lambda model, batch: cross_entropy(
        model(**inputs(batch), return_dict=False)[0], batch["labels"]
    ),
}


def with_router_loss(out: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(out, batch["labels"]) + out.router_loss


def with_aux_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    out = model(**inputs(batch), output_router_logits=True)
    return cross_entropy(out, batch["labels"]) + model.config.router_aux_loss_coef * out.aux_loss


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("family", "router"),
    [("mixtral", "smoe"), ("mixtral", "native"), ("llama", "symphony+smooth"), ("deepseek_v3", "smooth")],
)
def test_every_way_to_compute_the_loss_has_the_same_gradients(family: str, router: str, reader: str) -> None:
    """`native` has no Router to take a reference from: there, and everywhere, all ways agree with `outputs.loss`."""
    batch, model, other = text(), model_of(family, router), model_of(family, router)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        READERS[reader](model, batch).backward()
    other(**batch).loss.backward()
    assert_same(model, gradients(other))
    if router != "native":
        assert_same(model, reference(family, router, [batch]))
    bare = model_of(family, router, None)
    bare(**batch).loss.backward()
    gates = [name for name in gradients(bare) if "gate.weight" in name or "router.score" in name]
    assert gates and all(not torch.allclose(gradients(bare)[name], gradients(model)[name], atol=1e-4) for name in gates)


@pytest.mark.parametrize("reader", ["outputs.loss", "logits alone", ".forward()", "router_loss", "aux_loss"])
@pytest.mark.parametrize("factor", [1, 1024])
@pytest.mark.parametrize("parts", [1, 4])
def test_accumulation_and_loss_scaling_count_the_losses_once(reader: str, parts: int, factor: int) -> None:
    """A loop that divides by the number of parts and multiplies by a scaler's factor."""
    batch = text(4, 12, (12, 12, 12, 12))
    cuts = [rows(batch, slice(index * 4 // parts, (index + 1) * 4 // parts)) for index in range(parts)]
    model = model_of("llama", "smoe")
    holdfast.router_loss_scale(model, factor / parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in cuts:
            (READERS[reader](model, part) * factor / parts).backward()
    expected = reference("llama", "smoe", cuts, factor)
    assert_same(model, expected, 4e-6)


@pytest.mark.parametrize("reader", ["outputs.loss", "aux_loss", "logits alone"])
def test_parts_of_different_sizes_count_by_their_labels(reader: str) -> None:
    """With num_items_in_batch, as the Trainer hands it on; TRL counts `aux_loss` by the part instead."""
    batch = text(3, 12, (12, 5, 9))
    items = (batch["labels"][:, 1:] != -100).sum()
    model, by_hand = model_of("llama", "smoe"), model_of("llama", "smoe")
    holdfast.router_loss_scale(model, 0.5)
    for chosen in (slice(0, 2), slice(2, 3)):
        part = rows(batch, chosen)
        share = (part["labels"][:, 1:] != -100).sum() / items if reader == "outputs.loss" else 0.5
        out = by_hand(**inputs(part))
        (cross_entropy(out, part["labels"], items) + share * out.router_loss).backward()
        if reader == "outputs.loss":
            model(**part, num_items_in_batch=items).loss.backward()
        elif reader == "aux_loss":
            out = model(**inputs(part), output_router_logits=True)
            (cross_entropy(out, part["labels"], items) + 0.5 * model.config.router_aux_loss_coef * out.aux_loss).backward()
        else:
            cross_entropy(model(**inputs(part)), part["labels"], items).backward()
    assert_same(model, gradients(by_hand))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("family", "router"), [("mixtral", "smoe"), ("llama", "symphony+smooth")])
def test_activation_checkpointing_counts_the_losses_once(family: str, router: str, reader: str) -> None:
    batch, model, other = text(), with_checkpointing(model_of(family, router)), model_of(family, router)
    holdfast.router_loss_scale(model, 1.0)
    READERS[reader](model, batch).backward()
    other(**batch).loss.backward()
    assert_same(model, gradients(other))


@pytest.mark.filterwarnings("ignore")
def test_reentrant_checkpointing_keeps_the_losses_where_the_models_hooks_are_bypassed() -> None:
    """There the losses hang on the weights alone, and the recomputation has those too."""
    batch, found = text(), []
    for reentrant in (True, False):
        model = with_checkpointing(model_of("llama", "smoe"), reentrant=reentrant)
        embedded = model.get_input_embeddings()(batch["input_ids"])
        out = model.forward(inputs_embeds=embedded, attention_mask=batch["attention_mask"])
        cross_entropy(out, batch["labels"]).backward()
        found.append(model)
    assert_same(found[0], gradients(found[1]))
    assert_same(found[0], reference("llama", "smoe", [batch]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reader", ["outputs.loss", "logits alone", "logits, with labels", "router_loss", "aux_loss"])
def test_compiled_models_count_the_losses_once(reader: str, backend: str) -> None:
    torch._dynamo.reset()
    batch, model, other = text(), model_of("llama", "smoe"), model_of("llama", "smoe")
    model.compile(backend=backend)
    READERS[reader](model, batch).backward()
    other(**batch).loss.backward()
    assert_same(model, gradients(other), 1e-5)


def test_an_unread_loss_warns_once_and_a_stated_scale_does_not() -> None:
    batch, model = text(), model_of("llama", "smoe")
    with pytest.warns(UserWarning, match=UNREAD):
        READERS["logits alone"](model, batch).backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        READERS["logits alone"](model, batch).backward()
        READERS["outputs.loss"](model_of("llama", "smoe"), batch).backward()
        told = model_of("llama", "smoe")
        holdfast.router_loss_scale(told, 1.0)
        READERS["logits alone"](told, batch).backward()


def frozen_but_for_attention(model: Any) -> Any:
    """As with LoRA on the attention: gates have no gradients of their own."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", ["logits alone", ".forward()", "inner model"])
@pytest.mark.parametrize("change", [lambda model: model, frozen_but_for_attention], ids=["all", "attention"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("router", ["smoe", "native"])
def test_accumulation_of_unread_losses_is_refused_until_a_scale_is_stated(
    router: str, checkpointed: bool, change: Callable[[Any], Any], reader: str
) -> None:
    batch, model = text(), with_checkpointing(change(model_of("mixtral", router)), checkpointed)
    READERS[reader](model, batch).backward()
    assert_refused("router_loss_scale", lambda: READERS[reader](model, batch).backward())
    model.zero_grad()
    holdfast.router_loss_scale(model, 0.5)
    for _ in range(2):
        READERS[reader](model, batch).backward()


@pytest.mark.filterwarnings("ignore")
def test_loops_with_one_backward_per_step_are_not_refused() -> None:
    """Gradients that are cleared, in any way and at any time before the backward, do not accumulate."""
    batch, model = text(), model_of("mixtral", "smoe")
    unread, optimizer = READERS["logits alone"], torch.optim.SGD(model.parameters(), lr=0.01)
    for to_none in (True, False):
        for _ in range(2):
            loss = unread(model, batch)
            optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            optimizer.step()
    optimizer.zero_grad()
    (unread(model, batch) + unread(model, text(seed=7))).backward()  # two forwards
    optimizer.zero_grad()
    unread(model, batch).backward()
    for wanted in ([*model.parameters()], [model.get_input_embeddings().weight]):  # `grad` adds to no gradient
        torch.autograd.grad(unread(model, batch), wanted, allow_unused=True)
    unread(model_of("mixtral", "smoe"), batch).backward()  # another model
    model.eval()
    for _ in range(2):
        unread(model, batch).backward()
    model.train()
    for _ in range(2):  # read losses are scaled with the training loss
        READERS["outputs.loss"](model, batch).backward()


@pytest.mark.filterwarnings("ignore")
def test_accumulation_with_accelerate_is_refused_before_the_first_backward() -> None:
    accelerate = pytest.importorskip("accelerate")
    batch, model = text(), model_of("mixtral", "smoe")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        with accelerator.accumulate(model):
            loss = READERS["logits alone"](model, batch)
            assert_refused("router_loss_scale", accelerator.backward, loss)
            accelerator.backward(READERS["outputs.loss"](model, batch))
    finally:
        accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("compiled", quick_or_slow([False, True], [False]))
def test_float16_without_a_stated_scale_is_refused_where_nothing_reads_the_loss(compiled: bool) -> None:
    batch, model = text(), model_of("llama", "smoe")
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    with torch.autocast("cpu", torch.float16), pytest.raises(Exception, match="router_loss_scale"):
        READERS["logits alone"](model, batch).backward()
    if not compiled:
        with torch.autocast("cpu", torch.float16):
            READERS["outputs.loss"](model, batch).backward()
            holdfast.router_loss_scale(model, 1024.0)
            READERS["logits alone"](model, batch).backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_is_none_is_refused(bad: float) -> None:
    assert_refused("scale", holdfast.router_loss_scale, model_of("llama", "smoe"), bad)
    assert_refused("no model", holdfast.router_loss_scale, torch.nn.Linear(2, 2), 1.0)


STATEFUL = ["symphony", "smooth", "ac", "attention", "remoe"]


@pytest.mark.parametrize("router", STATEFUL)
def test_a_forward_without_gradients_teaches_nothing_unless_it_calibrates(router: str) -> None:
    """A reference model, old log-probabilities and metrics are such forwards, in training mode too."""
    batch, model = inputs(text()), model_of("llama", router)
    before = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad():
        out = model(**batch)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert getattr(out, "router_loss", None) is None
    with torch.no_grad(), holdfast.calibrate(model):
        model(**batch)
    calibrated = {name: value.clone() for name, value in model.eval().named_buffers()}
    assert any(not torch.equal(value, before[name]) for name, value in calibrated.items())
    trained = model_of("llama", router)
    trained(**batch)
    torch.testing.assert_close(dict(trained.eval().named_buffers()), calibrated)


@pytest.mark.parametrize(("family", "router"), [("mixtral", "smoe"), ("llama", "symphony"), ("deepseek_v3", "smooth")])
def test_evaluation_has_an_aux_loss_where_a_trainer_asks_for_it(family: str, router: str) -> None:
    batch, model = text(), model_of(family, router).eval()
    out = model(**batch, output_router_logits=True)
    with holdfast.trace(model) as routes:
        model(**batch)
    total = sum(sum(LOSSES(routing, batch["attention_mask"].bool()).values()) for routing in routes)
    torch.testing.assert_close(out.aux_loss * model.config.router_aux_loss_coef, total)
    assert torch.equal(out.loss, model(**batch).loss)
    if family == "llama":
        for logits, routing in zip(out.router_logits, routes, strict=True):
            assert torch.equal(logits, routing.logits)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("router", ["smoe", "smooth"])
def test_without_losses_a_request_gets_the_balance_of_what_was_selected(router: str, training: bool) -> None:
    """As the family does, at its strength, but not from a top-k of the logits; `restore` brings the family's own back."""
    batch, model = text(), model_of("mixtral", router, None).train(training)
    coefficient = model.config.router_aux_loss_coef
    with holdfast.trace(model) as routes:
        out = model(**batch, output_router_logits=True)
    balances = [holdfast.layers.losses.balance(routing, batch["attention_mask"].bool()) for routing in routes]
    expected = 2 * torch.stack(balances).mean()
    torch.testing.assert_close(out.aux_loss, expected)
    torch.testing.assert_close(out.loss, cross_entropy(out, batch["labels"]) + coefficient * expected)
    assert getattr(model(**batch), "aux_loss", None) is None
    if training:
        bare = model_of("mixtral", router, None)
        cross_entropy(bare(**inputs(batch)), batch["labels"]).backward()
        model = model_of("mixtral", router, None)
        cross_entropy(model(**inputs(batch), output_router_logits=True), batch["labels"]).backward()
        assert_same(model, gradients(bare))


def test_a_sparsified_config_has_the_entries_that_trainers_read_and_a_restored_one_does_not(tmp_path: Any) -> None:
    model = model_of("llama", "smoe")
    config = model.config
    assert (config.num_experts, config.num_experts_per_tok, config.router_aux_loss_coef) == (8, 2, 1.0)
    assert config.output_router_logits is False
    assert model_of("llama", "smoe", None).config.router_aux_loss_coef == 0.0
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved"))
    assert (loaded.config.num_experts, loaded.config.router_aux_loss_coef) == (8, 1.0)
    deep = model_of("deepseek_v3", "smoe")
    assert deep.config.router_aux_loss_coef == 1.0
    deep = holdfast.load(holdfast.save(deep, tmp_path / "deep"))
    assert not hasattr(holdfast.restore(deep).config, "router_aux_loss_coef")


@pytest.mark.slow
def test_two_processes_under_ddp_have_the_gradients_of_one(tmp_path: Path) -> None:
    from router_losses_on_ranks import MODELS, WAYS, backward

    on_ranks(Path(__file__).with_name("router_losses_on_ranks.py"), str(tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for family, router in MODELS:
        expected = backward(family, router, "outputs.loss", 0, 1)
        for way in WAYS:
            for rank in range(2):
                assert_near(found[rank][f"{family} {router} {way}"], expected, 2e-5)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_callback_reads_the_scaler_and_the_last_parts_of_an_epoch(accumulated: int) -> None:
    model, callback = model_of("llama", "smoe"), holdfast.trainer_callback()
    optimizer = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=512.0))
    optimizer.scaler.scale(torch.ones(()))  # it has no factor before it is used
    arguments = SimpleNamespace(gradient_accumulation_steps=accumulated)
    scales = []
    for step in range(8):
        state = SimpleNamespace(global_step=step, max_steps=8)
        callback.on_step_begin(arguments, state, None, model=model, optimizer=optimizer, train_dataloader=range(10))
        scales.append(model.__dict__["_holdfast"].collector.loss_scale)
    # Ten batches by three: the fourth update of an epoch has one.
    assert scales == [512.0] * 8 if accumulated == 1 else scales == pytest.approx(([512 / 3] * 3 + [512.0]) * 2)


def test_logged_losses_are_without_the_scalers_factor() -> None:
    model, callback = model_of("llama", "smoe"), holdfast.trainer_callback()
    optimizer = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=512.0))
    optimizer.scaler.scale(torch.ones(()))
    state, logs = SimpleNamespace(global_step=0, max_steps=8, log_history=[{}]), {"loss": 0.0}
    callback.on_step_begin(SimpleNamespace(gradient_accumulation_steps=1), state, None, model=model, optimizer=optimizer)
    out = model(**text())
    (512.0 * out.loss).backward()
    callback.on_pre_optimizer_step(None, state, None, model=model)
    callback.on_log(None, state, None, logs=logs)
    assert logs["router/balance"] + logs["router/z"] == pytest.approx(float(out.router_loss.detach()), rel=1e-5)


CHECKPOINTED = ["ac+symphony+smooth", "attention", "smoe"]


@pytest.mark.parametrize("router", CHECKPOINTED)
def test_a_reference_forward_before_a_checkpointed_backward_changes_nothing(router: str) -> None:
    """DPO on adapters runs the same model without gradients in between."""
    batch, other = text(), text(seed=7)
    found = []
    for between in (False, True):
        model = with_checkpointing(model_of("llama", router), between)
        loss = model(**batch).loss
        if between:
            with torch.no_grad():
                model(**inputs(other))
        loss.backward()
        found.append(model)
    assert_same(found[1], gradients(found[0]))
    torch.testing.assert_close(*(dict(model.eval().named_buffers()) for model in found))


@pytest.mark.parametrize("router", CHECKPOINTED)
def test_two_checkpointed_forwards_before_one_backward_are_refused_where_they_would_be_wrong(router: str) -> None:
    batch, model = text(), with_checkpointing(model_of("llama", router))
    first = model(**batch).loss
    if router == "smoe":
        (first + model(**text(seed=7)).loss).backward()
        return
    assert_refused(r"forward.*backward", model, **text(seed=7))
    first.backward()
    model(**batch)  # whose outputs, and graph, are thrown away
    model(**batch).loss.backward()
    model.gradient_checkpointing_disable()
    (model(**batch).loss + model(**text(seed=7)).loss).backward()


@pytest.mark.filterwarnings("ignore")
def test_two_backwards_through_one_forward_count_the_losses_once_or_are_refused() -> None:
    batch, whole = text(), model_of("llama", "smoe")
    out = whole(**batch)
    (out.loss + cross_entropy(out, batch["labels"])).backward()
    model = model_of("llama", "smoe")
    out = model(**batch)
    out.loss.backward(retain_graph=True)
    cross_entropy(out, batch["labels"]).backward()
    assert_same(model, gradients(whole))
    model = model_of("llama", "smoe")
    out = model(**batch)
    (cross_entropy(out, batch["labels"]) + 0 * out.router_loss).backward(retain_graph=True)
    out.loss.backward()
    assert_same(model, gradients(whole))
    for second in ("unread", "read"):
        out = model_of("llama", "smoe")(**batch)
        cross_entropy(out, batch["labels"]).backward(retain_graph=True)
        loss = out.loss if second == "read" else cross_entropy(out, batch["labels"])
        assert_refused("second backward", loss.backward)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("losses", [LOSSES, None])
@pytest.mark.parametrize("family", ["mixtral", "llama", "deepseek_v3"])
def test_a_tuple_with_router_logits_holds_the_values_of_the_named_outputs(
    family: str, losses: holdfast.Losses | None, labelled: bool
) -> None:
    """In a family's tuple the first scalar may be the loss or the `aux_loss`."""
    model, batch = model_of(family, "smoe", losses), text() if labelled else inputs(text())
    for training in (True, False):
        named = model.train(training)(**batch, output_router_logits=True)
        values = model(**batch, output_router_logits=True, return_dict=False)
        names = [name for name in named if name != "router_loss"]
        assert len(values) == len(names)
        for name, value in zip(names, values, strict=True):
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, named[name])


def test_layers_that_keep_their_router_count_in_a_requested_balance_loss() -> None:
    """`smoe` starts from the checkpoint's own routes, so it does not matter which layers have it."""
    batch, found = text(), []
    for layers in ("all", "last:1", [0]):
        model = holdfast.reroute(tiny("mixtral"), "smoe", layers=layers).train()
        out = model(**batch, output_router_logits=True)
        out.aux_loss.backward()
        found.append((out.aux_loss, model))
    for value, model in found[1:]:
        torch.testing.assert_close(value, found[0][0])
        assert_same(model, gradients(found[0][1]))
    copied = copy.deepcopy(found[1][1])
    torch.testing.assert_close(copied(**batch, output_router_logits=True).aux_loss, found[0][0])
    restored, plain = holdfast.restore(found[1][1]), tiny("mixtral").train()
    plain(**batch, output_router_logits=True)  # transformers puts hooks of its own on a model that it records
    for one, other in zip(restored.modules(), plain.modules(), strict=True):
        assert len(one._forward_hooks) == len(other._forward_hooks)
        assert len(one._forward_pre_hooks) == len(other._forward_pre_hooks)


@pytest.mark.parametrize("layers", ["all", "last:1"])
@pytest.mark.parametrize("router", ["smoe", "symphony+smooth", "ac"])
def test_activation_checkpointing_recomputes_a_requested_balance_loss(router: str, layers: str) -> None:
    """TRL's defaults, on a model that was rerouted without losses; a forward without gradients, as of DPO, in between."""
    batch, found = text(), []
    for checkpointed in (False, True):
        model = with_checkpointing(holdfast.reroute(tiny("mixtral"), router, layers=layers).train(), checkpointed)
        out = model(**batch, output_router_logits=True)
        with torch.no_grad():
            model(**inputs(batch))
        out.loss.backward()
        found.append(model)
    assert_same(found[1], gradients(found[0]))
    model = with_checkpointing(holdfast.reroute(tiny("mixtral"), router, layers=layers).train(), reentrant=True)
    model.enable_input_require_grads()
    assert_refused("reentrant", model, **batch, output_router_logits=True)


@pytest.mark.filterwarnings("ignore")
def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    """Routers do not learn in forwards without gradients, and must again after one that failed."""
    batch, model, other = text(), model_of("llama", "symphony"), model_of("llama", "symphony")

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
        model(**batch)
    handle.remove()
    for one in (model, other):
        READERS[".forward()"](one, batch).backward()
    assert_same(model, gradients(other))


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_outputs_in_training_can_be_pickled_and_copied(family: str) -> None:
    with torch.no_grad():
        out = model_of(family, "smoe").eval()(**text(), output_router_logits=True, use_cache=False)
    for copied in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert type(copied) is type(out) and list(copied) == list(out)
        assert torch.equal(copied.aux_loss, out.aux_loss) and torch.equal(copied.logits, out.logits)


def test_threads_that_ask_for_router_logits_do_not_disturb_each_other() -> None:
    model, wrong = model_of("mixtral", "smoe").eval(), []
    with torch.no_grad():
        expected = [model(**text(seed=seed), output_router_logits=True).aux_loss for seed in range(4)]

    def ask(seed: int) -> None:
        with torch.no_grad():
            for turn in range(15):
                asked = (turn + seed) % 2 == 0
                out = model(**text(seed=seed), output_router_logits=asked)
                if asked and not (out.aux_loss is not None and torch.allclose(out.aux_loss, expected[seed])):
                    wrong.append(turn)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
