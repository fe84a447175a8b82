"""Damaged run folders: damaged checkpoints are skipped, damaged files raise one line, no link leads out of the folder."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import Command
from interrupting import Interrupted, stop_at
from safetensors.torch import load_file, save_file
from tiers import quick_or_slow
from train.conftest import MakeRecipe
from without_times import as_text
from wording import assert_refused

from holdfast.locking import LockLostError
from holdfast.train import Cell, Comparison, Recipe, build_model, make_task, parse_routers, train
from holdfast.train.cells import merge_results
from holdfast.train.run_folder import (
    TRAINER_FILES,
    claim,
    find_damage,
    write_checkpoint_manifest,
    write_json,
    write_with_checksum,
)

SMALL = {"training.steps": 6, "training.save_every": 2, "data.test_bytes": 800, "model.config.attention_dropout": 0.2}
CELL = "smoe-seed0"


@pytest.fixture(scope="module")
def recipe(tiny: MakeRecipe) -> Recipe:
    return tiny(SMALL)


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> str:
    return as_text(run(recipe, tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def interrupted(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was stopped after step 5, with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(Interrupted):
        Comparison(recipe, parse_routers("smoe"), 1, folder).run(stop_at(5))
    names = sorted(path.name for path in folder.glob("cells/*/training/checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-4"]
    return folder


@pytest.fixture
def folder(interrupted: Path, tmp_path: Path) -> Path:
    shutil.copytree(interrupted, tmp_path / "run")
    return tmp_path / "run"


def run(recipe: Recipe, folder: Path, told: list[int] | None = None) -> list[dict[str, Any]]:
    steps = [] if told is None else told
    return Comparison(recipe, parse_routers("smoe"), 1, folder).run(lambda cell, done: steps.append(done))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_digit(path: Path) -> None:
    text = path.read_text()
    place = next(match.start() for match in re.finditer(r"[0-7]", text) if match.start() > len(text) // 2)
    path.write_text(text[:place] + str(int(text[place]) ^ 1) + text[place + 1 :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def another_best(checkpoint: Path) -> None:
    """Write a manifest that agrees with the files, and a state that names a best checkpoint that does not exist."""
    state = json.loads((checkpoint / "training.json").read_text())
    (checkpoint / "training.json").write_text(json.dumps({**state, "best_global_step": 3}))
    (checkpoint / "checkpoint.json").unlink()
    write_checkpoint_manifest(checkpoint)


def in_state(checkpoint: Path, old: str, new: str) -> None:
    """Change the state of a checkpoint, and the manifest with it."""
    file = checkpoint / "training.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    write_checkpoint_manifest(checkpoint)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit in the weights": (lambda path: flip_a_bit(path / "model.safetensors"), "model.safetensors is not the"),
    "a flipped bit in the optimizer": (lambda path: flip_a_bit(path / "optimizer.tensors"), "optimizer.tensors is not the"),
    "no optimizer": (lambda path: (path / "optimizer.tensors").unlink(), "optimizer.tensors is missing"),
    "no random state": (lambda path: (path / "random.tensors").unlink(), "random.tensors is missing"),
    "half a state": (lambda path: cut(path / "training.json"), "training.json is not the file"),
    "half the weights": (lambda path: cut(path / "model.safetensors"), "model.safetensors is not the file"),
    "no manifest": (lambda path: (path / "checkpoint.json").unlink(), "was not written completely"),
    "half a manifest": (lambda path: cut(path / "checkpoint.json"), "was not written completely"),
    "a file too many": (lambda path: (path / "pytorch_model.bin").write_text(""), "pytorch_model.bin does not belong to it"),
    "a best that is not there": (another_best, "the best checkpoint, checkpoint-3, has no readable"),
    "a step that is not whole": (
        lambda path: in_state(path, '"global_step": 4', '"global_step": 4.0'),
        "another step",
    ),
    "a best after the last step": (
        lambda path: in_state(path, '"best_global_step": null', '"best_global_step": 5'),
        "names no best step",
    ),
    "no snapshot": (
        lambda path: (path.parent / "snapshots" / "00000004.json").unlink(),
        "the snapshot .*00000004.json is missing or damaged",
    ),
    "another expert in a snapshot": (
        lambda path: other_digit(path.parent / "snapshots" / "00000004.json"),
        "the snapshot .*00000004.json is missing or damaged",
    ),
}
QUICK = ["a flipped bit in the weights", "no optimizer", "a best that is not there", "another expert in a snapshot"]


@pytest.mark.parametrize("damage", quick_or_slow(DAMAGE, QUICK))
def test_a_damaged_checkpoint_is_skipped_for_an_older_one(
    damage: str, recipe: Recipe, undisturbed: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = DAMAGE[damage]
    spoil(folder / "cells" / CELL / "training" / "checkpoint-4")
    steps: list[int] = []
    assert as_text(run(recipe, folder, steps)) == undisturbed
    assert steps[:2] == [2, 3]
    (said,) = (record.getMessage() for record in caplog.records if record.name == "holdfast")
    assert "\n" not in said and "checkpoint-2" in said
    assert "checkpoint-4" in said and re.search(reason, said)


def test_the_run_file_of_another_program_is_kept(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"mine": 1})
    assert_refused("belongs to another run", claim, tmp_path, {"holdfast": "1", "recipe": {}})
    write_json(tmp_path / "run.json", {"holdfast": "1", "recipe": {"steps": 2}})  # begun, and corrected
    claim(tmp_path, {"holdfast": "1", "recipe": {}})
    assert json.loads((tmp_path / "run.json").read_text()) == {"holdfast": "1", "recipe": {}}


def test_every_damage_is_found(interrupted: Path, tmp_path: Path) -> None:
    """Check all of the above without training; complete checkpoints have no damage."""
    for number, (damage, (spoil, _)) in enumerate(DAMAGE.items()):
        place = tmp_path / str(number)
        shutil.copytree(interrupted / "cells" / CELL / "training", place)
        assert find_damage(place / "checkpoint-4") is None
        spoil(place / "checkpoint-4")
        assert (find_damage(place / "checkpoint-4") is not None) == ("snapshot" not in damage), damage
        assert find_damage(place / "checkpoint-2") is None


def test_without_a_complete_checkpoint_a_run_starts_again_and_warns(
    recipe: Recipe, undisturbed: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for checkpoint in (folder / "cells" / CELL / "training").glob("checkpoint-*"):
        flip_a_bit(checkpoint / "optimizer.tensors")
    steps: list[int] = []
    assert as_text(run(recipe, folder, steps)) == undisturbed
    assert steps[0] == 0 and caplog.records[0].getMessage().endswith("; starting from the first step.")


OTHER_FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {  # what a manifest that agrees with the files cannot tell
    "an optimizer that is code": ("optimizer.tensors", lambda file: file.write_bytes(pickle.dumps(Evil(file.parent)))),
    "a random state that is code": ("random.tensors", lambda file: file.write_bytes(pickle.dumps(Evil(file.parent)))),
    "an optimizer of another model": ("optimizer.tensors", lambda file: save_file({"exp_avg/x": torch.ones(1)}, file)),
    "moments of another shape": (
        "optimizer.tensors",
        lambda file: save_file({name: tensor.flatten()[:1] for name, tensor in load_file(file).items()}, file),
    ),
    "no moments": ("optimizer.tensors", lambda file: save_file({}, file)),
    "a moment that is missing": (
        "optimizer.tensors",
        lambda file: save_file({name: tensor for name, tensor in load_file(file).items() if "sq/" not in name}, file),
    ),
    "a log of other things": ("training.json", lambda file: file.write_text('{"global_step": 4, "log": ["a", null]}')),
    "random states of another kind": ("random.tensors", lambda file: save_file({"torch": torch.ones(3)}, file)),
    "a log that is no list": ("training.json", lambda file: file.write_text('{"global_step": 4, "log": "none"}')),
    "a state with other entries": ("training.json", lambda file: file.write_text('{"global_step": 4, "epoch": 1}')),
}


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "ran"),)


@pytest.mark.parametrize("case", OTHER_FILES)
def test_a_file_that_is_not_of_this_run_raises_and_is_not_executed(case: str, recipe: Recipe, folder: Path) -> None:
    name, write = OTHER_FILES[case]
    checkpoint = folder / "cells" / CELL / "training" / "checkpoint-4"
    write(checkpoint / name)
    write_checkpoint_manifest(checkpoint)
    assert_refused(r"checkpoint-4 .*\(.*\).*delete", run, recipe, folder)
    assert not list(folder.rglob("ran"))


@pytest.mark.slow
def test_a_checkpoint_of_the_trainer_is_refused_and_kept(recipe: Recipe, folder: Path) -> None:
    """Older versions trained cells on the Trainer, and `holdfast train` on several ranks still does."""
    training = folder / "cells" / CELL / "training"
    shutil.rmtree(training)
    task = make_task(recipe)
    with pytest.raises(Interrupted):
        train(build_model(task, "smoe", {}, seed=0), task, training, seed=0, k=2, tick=stop_at(3), trainer=True)
    assert find_damage(training / "checkpoint-2", TRAINER_FILES) is None
    assert_refused(r"checkpoint-2 was written by the Hugging Face Trainer.*remove .*training to", run, recipe, folder)
    assert find_damage(training / "checkpoint-2", TRAINER_FILES) is None


@pytest.mark.parametrize("content", ["{", "{}", "[]", '"text"', "[" * 100_000, '{"router": "ac", "seed": 0}'])
def test_the_cell_of_a_damaged_result_is_trained_again(
    content: str, recipe: Recipe, undisturbed: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "cells" / CELL / "result.json").write_text(content)
    assert Comparison(recipe, parse_routers("smoe"), 1, folder).stored(Cell(parse_routers("smoe")[0], 0)) is None
    if content == "{":
        assert as_text(run(recipe, folder)) == undisturbed
        assert "result.json is damaged" in caplog.text


@pytest.mark.parametrize("damage", ["another figure", "a named pipe", "unknown options"])
def test_a_changed_result_is_not_accepted(damage: str, recipe: Recipe, folder: Path) -> None:
    result, router = (folder / "cells" / CELL / name for name in ("result.json", "router.json"))
    cell = Cell(parse_routers("smoe")[0], 0)
    write_json(router, cell.choice.describe())
    write_with_checksum(result, {"router": "smoe", "seed": 0, "clean": {"figure": 70.5}})
    comparison = Comparison(recipe, parse_routers("smoe"), 1, folder)
    assert comparison.stored(cell) is not None
    if damage == "another figure":
        result.write_text(result.read_text().replace("70.5", "60.5"))
    elif damage == "a named pipe":
        result.unlink()
        os.mkfifo(result)
    else:
        router.unlink()
    assert comparison.stored(cell) is None
    if damage != "unknown options":
        assert_refused(r"result\.json.*remove .*seed0", merge_results, folder, [])


def test_results_that_are_nested_too_deep_are_written_again(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("[" * 100_000)
    assert merge_results(tmp_path, [{"router": "smoe", "seed": 0}]) == [{"router": "smoe", "seed": 0}]


@pytest.mark.parametrize("name", ["run.json", f"cells/{CELL}/router.json"])
def test_incomplete_files_raise_an_error_that_names_the_folder(name: str, recipe: Recipe, folder: Path) -> None:
    for content in ("{", "\0\0\0\0", "[" * 100_000, "{}"):
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match="run") as caught:
            run(recipe, folder)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def link_to(target: str) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    return put


PLACES = [
    "run.json",
    "cells",
    f"cells/{CELL}",
    f"cells/{CELL}/model",
    f"cells/{CELL}/task.json",
    f"cells/{CELL}/result.json",
    f"cells/{CELL}/router.json",
    f"cells/{CELL}/.lock",
    f"cells/{CELL}/.owner",
    f"cells/{CELL}/training",
    f"cells/{CELL}/training/log.jsonl",
    f"cells/{CELL}/training/snapshots",
    f"cells/{CELL}/training/checkpoint-4",
    f"cells/{CELL}/training/checkpoint-6",
    f"cells/{CELL}/training/checkpoint-2/optimizer.tensors",
    f"cells/{CELL}/training/runs",
    ".lock",
]


def contents(folder: Path) -> dict[str, Any]:
    """Return every file and link below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


