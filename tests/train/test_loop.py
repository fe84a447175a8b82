"""The training loop gives the numbers of the Hugging Face Trainer, and logs steps when their numbers have arrived."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import quick_or_slow

from holdfast.train import Recipe, Task, build_model, make_task
from holdfast.train.snapshots import routings_of
from holdfast.train.training import train

USUAL = {"training.steps": 6, "training.save_every": 3, "training.warmup": 2, "training.weight_decay": 0.1}
TEXT = {**USUAL, "model.config.attention_dropout": 0.2}
PICTURES = {**USUAL, "training.batch": 8, "model.config.hidden_dropout_prob": 0.1}
SAME: dict[str, tuple[str, str, dict[str, Any]]] = {  # the kind of data, the router, and changes to the recipe
    "text": ("text", "symphony+smooth", {}),
    "text, accumulated": ("text", "smoe", {"training.accumulate": 2}),
    "text, bf16": ("text", "smoe", {"training.precision": "bf16"}),
    "text, bf16, accumulated": ("text", "ac+smooth", {"training.precision": "bf16", "training.accumulate": 2}),
    "text, not clipped": ("text", "smoe", {"training.clip": 0.0}),
    "text, the best": ("text", "symphony", {"training.keep": "best", "training.learning_rate": 0.5, "training.steps": 8}),
    "text, noise": ("text", "smoe[noise=gaussian]", {}),
    "text, annealed": ("text", "smooth[anneal=true]", {}),
    "pictures": ("pictures", "smoe", {}),
    "pictures, accumulated": ("pictures", "symphony", {"training.accumulate": 2}),
    "pictures, bf16": ("pictures", "smoe", {"training.precision": "bf16"}),
    "pictures, the best": ("pictures", "smoe", {"training.keep": "best", "training.learning_rate": 0.2}),
}


def trained(task: Task, router: str, folder: Path, **options: Any) -> tuple[Any, list[dict[str, float]]]:
    model = build_model(task, *parsed(router), seed=3)
    return model, train(model, task, folder, seed=3, k=2, **options)


def parsed(router: str) -> tuple[str, dict[str, Any]]:
    from holdfast.train.recipe import parse_router

    choice = parse_router(router)
    return choice.router, dict(choice.options)


@pytest.mark.parametrize("case", quick_or_slow(SAME, ["text", "text, bf16, accumulated"]))
def test_the_loop_and_the_trainer_give_the_same_numbers(
    case: str, tiny: Callable[..., Recipe], digits: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Dropout is on, so the random numbers must be the same, too."""
    kind, router, changes = SAME[case]
    task = make_task(tiny({**TEXT, **changes}) if kind == "text" else digits({**PICTURES, **changes}))
    ours, log = trained(task, router, tmp_path / "ours")
    theirs, expected = trained(task, router, tmp_path / "theirs", trainer=True)
    assert log == expected
    assert len(log) >= task.recipe.training.steps and len({line["loss"] for line in log if "loss" in line}) > 2
    for name in ("log.jsonl", *(f"snapshots/{path.name}" for path in (tmp_path / "theirs" / "snapshots").iterdir())):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text(), name
    assert ours.training == theirs.training
    mine, others = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == others.keys() and [name for name in mine if not torch.equal(mine[name], others[name])] == []
    # What follows training uses the same arithmetic.
    for one, other in zip(*(routings_of(model, task.probe()).layers for model in (ours, theirs)), strict=True):
        assert torch.equal(one.logits, other.logits)
    assert json.dumps(ours.config.to_dict(), sort_keys=True) == json.dumps(theirs.config.to_dict(), sort_keys=True)
