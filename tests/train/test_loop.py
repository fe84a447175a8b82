"""The training loop gives the numbers of the Hugging Face Trainer, and logs steps when their numbers have arrived."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import Interrupted
from tiers import quick_or_slow
from train.conftest import AUGMENT, MakeRecipe
from wording import assert_refused

from holdfast.train import Task, build_model, make_task
from holdfast.train.loop import STEPS_AHEAD, StepLog, _Arriving
from holdfast.train.recipe import parse_router
from holdfast.train.snapshots import routings_of
from holdfast.train.step import StepRecord
from holdfast.train.training import train

USUAL = {"training.steps": 6, "training.save_every": 3, "training.warmup": 2, "training.weight_decay": 0.1}
TEXT = {**USUAL, "model.config.attention_dropout": 0.2}
IMAGES = {**USUAL, "training.batch": 8, "model.config.hidden_dropout_prob": 0.1}
SAME: dict[str, tuple[str, str, dict[str, Any]]] = {  # the kind of data, the router, and changes to the recipe
    "text": ("text", "symphony+smooth", {"training.snapshots": [0, 2, 5], "training.interference": True}),
    "text, accumulated": ("text", "smoe", {"training.accumulate": 2}),
    "text, bf16": ("text", "smoe", {"training.precision": "bf16"}),
    "text, bf16, accumulated": ("text", "ac+smooth", {"training.precision": "bf16", "training.accumulate": 2}),
    "text, not clipped": ("text", "smoe", {"training.clip": 0.0}),
    "text, the best": ("text", "symphony", {"training.keep": "best", "training.learning_rate": 0.5, "training.steps": 8}),
    "text, linear": ("text", "smoe", {"training.schedule": "linear", "training.floor": 0.1}),
    "text, cosine, epochs": (
        "text",
        "smoe",
        {"training.schedule": "cosine", "training.steps": None, "training.epochs": 0.5, "data.train_tokens": 900},
    ),
    "text, validated": ("text", "symphony", {"training.validate_every": 2}),
    "text, validated, the best": (
        "text",
        "smoe",
        {"training.validate_every": 2, "training.keep": "best", "training.learning_rate": 0.5, "training.steps": 8},
    ),
    "text, smoothed": ("text", "smoe", {"training.label_smoothing": 0.1, "training.accumulate": 2}),
    "text, all losses": ("text", "smoe", {"losses": {"z": 0.1, "entropy": 0.1, "importance": 0.1, "load": 0.1}}),
    "images, smoothed": ("images", "smoe", {"training.label_smoothing": 0.2, "training.schedule": "cosine"}),
    "images, the best figure": (
        "images",
        "smoe",
        {"training.keep": "best", "training.best_by": "figure", "training.validate_every": 1, "training.learning_rate": 0.2},
    ),
    "images, augmented": (
        "images",
        "symphony",
        {
            "training.augment": AUGMENT,
            "training.label_smoothing": 0.1,
            "training.schedule": "cosine",
            "training.floor": 0.01,
        },
    ),
    "images, augmented, accumulated": ("images", "symphony", {"training.augment": AUGMENT, "training.accumulate": 2}),
    "images, moved, bf16": (
        "images",
        "symphony",
        {"training.augment": {"pad": 1, "flip": True, "randaugment": 5}, "training.precision": "bf16"},
    ),
    "text, noise": ("text", "smoe[noise=gaussian]", {}),
    "text, annealed": ("text", "smooth[anneal=true]", {}),
    "images": ("images", "smoe", {}),
    "images, accumulated": ("images", "symphony", {"training.accumulate": 2}),
    "images, bf16": ("images", "smoe", {"training.precision": "bf16"}),
    "images, the best": ("images", "smoe", {"training.keep": "best", "training.learning_rate": 0.2}),
}


def trained(task: Task, router: str, folder: Path, **options: Any) -> tuple[Any, list[dict[str, float]]]:
    choice = parse_router(router)
    model = build_model(task, choice.router, choice.options, seed=3)
    return model, train(model, task, folder, seed=3, k=2, **options)


@pytest.mark.parametrize("case", quick_or_slow(SAME, ["text", "images, augmented"]))
def test_the_loop_and_the_trainer_give_the_same_numbers(
    case: str, tiny: MakeRecipe, digits: MakeRecipe, tmp_path: Path
) -> None:
    """Dropout is on, so the random numbers must be the same, too."""
    kind, router, changes = SAME[case]
    task = make_task(tiny({**TEXT, **changes}) if kind == "text" else digits({**IMAGES, **changes}))
    ours, log = trained(task, router, tmp_path / "ours")
    theirs, expected = trained(task, router, tmp_path / "theirs", trainer=True)
    assert log == expected
    assert len(log) >= task.steps and len({line["loss"] for line in log if "loss" in line}) > 2
    for name in ("log.jsonl", *(f"snapshots/{path.name}" for path in (tmp_path / "theirs" / "snapshots").iterdir())):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text(), name
    assert ours.training == theirs.training
    mine, others = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == others.keys() and [name for name in mine if not torch.equal(mine[name], others[name])] == []
    # What follows training uses the same arithmetic.
    for one, other in zip(*(routings_of(model, task.probe()).layers for model in (ours, theirs)), strict=True):
        assert torch.equal(one.logits, other.logits)
    assert json.dumps(ours.config.to_dict(), sort_keys=True) == json.dumps(theirs.config.to_dict(), sort_keys=True)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let numbers arrive late, as from a GPU; note each wait: the newest step so far, and the step that is waited for."""
    waits: list[tuple[int, int]] = []
    newest = 0

    class Late(_Arriving):  # type: ignore[misc]
        def __init__(self, step: int, record: StepRecord) -> None:
            nonlocal newest
            super().__init__(step, record)
            self.arrival, newest = self, step  # type: ignore[assignment]

        def synchronize(self) -> None:
            waits.append((newest, self.step))

    monkeypatch.setattr("holdfast.train.loop._Arriving", Late)
    return waits


