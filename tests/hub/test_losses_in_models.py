"""The routers' losses in `outputs.loss`: there in training, once, whatever the batch is cut or padded into."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import changed as with_router
from tiny import tiny, with_checkpointing
from tiny_dense import inputs
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Losses, Routing
from holdfast.hub.families import MOE_FAMILIES
from holdfast.hub.layers import moe_layers

LOSSES = Losses(balance=0.3, z=0.1)
REROUTED = ["mixtral", "olmoe", "qwen2_moe", "deepseek_v3", "gpt_oss", "phimoe", "granitemoe"]
SPARSIFIED = ["llama", "gpt2", "bert", "vit", "swin", "siglip"]
RECORDING = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "phimoe"]  # router logits, aux_loss
if MOE_FAMILIES["granitemoe"].usual_order:  # the version that mended its gate's order also made it record; before, it fails
    RECORDING.append("granitemoe")
LAYERS = {"swin": 4, "siglip": 4, "deepseek_v3": 2}  # three elsewhere


def changed(family: str, router: str = "smoe", losses: Losses | None = None) -> Any:
    """The tiny model of a family with routers of ours; the same weights whatever the losses."""
    return with_router(family, router, losses=losses)


def text(sequences: int = 2, length: int = 12, labelled: tuple[int, ...] = (12, 7), seed: int = 1) -> dict[str, Tensor]:
    """Sequences of which the first `labelled[i]` tokens are real, and labels for these."""
    ids = torch.randint(3, 64, (sequences, length), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(length) < torch.tensor(labelled).unsqueeze(1)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def batch_for(family: str) -> dict[str, Any]:
    return inputs(family) if family in SPARSIFIED else text()


def rows(batch: dict[str, Tensor], chosen: slice) -> dict[str, Tensor]:
    return {name: values[chosen] for name, values in batch.items()}


class Overheard:
    """The losses that each router has returned, in order, as numbers."""

    def __init__(self, model: Any) -> None:
        self.losses: list[dict[str, float]] = []
        for module in model.modules():
            if isinstance(module, holdfast.Router):
                module.register_forward_hook(self._listen)

    def _listen(self, router: Any, arguments: Any, routing: Routing) -> None:
        self.losses.append({name: float(value.detach()) for name, value in routing.losses.items()})

    @property
    def total(self) -> float:
        return sum(sum(losses.values()) for losses in self.losses)


def loss_of(model: Any, batch: dict[str, Any], **options: Any) -> Tensor:
    torch.manual_seed(5)  # dropout, where a family has it
    out = model(**batch, **options)
    return out[0] if isinstance(out, tuple) else out.loss


def quiet(model: Any) -> Any:
    """Without dropout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def state(model: Any) -> dict[str, Tensor]:
    """What routers have learned without gradients; committed."""
    return {name: value.clone() for name, value in model.eval().named_buffers() if "staged_" not in name}


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("family", [*REROUTED, *SPARSIFIED])
def test_training_adds_the_sum_of_every_layers_losses(family: str, return_dict: bool) -> None:
    with_losses, without = changed(family, losses=LOSSES).train(), changed(family).train()
    overheard = Overheard(with_losses)
    batch = batch_for(family)
    plain = loss_of(without, batch, return_dict=return_dict)
    loss = loss_of(with_losses, batch, return_dict=return_dict)
    assert len(overheard.losses) == LAYERS.get(family, 3)
    assert all(losses.keys() == {"balance", "z"} and min(losses.values()) > 0 for losses in overheard.losses)
    torch.testing.assert_close(loss, plain + overheard.total, atol=1e-5, rtol=0)


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "llama", "siglip"])
def test_evaluation_adds_nothing(family: str, return_dict: bool) -> None:
    with_losses, without = changed(family, losses=LOSSES), changed(family)
    overheard = Overheard(with_losses)
    batch = batch_for(family)
    assert torch.equal(
        loss_of(with_losses, batch, return_dict=return_dict), loss_of(without, batch, return_dict=return_dict)
    )
    assert overheard.losses == [{}] * LAYERS.get(family, 3)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_without_labels_the_losses_are_an_output_of_their_own(family: str) -> None:
    with_losses, without = changed(family, losses=LOSSES).train(), changed(family).train()
    overheard, batch = Overheard(with_losses), batch_for(family)
    del batch["labels"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = with_losses(**batch)
        first, *_ = with_losses(**batch, return_dict=False)
    assert out.loss is None
    assert float(out.router_loss.detach()) == pytest.approx(overheard.total / 2)
    assert torch.equal(out.logits, without(**batch).logits) and torch.equal(first, out.logits)
    out.router_loss.backward()
    found: list[Any] = moe_layers(with_losses)
    gates = [moe_layer.gate.weight if family == "mixtral" else moe_layer.block.router.score.weight for moe_layer in found]
    assert len(gates) == 3 and all(gate.grad.norm() > 0 for gate in gates)


ROLLOUTS: dict[str, dict[str, Any]] = {"symphony": {}, "smooth": {}, "attention": {}, "ac": {}, "remoe": {}}
ROLLOUTS["smooth+xmoe"] = {"control": "loss"}  # its boundary loss sums over processes


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("router", ROLLOUTS)
def test_what_a_model_in_training_generates_teaches_its_routers_nothing(router: str, cached: bool) -> None:
    """A rollout is no batch, and each process may take as many tokens as it likes."""
    model = holdfast.reroute(tiny("mixtral"), router, losses=LOSSES, **ROLLOUTS[router]).train()
    overheard, batch = Overheard(model), text()
    model(**batch).loss.backward()
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert all(overheard.losses)
    overheard.losses.clear()
    model.generate(batch["input_ids"], max_new_tokens=3, min_new_tokens=3, pad_token_id=0, use_cache=cached)
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert overheard.losses == [{}] * 9
    model(**batch)
    if router != "smooth+xmoe":  # its width is learned with a gradient
        assert any(not torch.equal(dict(model.named_buffers())[name], value) for name, value in before.items())


@pytest.mark.parametrize("router", ["native", "smoe", "symphony+smooth"])
def test_the_losses_reach_every_gate(router: str) -> None:
    """Each term moves the gradient of every layer's gate, and so does the family's own rule with losses of ours."""
    batch, by_losses = text(), []
    for losses in (None, Losses(balance=1.0), Losses(z=1.0)):
        model = holdfast.reroute(tiny("mixtral"), router, losses=losses).train()
        loss_of(model, batch).backward()
        by_losses.append([moe_layer.gate.weight.grad for moe_layer in moe_layers(model)])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len(by_losses[one]) == 3
        for ours, theirs in zip(by_losses[one], by_losses[other], strict=True):
            assert not torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("router", ["native", "smoe", "smooth"])
@pytest.mark.parametrize("family", RECORDING)
def test_router_logits_and_aux_loss_are_still_there_for_the_asking(family: str, router: str) -> None:
    model = holdfast.reroute(tiny(family), router)
    with holdfast.trace(model) as routes:
        out = model(**text(), output_router_logits=True)
    assert len(out.router_logits) == len(routes) == 3
    for recorded, routing in zip(out.router_logits, routes, strict=True):
        torch.testing.assert_close(recorded.flatten(0, -2).float(), routing.logits)
    assert out.aux_loss > 0
    assert model(**text()).router_logits is None


def with_own_balance(family: str) -> Any:
    """Return a model that trains with the family's balance loss, with a coefficient large enough to be measured."""
    model = tiny(family)
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.25
    return model


def balance_alone(model: Any, batch: dict[str, Tensor]) -> float:
    """The sum over layers of the balance of what the model's routers do with a batch."""
    with holdfast.trace(model) as routes:
        model(**batch)
    return sum(float(holdfast.layers.losses.balance(routing, batch["attention_mask"].bool())) for routing in routes)


@pytest.mark.parametrize("router", ["native", "smoe"])
@pytest.mark.parametrize("family", RECORDING)
def test_our_balance_loss_takes_the_place_of_the_models_own(family: str, router: str) -> None:
    batch, model = text(), with_own_balance(family)
    plain = loss_of(tiny(family), batch)
    native = loss_of(model, batch)
    holdfast.reroute(model, router)
    out = model.train()(**batch)
    assert out.aux_loss > 0
    assert len(out.router_logits) == 3
    if (family, router) != ("phimoe", "native"):  # which samples in training
        torch.testing.assert_close(out.loss, plain + 0.25 * 2 / 3 * balance_alone(model.eval(), batch), atol=1e-5, rtol=0)
    assert torch.equal(loss_of(model.eval(), batch), plain)
    holdfast.restore(model)
    assert model.router_aux_loss_coef == 0.25
    assert torch.equal(loss_of(model, batch), native)


@pytest.mark.parametrize("router", ["native", "smoe"])
def test_asking_for_router_logits_later_adds_no_second_balance_loss(router: str) -> None:
    model = holdfast.reroute(tiny("mixtral"), router, losses=LOSSES).train()
    coefficient = tiny("mixtral").router_aux_loss_coef
    assert coefficient > 0
    assert torch.equal(loss_of(model, text(), output_router_logits=True), loss_of(model, text()))
    assert holdfast.restore(model).router_aux_loss_coef == coefficient


def test_our_balance_loss_stays_the_only_one_after_saving_and_loading(tmp_path: Path) -> None:
    model = holdfast.reroute(with_own_balance("mixtral"), "smoe")
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved"))
    assert torch.equal(loss_of(loaded.train(), text()), loss_of(model.train(), text()))
    assert holdfast.restore(loaded).router_aux_loss_coef == 0.25


def test_a_model_rerouted_again_still_trains_with_a_balance_loss() -> None:
    once = holdfast.reroute(with_own_balance("mixtral"), "smoe")
    twice = holdfast.reroute(holdfast.reroute(with_own_balance("mixtral"), "symphony"), "smoe")
    assert torch.equal(loss_of(twice.train(), text()), loss_of(once.train(), text()))
    assert holdfast.restore(twice).router_aux_loss_coef == 0.25


@pytest.mark.parametrize("router", ["smoe", "ac"])
def test_layers_that_keep_their_router_keep_a_balance_loss(router: str) -> None:
    """The model's own is over all layers: where some are rerouted and ours takes over, it does so in all."""
    batch = text()
    whole = holdfast.reroute(with_own_balance("mixtral"), "native").train()
    part = holdfast.reroute(with_own_balance("mixtral"), router, layers=[1]).train()
    torch.testing.assert_close(loss_of(part, batch), loss_of(whole, batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "router"),
    [("mixtral", "native"), ("mixtral", "similarity"), ("llama", "xmoe+similarity"), ("gpt2", "top-p")],
)
def test_accumulated_gradients_are_those_of_the_whole_batch(family: str, router: str) -> None:
    """Micro-batches of two and one, of different numbers of labels; stateless routers, for state learns batch by batch."""
    batch = text(3, 12, (12, 5, 9))
    whole, parts = changed(family, router), changed(family, router)
    for model in (whole, parts):
        quiet(model.train())
    items = int((batch["labels"][:, 1:] != -100).sum())
    loss_of(whole, batch).backward()
    for chosen in (slice(0, 2), slice(2, 3)):
        loss_of(parts, rows(batch, chosen), num_items_in_batch=items).backward()
    assert_same(gradients(parts), gradients(whole), 1e-5)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_accumulated_losses_of_routers_count_once_in_all(family: str) -> None:
    """By their part's share of the labels, which is what the rest of the loss is divided by."""
    batch = text(3, 12, (12, 5, 9))
    cuts = [slice(0, 2), slice(2, 3)]
    items = (batch["labels"][:, 1:] != -100).sum()
    with_losses, without = changed(family, losses=LOSSES).train(), changed(family).train()
    added, expected, labels = 0.0, 0.0, [15, 8]
    assert sum(labels) == int(items)
    for chosen, count in zip(cuts, labels, strict=True):
        part, overheard = rows(batch, chosen), Overheard(with_losses)
        loss = loss_of(with_losses, part, num_items_in_batch=items)
        added += float(loss.detach() - loss_of(without, part, num_items_in_batch=items).detach())
        expected += overheard.total * count / int(items)
    assert added == pytest.approx(expected, abs=1e-5)
    assert expected > 0.5
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    given = loss_of(with_losses, batch, shift_labels=shifted, num_items_in_batch=items)
    torch.testing.assert_close(given, loss_of(with_losses, batch), atol=1e-5, rtol=0)


def test_classifiers_count_whole_labels() -> None:
    """Nothing is shifted: two of four images are half of the batch."""
    with_losses, without = changed("vit", losses=LOSSES).train(), changed("vit").train()
    overheard = Overheard(with_losses)
    batch = inputs("vit")
    added = loss_of(with_losses, batch, num_items_in_batch=4) - loss_of(without, batch, num_items_in_batch=4)
    assert float(added.detach()) == pytest.approx(overheard.total / 2, abs=1e-5)


CHECKPOINTED = [
    ("mixtral", "ac+symphony+similarity+smooth"),
    ("mixtral", "attention"),
    ("mixtral", "native"),
    ("llama", "ac+symphony+similarity+smooth"),
    ("llama", "attention"),
    ("llama", "hash"),
    ("mixtral", "stablemoe"),
]


@pytest.mark.parametrize(("family", "router"), CHECKPOINTED)
def test_activation_checkpointing_changes_nothing(family: str, router: str) -> None:
    """Three steps: the same losses, gradients, and what routers have learned without gradients."""
    models = [changed(family, router, LOSSES).train() for _ in range(2)]
    forwards, before = Overheard(with_checkpointing(models[1])), state(changed(family, router, LOSSES))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        batch = text(4, 16, (16, 9, 16, 12), seed=step)
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(loss_of(model, batch))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=1e-6)
        # A recomputation adds the gradients of queries, keys and values, which this router reads too, in another order: a
        # difference in the last bit at the first step, twenty times that at the third.
        assert_same(gradients(models[1]), gradients(models[0]), 3e-6 if router == "attention" else 1e-6)
        for optimizer in optimizers:
            optimizer.step()
    if router != "native":
        assert len(forwards.losses) == 2 * 3 * 3, "nothing was recomputed: this test tests nothing"
    learned = state(models[0])
    assert_same(state(models[1]), learned, 1e-6)
    moved = {name.rpartition(".")[2] for name in learned if not torch.equal(learned[name], before[name])}
    assert {"attention": {"entropy"}, CHECKPOINTED[0][1]: {"graph", "width", "spreads"}}.get(router, set()) <= moved


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("family", "router"), [("mixtral", "native"), ("mixtral", "smoe"), ("llama", "symphony+smooth")])
def test_reentrant_checkpointing_is_refused_where_routers_have_losses(family: str, router: str) -> None:
    model = with_checkpointing(changed(family, router, LOSSES).train(), reentrant=True)
    assert_refused("reentrant", loss_of, model, text())
    model.gradient_checkpointing_disable()
    loss_of(model, text()).backward()
    with torch.no_grad():  # nothing to lose
        loss_of(with_checkpointing(model, reentrant=True), text())