@pytest.mark.parametrize("target", ["folder", "file", "dangling"])
@pytest.mark.parametrize("place", PLACES)
def test_a_link_in_a_run_folder_is_refused_and_nothing_is_touched(
    place: str, target: str, recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    if target == "folder":
        victim.mkdir()
        (victim / "precious.txt").write_text("precious")
    elif target == "file":
        victim.write_text("precious")
    link_to(str(victim))(folder / place)
    before = contents(tmp_path)
    with pytest.raises((ValueError, OSError)) as caught:
        run(recipe, folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert contents(tmp_path) == before


def test_train_refuses_links_with_exit_code_2(recipe: Recipe, tmp_path: Path, command: Command) -> None:
    """The folder that the user names may be a link."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.describe()))
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    line = ("train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out"))
    assert command(*line).returncode == 0
    assert (tmp_path / "real" / "model" / "model.safetensors").is_file()
    victim = tmp_path / "victim"
    (tmp_path / "real" / "model").rename(victim)
    (tmp_path / "real" / "model").symlink_to(victim)
    before = contents(tmp_path)
    ended = command(*line)
    assert ended.returncode == 2 and ended.stderr.startswith("holdfast: ") and ended.stderr.count("\n") == 1
    assert "model is a symbolic link" in ended.stderr
    assert contents(tmp_path) == before


def test_results_and_pages_are_not_written_over_links(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    comparison = Comparison(recipe, parse_routers("smoe"), 1, folder)
    results = comparison.run()
    (folder / "results.json").symlink_to(tmp_path / "victim")
    assert_refused(r"results\.json is a symbolic link", comparison.finish, results)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_process_that_lost_its_lock_stops_writing(recipe: Recipe, folder: Path) -> None:
    """Simulate a process whose cell another machine has taken over."""
    seen: dict[str, Any] = {}

    def taken_over(cell: Cell, steps: int) -> None:
        if steps == 5:
            note = folder / "cells" / CELL / ".owner"
            write_json(note, {**json.loads(note.read_text()), "host": "another"})
            seen.update(contents(folder))

    with pytest.raises(LockLostError, match=CELL):
        Comparison(recipe, parse_routers("smoe"), 1, folder).run(taken_over)
    assert seen and contents(folder) == seen
