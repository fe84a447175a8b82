"""Losses of experts' outputs in Hugging Face models: computed where the experts run, and counted once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from changed_models import changed, trainer_of
from test_losses_in_models import Overheard, assert_same, gradients, loss_of, quiet, rows, text
from tiny import tiny, with_checkpointing
from tiny_dense import inputs, tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Losses
from holdfast.hub.layers import moe_layers
from holdfast.layers.expert_losses import probe_tokens

LOSSES = Losses(diversity=0.3, distillation=0.2)


def zero(tokens: Tensor) -> Tensor:
    return torch.zeros_like(tokens)


def model_of(family: str, router: str = "smoe", losses: Losses | None = LOSSES, **options: Any) -> Any:
    model = changed(family, router, losses=losses, **options)
    return holdfast.set_teacher(model, zero) if losses is not None and family not in ("llama", "gpt2", "bert") else model


@pytest.mark.parametrize(
    ("family", "router"), [("mixtral", "smoe"), ("mixtral", "native"), ("qwen2_moe", "top-p"), ("gpt_oss", "smoe")]
)
def test_the_experts_of_a_family_add_what_a_loop_over_them_adds(family: str, router: str) -> None:
    """Every expert alone, by the family's own function, on the tokens that the experts got."""
    model, batch = model_of(family, router).train(), text()
    seen: dict[str, tuple[Tensor, ...]] = {}
    for layer in moe_layers(model):
        layer.experts.register_forward_hook(lambda _, given, out, name=layer.name: seen.update({name: given}))
    total = model(**batch).router_loss
    expected, real = torch.zeros(()), batch["attention_mask"].flatten().bool()
    assert len(seen) == 3
    for layer in moe_layers(model):
        tokens, chosen, weights = seen[layer.name]
        tokens = tokens.where(real.unsqueeze(1), 0)
        alone = torch.stack([every(layer, tokens, expert) for expert in range(layer.size[1])])  # (E,T,d)
        squares = alone.square().mean(-1).t()
        padded = torch.cat([squares, squares.new_zeros(len(squares), 1)], dim=1)
        shares = weights / weights.sum(-1, keepdim=True)
        distances = (shares.detach() * padded.gather(1, chosen)).sum(-1)
        expected = expected + 0.2 * distances[real].mean()
        places = probe_tokens(torch.arange(len(tokens)).float().unsqueeze(1), real)[0].long().flatten()
        probes = F.normalize(alone[:, places], dim=-1)
        cosines = torch.einsum("apd,bpd->pab", probes, probes).square()
        pairs = ~torch.eye(len(alone), dtype=torch.bool)
        expected = expected + 0.3 * cosines[:, pairs].mean()
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-4)


def every(layer: Any, tokens: Tensor, expert: int) -> Tensor:
    index = torch.full((len(tokens), 1), expert)
    out: Tensor = layer.experts.forward(tokens, index, torch.ones(len(tokens), 1))
    return out


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_dense_network_is_the_teacher_of_its_copies(family: str) -> None:
    """Copies are at distance 0; with noise they are not. It is no parameter and not saved."""
    dense = tiny_dense(family)
    names = {name for name, _ in dense.named_parameters()}
    model = holdfast.sparsify(dense, experts=4, losses=Losses(distillation=1.0)).train()
    assert float(model(**inputs(family)).router_loss) == pytest.approx(0, abs=1e-9)
    noisy = model_of(family, losses=Losses(distillation=1.0)).train()
    assert noisy(**inputs(family)).router_loss > 1e-4
    assert not any("teacher" in name for name in (*dict(model.named_parameters()), *model.state_dict()))
    assert names - {name for name, _ in model.named_parameters()}
    assert sum("teacher" in name for name, _ in model.named_buffers()) > 0
    without = holdfast.sparsify(tiny_dense(family), experts=4, losses=Losses(balance=1.0))
    assert not any("teacher" in name for name, _ in without.named_buffers())


def test_training_with_distillation_brings_experts_to_the_dense_network() -> None:
    model = model_of("llama", losses=Losses(distillation=1.0)).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "teacher" in name}
    optimizer, values = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(**inputs("llama")).router_loss
        values.append(loss.item())
        loss.backward()
        optimizer.step()
    assert values[-1] < 0.7 * values[0]
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers() if name in before)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_losses_of_outputs_move_experts_and_no_gate(family: str) -> None:
    batch, found = text(), []
    for losses in (None, Losses(diversity=1.0), Losses(distillation=1.0)):
        model = model_of(family, losses=losses).train()
        loss_of(model, batch).backward()
        found.append(gradients(model))
    for other in found[1:]:
        different = {name for name in other if not torch.allclose(other[name], found[0][name], atol=1e-7)}
        assert different and all(".experts." in name for name in different)
    assert not all(torch.allclose(found[1][name], found[2][name], atol=1e-7) for name in found[1])


