"""Routers compared: equal conditions, resumable, the same numbers every time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.train import Comparison, Contender, Recipe, load_recipe, make_task, start
from holdfast.train.text_task import TextTask

SMALL = {
    "training.steps": 12,
    "training.batch": 4,
    "training.save_every": 4,
    "data.length": 16,
    "data.vocabulary": 200,
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 32,
    "sparse.hidden": 16,
    "attack.rate": 0.2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from holdfast.data import python_topics

    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n\n".join(list(python_topics().values())[:12])[:60_000])
    return path


def recipe(text: Path, **changes: Any) -> Recipe:
    return load_recipe("tiny", {**SMALL, "data.source": str(text), **changes})


def contenders(*names: str) -> list[Contender]:
    return [Contender(name, name) for name in names]


def without_folder(results: list[dict[str, Any]]) -> str:
    return json.dumps(results, sort_keys=True)


def test_a_comparison_gives_the_same_numbers_every_time(text: Path, tmp_path: Path) -> None:
    first = Comparison(recipe(text), contenders("smoe", "symphony+smooth"), 2, tmp_path / "a").run()
    second = Comparison(recipe(text), contenders("smoe", "symphony+smooth"), 2, tmp_path / "b").run()
    assert without_folder(first) == without_folder(second)
    assert [(result["router"], result["seed"]) for result in first] == [
        ("smoe", 0),
        ("symphony+smooth", 0),
        ("smoe", 1),
        ("symphony+smooth", 1),
    ]


def test_every_test_token_is_scored_once_and_all_routers_see_the_same_batches(text: Path, tmp_path: Path) -> None:
    comparison = Comparison(recipe(text), contenders("smoe", "similarity", "ac"), 1, tmp_path / "run")
    results = comparison.run()
    task = comparison.task
    assert isinstance(task, TextTask)
    tokens = sum(len(piece) for piece in task.tokenizer.pieces(task.corpus.documents("test")))
    assert {result["clean"]["tokens"] for result in results} == {tokens - 1}
    assert len({(result["first_batch"], result["last_batch"]) for result in results}) == 1
    assert results[0]["first_batch"] != results[0]["last_batch"]


def test_a_router_of_strength_zero_reproduces_the_baselines_curve_exactly(text: Path, tmp_path: Path) -> None:
    plain = [Contender("smoe", "smoe")]
    silent = [
        Contender("similarity, silent", "similarity", {"strength": 0.0}),
        Contender("attention, silent", "attention", {"strength": 0.0}),
        Contender("ac, skipped", "ac", {"skip": 9}),
        Contender("smooth, no budget", "smooth", {"budget": 0.0}),
    ]
    results = Comparison(recipe(text), plain + silent, 1, tmp_path / "run").run()
    for result in results[1:]:
        assert result["log"] == results[0]["log"], result["router"]
        assert result["clean"]["nll"] == results[0]["clean"]["nll"]


def test_an_attack_at_rate_zero_changes_nothing(text: Path, tmp_path: Path) -> None:
    (result,) = Comparison(recipe(text, **{"attack.rate": 0.0}), contenders("smooth"), 1, tmp_path / "run").run()
    assert result["attacked"]["nll"] == result["clean"]["nll"]
    (attacked,) = Comparison(recipe(text), contenders("smooth"), 1, tmp_path / "other").run()
    assert attacked["attacked"]["nll"] != attacked["clean"]["nll"]


def test_what_routers_have_in_common_starts_equal(text: Path) -> None:
    task = make_task(recipe(text))
    models = {name: start(task, name, {}, seed=3) for name in ("smoe", "ac", "symphony+smooth", "xmoe")}
    plain = dict(models["smoe"].named_parameters())
    for name, model in models.items():
        for key, parameter in model.named_parameters():
            twin = plain.get(key.replace(".score.base.", ".score."))
            assert twin is None or torch.equal(parameter, twin), (name, key)
    other = dict(start(task, "smoe", {}, seed=4).named_parameters())
    assert not torch.equal(plain["model.layers.0.mlp.experts.down_proj"], other["model.layers.0.mlp.experts.down_proj"])
    assert not torch.equal(plain["model.layers.0.mlp.router.score.weight"], other["model.layers.0.mlp.router.score.weight"])


def test_a_finished_cell_is_not_run_again_and_a_new_router_joins(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Comparison(recipe(text), contenders("smoe"), 1, folder).run()
    (result,) = (folder / "cells").glob("*/result.json")
    before = result.stat().st_mtime_ns
    results = Comparison(recipe(text), contenders("smoe", "smooth"), 1, folder).run()
    assert result.stat().st_mtime_ns == before
    assert [result["router"] for result in results] == ["smoe", "smooth"]


def test_a_run_that_was_killed_goes_on_to_the_same_numbers(text: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a cell, after a checkpoint."""
    code = (
        "import sys; from pathlib import Path; from holdfast.train import *;"
        "Comparison(load_recipe(sys.argv[1]), [Contender('symphony+smooth', 'symphony+smooth')], 1, Path(sys.argv[2])).run()"
    )
    import yaml

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(text, **{"training.steps": 40}).describe()))
    folder = tmp_path / "killed"
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "recipe.yaml"), str(folder)], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(1200):
            if list(folder.glob("cells/*/training/checkpoint-*/trainer_state.json")):
                break
            assert run.poll() is None
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    assert not list(folder.glob("cells/*/result.json"))
    contender = contenders("symphony+smooth")
    own = load_recipe(str(tmp_path / "recipe.yaml"))
    continued = Comparison(own, contender, 1, folder).run()
    assert without_folder(continued) == without_folder(Comparison(own, contender, 1, tmp_path / "whole").run())


def test_folders_and_routers_that_do_not_fit_get_one_sentence(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Comparison(recipe(text), contenders("smoe"), 1, folder).run()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "empty.txt").write_text("")
    mistakes = [
        (
            lambda: Comparison(recipe(text, **{"training.steps": 13}), contenders("smoe"), 1, folder),
            "belongs to another run",
        ),
        (lambda: Comparison(recipe(text), contenders("smoe"), 1, tmp_path / "full"), "holds no comparison"),
        (lambda: Comparison(recipe(text), contenders("smoe", "smoe"), 1, tmp_path / "x"), "each once"),
        (lambda: Comparison(recipe(text), [], 1, tmp_path / "x"), "none"),
        (lambda: Comparison(recipe(text), contenders("smoe"), 0, tmp_path / "x"), "seeds is 0"),
        (lambda: Comparison(recipe(text), [Contender("smoe", "smoe", k=3)], 1, folder).run(), "other options"),
        (lambda: Comparison(recipe(text), contenders("smoth"), 1, tmp_path / "x").run(), "smooth"),
        (lambda: Comparison(recipe(tmp_path / "empty.txt"), contenders("smoe"), 1, tmp_path / "x"), "empty"),
        (lambda: Comparison(recipe(tmp_path / "none.txt"), contenders("smoe"), 1, tmp_path / "x"), "does not exist"),
    ]
    for mistake, sentence in mistakes:
        with pytest.raises(ValueError, match=sentence) as caught:
            mistake()
        assert "\n" not in str(caught.value)
