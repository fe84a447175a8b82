"""Training as fine-tuning is done: schedules, epochs, validation, the best checkpoint, smoothed labels, all losses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import Interrupted, stop_at
from torch.nn.functional import cross_entropy
from train.conftest import MakeRecipe
from wording import assert_refused

import holdfast
from holdfast.hub.install import specs_of
from holdfast.train import Recipe, Task, build_model, make_task
from holdfast.train.augmentation import smoothing_term, soft_labels
from holdfast.train.loop import held_out_loss
from holdfast.train.recipe import TrainingPart, parse_router
from holdfast.train.task import require_trainable
from holdfast.train.training import SingleRun, train

Log = list[dict[str, float]]


def trained(task: Task, folder: Path, **options: Any) -> tuple[Any, Log]:
    model = build_model(task, "smoe", {}, seed=0)
    return model, train(model, task, folder, seed=0, k=2, **options)


def part(**values: Any) -> TrainingPart:
    return TrainingPart(**{"steps": 10, "batch": 1, "learning_rate": 0.5, **values})


# Schedules


def test_schedules_have_the_values_of_their_formulas() -> None:
    linear = part(schedule="linear", warmup=2, floor=0.2).rate_factor(10)
    assert [linear(done) for done in (0, 1, 2, 6, 10)] == pytest.approx([0.0, 0.5, 1.0, 0.2 + 0.8 * 0.5, 0.2])
    cosine = part(schedule="cosine", warmup=2, floor=0.1).rate_factor(10)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (done - 2) / 8)) for done in range(2, 11)]
    assert [cosine(done) for done in range(2, 11)] == pytest.approx(expected)
    assert (cosine(0), cosine(1), cosine(10)) == pytest.approx((0.0, 0.5, 0.1))
    assert [part().rate_factor(10)(done) for done in (0, 9)] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_without_a_floor_schedules_are_those_of_transformers(name: str) -> None:
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = transformers.get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=11)
    ours = part(schedule=name, warmup=3).rate_factor(11)
    for done in range(12):
        assert 0.5 * ours(done) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_the_log_shows_the_learning_rate_of_every_step(tiny: MakeRecipe, tmp_path: Path) -> None:
    changes = {"training.steps": 5, "training.warmup": 1, "training.learning_rate": 0.01, "training.schedule": "linear"}
    _, log = trained(make_task(tiny({**changes, "training.floor": 0.5})), tmp_path)
    assert [line["learning_rate"] for line in log] == pytest.approx([0.0, 0.01, 0.00875, 0.0075, 0.00625])


# Epochs and the amount of data


def test_epochs_use_every_example_as_often(tiny: MakeRecipe, tmp_path: Path) -> None:
    task = make_task(
        tiny({"training.steps": None, "training.epochs": 2, "data.train_tokens": 16 * 10 + 1, "training.batch": 3})
    )
    examples = task.examples(0)
    assert examples.order.count == 10 and task.steps == 7  # 20 examples in batches of 3, rounded up
    used = examples.order.at(range(20))
    assert used.bincount().tolist() == [2] * 10
    _, log = trained(task, tmp_path)
    assert [line["step"] for line in log] == list(range(1, 8))
    few = {"training.steps": None, "training.epochs": 0.5, "data.train_tokens": 161, "training.batch": 2}
    assert make_task(tiny({**few, "training.accumulate": 2})).steps == 2


def test_only_the_first_tokens_are_learnt_from(tiny: MakeRecipe) -> None:
    whole: Any = make_task(tiny())
    some: Any = make_task(tiny({"data.train_tokens": 500}))
    assert len(some.training.tokens) == 500 < len(whole.training.tokens)
    assert torch.equal(some.training.tokens, whole.training.tokens[:500])
    assert torch.equal(some.clean.blocks.tokens, whole.clean.blocks.tokens)


# Validation and the best checkpoint


@pytest.mark.parametrize("trainer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_validation_is_logged_and_does_not_change_training(trainer: bool, tiny: MakeRecipe, tmp_path: Path) -> None:
    """Dropout draws random numbers in every step."""
    usual = {"training.steps": 7, "model.config.attention_dropout": 0.3}
    _, plain = trained(make_task(tiny(usual)), tmp_path / "plain", trainer=trainer)
    task = make_task(tiny({**usual, "training.validate_every": 3}))
    model, log = trained(task, tmp_path / "validated", trainer=trainer)
    assert [line for line in log if "loss" in line] == plain
    assert [line["step"] for line in log if "eval_loss" in line] == [3, 6]
    assert json.loads((tmp_path / "validated" / "log.jsonl").read_text().splitlines()[3]) == log[3]
    model.eval()
    assert held_out_loss(model, task.validation(), 4, counts_labels=True) < log[3]["eval_loss"]


@pytest.mark.slow
def test_the_best_checkpoint_has_the_best_figure(digits: MakeRecipe, tmp_path: Path) -> None:
    changes = {"training.keep": "best", "training.best_by": "figure", "training.save_every": 2, "training.steps": 8}
    task: Any = make_task(digits({**changes, "training.learning_rate": 0.05, "training.validate_every": 1}))
    model, log = trained(task, tmp_path)
    lines = [line for line in log if "eval_figure" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    saved = {line["step"]: line["eval_figure"] for line in lines if line["step"] % 2 == 0}
    best = min(saved, key=lambda step: saved[step])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{best}"]
    assert task.held_out_figure(model.eval()) == saved[best]


@pytest.mark.slow
def test_an_interrupted_run_with_everything_resumes_to_the_same_numbers(tiny: MakeRecipe, tmp_path: Path) -> None:
    changes = {
        "training.steps": None,
        "training.epochs": 1.0,
        "data.train_tokens": 16 * 4 * 9 + 1,
        "training.schedule": "cosine",
        "training.floor": 0.1,
        "training.warmup": 2,
        "training.label_smoothing": 0.1,
        "training.validate_every": 2,
        "training.keep": "best",
        "training.learning_rate": 0.05,
        "training.save_every": 3,
        "model.config.attention_dropout": 0.2,
        "losses": {"z": 0.01, "load": 0.1},
    }
    recipe = tiny(changes)
    assert make_task(recipe).steps == 9
    whole = SingleRun(recipe, parse_router("symphony"), 1, tmp_path / "whole").run()
    with pytest.raises(Interrupted):
        SingleRun(recipe, parse_router("symphony"), 1, tmp_path / "parts").run(stop_at(5))
    parts = SingleRun(recipe, parse_router("symphony"), 1, tmp_path / "parts").run()
    assert parts == whole and len([line for line in whole if "eval_loss" in line]) == 6  # steps 2, 3, 4, 6, 8 and 9
    names = ("training/log.jsonl", "model/model.safetensors")
    assert all((tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)


# Label smoothing


def test_the_smoothing_term_is_that_of_cross_entropy() -> None:
    logits = torch.randn(3, 7, 11, requires_grad=True)
    labels = torch.randint(0, 11, (3, 7)).masked_fill(torch.rand(3, 7) < 0.3, -100)
    plain = cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)
    found = plain + 0.2 * smoothing_term(logits, labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in (found, expected)))
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2, reduction="sum")
    sums = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(sums / 40 + 0.2 * smoothing_term(logits, labels, 40), total / 40)


@pytest.mark.parametrize("kind", ["text", "images"])
def test_labels_are_smoothed_in_training_only(kind: str, tiny: MakeRecipe, digits: MakeRecipe) -> None:
    task = make_task(tiny({"losses.balance": 0.0}) if kind == "text" else digits({"losses.balance": 0.0}))
    model, inputs = build_model(task, "smoe", {}, seed=0), task.examples(0).__getitems__(range(4))
    with torch.random.fork_rng():
        plain = model.train()(**inputs)
    with soft_labels(model, 0.3):
        smoothed = model(**inputs)
        held_out = model.eval()(**inputs).loss
    labels, logits = inputs.get("shift_labels", inputs["labels"]).flatten(), smoothed.logits.flatten(0, -2)
    torch.testing.assert_close(smoothed.loss, cross_entropy(logits, labels, label_smoothing=0.3))
    assert float(smoothed.loss) != pytest.approx(float(plain.loss), abs=1e-4)
    torch.testing.assert_close(held_out, cross_entropy(model(**inputs).logits.flatten(0, -2), labels))
    torch.testing.assert_close(model.train()(**inputs).loss, plain.loss)  # the hook is gone


# Losses of routers


def loss_and_gradients(recipe: Recipe, router: str) -> tuple[float, dict[str, torch.Tensor]]:
    task = make_task(recipe)
    model = build_model(task, router, {}, seed=0).train()
    model(**task.examples(0).__getitems__(range(4)))  # the graph of symphony is 0 in the first forward
    loss = model(**task.examples(0).__getitems__(range(4))).loss
    loss.backward()
    named = [(name, own.grad) for name, own in model.named_parameters() if "score" in name]
    return float(loss), {name: gradient for name, gradient in named if gradient is not None}


@pytest.mark.parametrize("router", ["smoe", "symphony", "similarity", "attention", "ac", "smooth"])
def test_no_coefficient_of_a_loss_is_inert(router: str, tiny: MakeRecipe) -> None:
    few = {"model.config.num_hidden_layers": 1}
    _, without = loss_and_gradients(tiny({**few, "losses": {"balance": 0.0}}), router)
    losses = set()
    for name in ("balance", "importance", "load", "z", "entropy"):
        loss, found = loss_and_gradients(tiny({**few, "losses": {"balance": 0.0, name: 0.5}}), router)
        assert without.keys() == found.keys() and without
        assert all(not torch.allclose(found[key], value, atol=1e-6, rtol=1e-3) for key, value in without.items()), name
        losses.add(loss)
    assert len(losses) == 5  # each is a loss of its own


def test_the_losses_of_a_recipe(tiny: MakeRecipe) -> None:
    usual = dict.fromkeys(vars(holdfast.Losses()), 0.0)
    for changes, expected in (
        ({}, {**usual, "balance": 0.01}),
        ({"losses.balance": 0.3}, {**usual, "balance": 0.3}),
        ({"losses": {"z": 0.001}}, {**usual, "balance": 0.01, "z": 0.001}),
        ({"losses.balance": 0.0}, {**usual, "balance": 0.0}),
    ):
        model = build_model(make_task(tiny(changes)), "smoe", {}, seed=0)
        assert all(vars(spec.losses) == expected for spec in specs_of(model).values())


ALL_OUTPUTS = {"diversity": 0.1, "distillation": 0.1, "consistency": 0.5, "word_noise": 0.2}


def test_a_recipe_trains_with_losses_of_outputs_and_of_two_forwards(tiny: MakeRecipe, tmp_path: Path) -> None:
    """Copies of a dense network, which is their teacher; an interrupted run resumes to the same numbers."""
    recipe = tiny(
        {"sparse.init": "copy", "sparse.hidden": None, "training.steps": 4, "training.save_every": 2, "losses": ALL_OUTPUTS}
    )
    whole = SingleRun(recipe, parse_router("symphony+smooth"), 1, tmp_path / "whole").run()
    with pytest.raises(Interrupted):
        SingleRun(recipe, parse_router("symphony+smooth"), 1, tmp_path / "parts").run(stop_at(3))
    assert SingleRun(recipe, parse_router("symphony+smooth"), 1, tmp_path / "parts").run() == whole
    model = holdfast.load(tmp_path / "whole" / "model")
    assert not any("teacher" in name for name, _ in (*model.named_parameters(), *model.named_buffers()))


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ({"distillation": 0.1}, "start from a dense checkpoint with sparse.init=copy"),
        ({"consistency": 0.1}, "give word_noise"),
        ({"word_noise": 0.1}, "word_noise is 0.1 with consistency=0.0"),
    ],
)
def test_a_recipe_with_a_loss_that_cannot_train_is_refused_before_training(
    losses: dict[str, float], sentence: str, tiny: MakeRecipe
) -> None:
    assert_refused(sentence, build_model, make_task(tiny({"losses": losses})), "smoe", {}, seed=0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training.schedule": "linear", "training.warmup": 12}, "warmup is 12 and the run has 12 steps: .* never begins"),
        ({"training.best_by": "figure"}, "follows from its loss; leave training.best_by out"),
        ({"data.train_tokens": 10}, "a text of 10 tokens does not fill one block of 16"),
    ],
)
def test_mistakes_that_need_the_data_are_found_before_training(
    changes: dict[str, Any], sentence: str, tiny: MakeRecipe
) -> None:
    assert_refused(sentence, lambda: require_trainable(make_task(tiny(changes)), 0))