@pytest.mark.parametrize(
    ("family", "router"), [("mixtral", "ac+symphony+smooth"), ("llama", "ac+symphony+attention+smooth")]
)
def test_reentrant_checkpointing_is_allowed_without_losses(family: str, router: str) -> None:
    models = [with_checkpointing(changed(family, router).train(), enabled, reentrant=True) for enabled in (False, True)]
    for step in range(2):
        for model in models:
            model.zero_grad()
            loss_of(model, text(seed=step)).backward()
        assert_same(gradients(models[1]), gradients(models[0]), 1e-6)
    assert_same(state(models[1]), state(models[0]), 1e-6)


def padded(batch: dict[str, Tensor], filler: Tensor, side: str) -> dict[str, Tensor]:
    extra = {"input_ids": filler, "attention_mask": torch.zeros_like(filler), "labels": torch.full_like(filler, -100)}
    pairs = {name: (values, extra[name]) for name, values in batch.items()}
    return {name: torch.cat(pair if side == "right" else pair[::-1], dim=1) for name, pair in pairs.items()}


PADDED = [
    ("mixtral", "ac+symphony+similarity+smooth", "right", "sdpa"),
    ("mixtral", "ac+symphony+similarity+smooth", "left", "eager"),
    ("mixtral", "native", "right", "eager"),
    ("mixtral", "native", "left", "sdpa"),
    ("gpt_oss", "symphony+smooth", "left", "eager"),
    ("llama", "ac+symphony+attention+smooth", "right", "eager"),
    ("llama", "ac+symphony+attention+smooth", "left", "sdpa"),
    ("bert", "symphony+similarity+smooth", "right", "sdpa"),
    ("bert", "symphony+attention+smooth", "right", "eager"),
]


@pytest.mark.parametrize(("family", "router", "side", "attention"), PADDED)
def test_padding_counts_neither_in_losses_nor_in_state(family: str, router: str, side: str, attention: str) -> None:
    """Sequences with seven tokens of padding that are no zeros, and the sequences alone."""
    batch = text(3, 16, (16, 16, 16))
    batch["labels"][:, 0] = -100  # or, padded on the left, it would be predicted from padding
    filler = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(9))
    models = [changed(family, router, Losses(balance=0.3, z=0.1, importance=0.1, entropy=0.1)) for _ in range(2)]
    losses = []
    for model, given in zip(models, (batch, padded(batch, filler, side)), strict=True):
        model.set_attn_implementation(attention)
        losses.append(loss_of(quiet(model.train()), given))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
    assert_same(state(models[1]), state(models[0]), 1e-4)
    assert_same(gradients(models[1]), gradients(models[0]), 1e-4)


def test_no_losses_said_outright_switches_the_models_own_off() -> None:
    batch, model = text(), with_own_balance("mixtral")
    holdfast.reroute(model, "smoe", losses=holdfast.Losses())
    torch.testing.assert_close(loss_of(model, batch), loss_of(tiny("mixtral"), batch), atol=1e-5, rtol=0)