def test_the_log_waits_only_for_steps_long_ago(waited: list[tuple[int, int]], tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log.jsonl", [], lambda: None)
    value = torch.zeros(())  # one place for all steps, as a captured step uses
    for step in range(1, 41):
        log.add(step, StepRecord(value.fill_(step), value, 0.5))
    assert waited and all(newest - step >= STEPS_AHEAD // 2 - 1 for newest, step in waited)
    assert len({newest for newest, _ in waited}) <= 5  # in groups
    log.add_line({"step": 40, "eval_loss": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    expected = [{"step": step, "loss": float(step), "grad_norm": float(step), "learning_rate": 0.5} for step in range(1, 41)]
    assert lines == log.lines == [*expected, {"step": 40, "eval_loss": 2.0}]


def test_an_interrupted_run_has_logged_all_its_steps(
    waited: list[tuple[int, int]], tiny: MakeRecipe, tmp_path: Path
) -> None:
    """Ctrl-C while numbers are still on the GPU."""

    def stop(steps: int) -> None:
        if steps == 5:
            assert not waited
            raise Interrupted

    with pytest.raises(Interrupted):
        trained(make_task(tiny({"training.steps": 40, "training.save_every": 40})), "smoe", tmp_path, tick=stop)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_late_numbers_give_the_same_log(
    waited: list[tuple[int, int]], tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots, evaluations and checkpoints come in between; the checkpoints contain the log up to their step."""
    task = make_task(tiny({**TEXT, "training.keep": "best", "training.steps": 7}))
    _, late = trained(task, "smoe", tmp_path / "late")
    states = [json.loads(path.read_text()) for path in (tmp_path / "late").glob("checkpoint-*/training.json")]
    assert states and waited
    for state in states:
        assert state["log"] == late[: 1 + max(n for n, line in enumerate(late) if line["step"] == state["global_step"])]
    monkeypatch.undo()
    _, usual = trained(task, "smoe", tmp_path / "usual")
    assert late == usual
    assert (tmp_path / "late" / "log.jsonl").read_text() == (tmp_path / "usual" / "log.jsonl").read_text()


def test_a_held_out_loss_of_nan_is_never_the_best(tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([math.nan, 3.0, math.nan, 4.0])
    monkeypatch.setattr("holdfast.train.loop.held_out_loss", lambda *_, **__: next(losses))
    task = make_task(tiny({"training.keep": "best", "training.steps": 7, "training.save_every": 2}))
    _, log = trained(task, "smoe", tmp_path)
    assert [line["step"] for line in log if "eval_loss" in line] == [2, 4, 6, 7]  # the last step is evaluated, too
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.parametrize("trainer", [False, True], ids=["loop", "Trainer"])
def test_a_run_that_diverges_in_its_last_step_fails_and_stores_no_checkpoint(
    trainer: bool, tiny: MakeRecipe, tmp_path: Path
) -> None:
    """A learning rate this large overflows float32 in one update, after which no forward follows."""
    task = make_task(tiny({"training.steps": 1, "training.warmup": 0, "training.learning_rate": 1e39}))
    assert_refused(
        r"is NaN or infinite after step 1: .* training\.learning_rate", trained, task, "smoe", tmp_path, trainer=trainer
    )
    assert list(tmp_path.glob("checkpoint-*")) == []
