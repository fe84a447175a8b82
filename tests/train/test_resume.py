"""Runs that are interrupted at any moment resume to the same numbers."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml
from interrupting import Interrupted, stop_at
from safetensors import SafetensorError
from tiers import quick_or_slow
from train.conftest import MakeRecipe
from without_times import as_text
from wording import mentions

import holdfast.files
from holdfast.train import Comparison, Recipe, load_recipe, parse_routers
from holdfast.train.run_folder import checkpoints, find_damage, newest_complete, write_checkpoint_manifest

ROUTER = "symphony+smooth[beta=0.8]"  # with state of its own, and a name that a pattern of paths would trip over


@pytest.fixture(scope="module")
def recipe(tiny: MakeRecipe) -> Recipe:
    # Random numbers must go on as well, and the curves of snapshots.
    changes = {"training.snapshots": [0, 3, 7, 9, 12], "training.interference": True}
    return tiny({"model.config.attention_dropout": 0.2, **changes})


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> str:
    return as_text(Comparison(recipe, parse_routers(ROUTER), 1, tmp_path_factory.mktemp("whole") / "run").run())


def interrupt(recipe: Recipe, folder: Path, step: int) -> Path:
    """Run until the progress of a step is reported; return the folder of the training."""
    with pytest.raises(Interrupted):
        Comparison(recipe, parse_routers(ROUTER), 1, folder).run(stop_at(step))
    return folder / "cells" / f"{ROUTER}-seed0" / "training"


@pytest.mark.parametrize("step", quick_or_slow([0, 3, 4, 5, 10, 12], [0, 5]))
def test_an_interrupted_run_resumes_to_the_same_numbers(step: int, recipe: Recipe, undisturbed: str, tmp_path: Path) -> None:
    training = interrupt(recipe, tmp_path, step)
    begun = newest_complete(training)[0]
    assert (begun.name if begun else None) == {5: "checkpoint-4", 10: "checkpoint-8", 12: "checkpoint-8"}.get(step)
    steps: list[int] = []
    again = Comparison(recipe, parse_routers(ROUTER), 1, tmp_path).run(lambda cell, done: steps.append(done))
    assert as_text(again) == undisturbed
    assert steps == list(range({5: 4, 10: 8, 12: 8}.get(step, 0), 13))  # no step is done again that was saved
    lines = [json.loads(line) for line in (training / "log.jsonl").read_text().splitlines()]
    assert lines == again[0]["log"] and [line["step"] for line in lines] == list(range(1, 13))


def test_a_frozen_router_resumes_frozen(tiny: MakeRecipe, tmp_path: Path) -> None:
    """StableMoE stops training a part of its router at 10% of the steps; a loaded one must not train it again."""
    recipe = tiny({"training.steps": 6, "training.save_every": 2, "training.warmup": 0, "training.learning_rate": 0.01})

    def weights(folder: Path) -> dict[str, Any]:
        Comparison(recipe, parse_routers("stablemoe"), 1, folder).run()
        return safetensors.torch.load_file(folder / "cells" / "stablemoe-seed0" / "model" / "model.safetensors")

    expected = weights(tmp_path / "whole")
    with pytest.raises(Interrupted):
        Comparison(recipe, parse_routers("stablemoe"), 1, tmp_path / "cut").run(stop_at(3))
    found = weights(tmp_path / "cut")
    assert [name for name, value in expected.items() if not value.equal(found[name])] == []


def sealed(checkpoint: Path) -> Path:
    """Write the files of a complete checkpoint."""
    checkpoint.mkdir()
    for name in ("model.safetensors", "optimizer.tensors", "random.tensors"):
        (checkpoint / name).write_text(name)
    (checkpoint / "training.json").write_text(json.dumps({"global_step": int(checkpoint.name.split("-")[1])}))
    write_checkpoint_manifest(checkpoint)
    return checkpoint


def test_the_newest_complete_checkpoint_is_found_by_its_number(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "none") == (None, [])
    for name in ("checkpoint-4", "checkpoint-10"):
        sealed(tmp_path / name)
    for name in ("checkpoint-x", "checkpoint-", "other-99"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    found, reasons = newest_complete(tmp_path)
    assert found == tmp_path / "checkpoint-10"
    assert len(reasons) == 1 and mentions(reasons[0], str(tmp_path / "checkpoint-11"), "checkpoint.json")


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_numbers(tiny: MakeRecipe, tmp_path: Path) -> None:
    """SIGKILL in the middle of a cell, after a checkpoint and a snapshot."""
    code = (
        "import sys; from pathlib import Path; from holdfast.train import *;"
        "Comparison(load_recipe(sys.argv[1]), parse_routers('symphony+smooth'), 1, Path(sys.argv[2])).run()"
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny({"training.steps": 40, "training.save_every": 6}).describe()))
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", code, str(tmp_path / "recipe.yaml"), str(folder)]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(60_000):
            if list(folder.glob("cells/*/training/snapshots/00000016.json")):
                break
            assert run.poll() is None
            time.sleep(0.01)
        os.kill(run.pid, signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    assert list(folder.glob("cells/*/training/checkpoint-*")) and not list(folder.glob("cells/*/result.json"))
    own = load_recipe(str(tmp_path / "recipe.yaml"))
    continued = Comparison(own, parse_routers("symphony+smooth"), 1, folder).run()
    assert as_text(continued) == as_text(Comparison(own, parse_routers("symphony+smooth"), 1, tmp_path / "whole").run())


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk(where: str) -> Iterator[None]:
    """Simulate a full disk after half of a write, with the errors of Python and safetensors."""
    import transformers

    calls: dict[str, int] = {}

    def due(name: str, when: int) -> bool:
        calls[name] = calls.get(name, 0) + 1
        return name == where and calls[name] >= when

    write, save_model = holdfast.files._write, transformers.modeling_utils.safe_save_file
    save_tensors = safetensors.torch.save_file

    def writing(path: Path, how: int, text: str, target: Path) -> None:
        for name in ("result.json", "task.json", "00000007.json", "router.json", "checkpoint.json"):
            if name in path.name and due(name, 1):
                write(path, how, text[: len(text) // 2], target)
                raise full()
        if "training.json" in path.name and due("training.json", 2):
            write(path, how, text[: len(text) // 2], target)
            raise full()
        if path.name == "log.jsonl" and due("log.jsonl", 6):
            write(path, how, '{"step": 6, "lo', target)
            raise full()
        write(path, how, text, target)

    def saving_model(weights: Any, file: Any, **options: Any) -> None:
        if due("model.safetensors", 2) or due("the model", 4):  # three checkpoints come before the model
            Path(file).write_bytes(b"half of it")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_model(weights, file, **options)

    def saving_tensors(tensors: Any, file: Any, **options: Any) -> None:
        if due(Path(file).name, 2):
            Path(file).write_bytes(b"half of it")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_tensors(tensors, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdfast.files, "_write", writing)
        patch.setattr(transformers.modeling_utils, "safe_save_file", saving_model)
        patch.setattr(safetensors.torch, "save_file", saving_tensors)
        yield


FULL = ["router.json", "00000007.json", "log.jsonl", "model.safetensors", "optimizer.tensors", "random.tensors"]
FULL += ["training.json", "checkpoint.json"]
FULL += ["the model", "task.json", "result.json"]


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    Comparison(recipe, parse_routers("smoe"), 1, folder).run()
    return folder


@pytest.mark.parametrize("where", quick_or_slow(FULL, ["model.safetensors", "result.json"]))
def test_a_full_disk_raises_one_error_and_keeps_finished_work(
    where: str, recipe: Recipe, undisturbed: str, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    routers = parse_routers(f"smoe,{ROUTER}")
    with full_disk(where), pytest.raises(OSError, match=r"No space left|could not be written .* is the disk full") as caught:
        Comparison(recipe, routers, 1, folder).run()
    assert "\n" not in str(caught.value)
    assert all(path.read_bytes() == content for path, content in before.items())
    cell = folder / "cells" / f"{ROUTER}-seed0"
    assert not (cell / "result.json").exists()
    for path in cell.rglob("*.json"):
        json.loads(path.read_text())
    left = [path.name for path in cell.rglob("*")]
    assert [name for name in left if name.startswith(".")] == [".lock"]
    assert all(find_damage(checkpoint) is None for checkpoint in checkpoints(cell / "training"))
    assert ("model" in left) == (where in ("task.json", "result.json"))
    again = Comparison(recipe, routers, 1, folder).run()
    assert as_text(again[1:]) == undisturbed
    assert as_text(again[:1]) == as_text(Comparison(recipe, parse_routers("smoe"), 1, finished).run())
    lines = (cell / "training" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == again[1]["log"]


def test_a_full_disk_while_the_summary_is_written_leaves_the_old_one(
    recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    comparison = Comparison(recipe, parse_routers("smoe"), 1, folder)
    rows = comparison.finish(comparison.run())
    before = (folder / "results.json").read_bytes()
    write = holdfast.files._write

    def writing(path: Path, how: int, text: str, target: Path) -> None:
        write(path, how, text[:100], target)
        raise full()

    with monkeypatch.context() as patch:
        patch.setattr(holdfast.files, "_write", writing)
        with pytest.raises(OSError, match="No space left"):
            comparison.finish(comparison.run())
    assert (folder / "results.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "cells", "results.json", "run.json"]
    assert comparison.finish(comparison.run()) == rows