@pytest.mark.parametrize(
    ("family", "router"), [("mixtral", "ac+symphony+smooth"), ("mixtral", "native"), ("llama", "smooth")]
)
def test_checkpointing_changes_no_loss_of_outputs(family: str, router: str) -> None:
    models = [model_of(family, router).train() for _ in range(2)]
    with_checkpointing(models[1])
    found = [loss_of(model, text()) for model in models]
    for loss in found:
        loss.backward()
    torch.testing.assert_close(*found)
    assert_same(gradients(models[1]), gradients(models[0]), 1e-6)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_accumulated_losses_of_outputs_count_once(family: str) -> None:
    """By the share of each micro-batch, whether the training loss contains them or is made from logits alone."""
    batch = text(3, 12, (12, 5, 9))
    items, labels = 23, (15, 8)
    expected: dict[str, Tensor] = {}
    for chosen, count in zip((slice(0, 2), slice(2, 3)), labels, strict=True):
        model = quiet(model_of(family).train())
        (model(**rows(batch, chosen)).router_loss * count / items).backward()
        expected = {name: value + expected.get(name, 0) for name, value in gradients(model).items()}
    with_losses, without = quiet(model_of(family).train()), quiet(model_of(family, losses=Losses()).train())
    for model in (with_losses, without):
        for chosen in (slice(0, 2), slice(2, 3)):
            loss_of(model, rows(batch, chosen), num_items_in_batch=items).backward()
    plain = gradients(without)
    added = {name: value - plain[name] for name, value in gradients(with_losses).items() if ".experts." in name}
    assert_same(added, {name: value for name, value in expected.items() if ".experts." in name}, 1e-6)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_loss_from_logits_alone_trains_experts_as_much(family: str) -> None:
    models = [model_of(family).train() for _ in range(2)]
    holdfast.router_loss_scale(models[1], 0.5)
    batch = text()
    out = models[0](**batch)
    (out.logits.square().mean() + 0.5 * out.router_loss).backward()
    models[1](**batch).logits.square().mean().backward()
    assert_same(gradients(models[1]), gradients(models[0]), 1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_the_trainer_counts_losses_of_outputs_once(family: str, checkpointing: bool, tmp_path: Path) -> None:
    """Two micro-batches of one step, against the mean over them of one backward each."""
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(0))
    model, losses = model_of(family), []
    reference = quiet(model_of(family).train())
    for part in (ids[:2], ids[2:]):
        loss = reference(input_ids=part, labels=part).loss / 2
        loss.backward()
        losses.append(loss.item())
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": checkpointing,
        "max_grad_norm": 0.0,
    }
    options |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "logging_strategy": "steps"}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    run = trainer_of(quiet(model), tmp_path, ids, max_steps=1, per_device_train_batch_size=2, logging_steps=1, **options)
    run.train_dataset = [run.train_dataset[index] for index in range(4)]
    run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(run.train_dataset)
    run.train()
    logged = run.state.log_history[0]
    assert logged["loss"] == pytest.approx(sum(losses), rel=1e-3)
    assert logged["router/diversity"] > 0 and logged["router/distillation"] > 0
    moved = {name: before[name] - value.detach() for name, value in model.named_parameters() if ".experts." in name}
    assert_same(moved, {name: gradients(reference)[name] for name in moved}, 1e-5)


def test_a_model_without_a_teacher_says_how_to_give_one(tmp_path: Path) -> None:
    model = holdfast.reroute(tiny("mixtral"), "smooth", losses=Losses(distillation=1.0))
    assert model(**text()).loss.isfinite()  # evaluation needs none
    assert_refused("model.layers.0.mlp: the loss distillation.*set_teacher", model.train(), **text())
    assert_refused("unknown MoE layer 'model.layer.0.mlp'", holdfast.set_teacher, model, {"model.layer.0.mlp": zero})
    holdfast.set_teacher(model, zero)
    assert model(**text()).router_loss > 0
    copied = model_of("llama", losses=Losses(distillation=1.0))
    loaded = holdfast.load(holdfast.save(copied, tmp_path / "saved"))
    assert_refused("has none", loaded.train(), **text())
    teachers: dict[str, Any] = {layer.name: layer.block.teacher for layer in moe_layers(copied)}
    holdfast.set_teacher(loaded, teachers)
    torch.testing.assert_close(loaded(**text()).router_loss, copied.train()(**text()).router_loss)


def test_generation_and_evaluation_run_experts_once() -> None:
    model = model_of("mixtral").train()
    overheard, runs = Overheard(model), list[int]()

    def counted(forward: Any) -> Any:
        def run(*given: Any) -> Any:
            runs.append(1)
            return forward(*given)

        return run

    for layer in moe_layers(model):
        layer.experts.forward = counted(layer.experts.forward)
    ids = text()["input_ids"]
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, pad_token_id=0)
    model.eval()(input_ids=ids)
    assert len(runs) == 9 and overheard.losses == [{}] * 9
    model.train()(input_ids=ids)
    assert len(runs) == 18  # each layer once more for each loss
    holdfast.restore(model)(input_ids=ids)
    assert len(runs) == 21


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_gradients_of_these_losses_are_not_scaled_by_load(family: str) -> None:
    found = []
    for scaling in (None, 10.0):
        router = "smoe" if scaling is None else "smoe[gradient_scaling=10]"
        model = model_of(family, router, losses=Losses(distillation=1.0)).train()
        torch.manual_seed(0)
        holdfast.set_teacher(model, zero)
        model(**text()).router_loss.backward()
        found.append(gradients(model))
    assert_same(found[1], found[0], 1e-6)
