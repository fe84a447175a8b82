"""Parallel cells: they give the numbers of sequential ones, and a failing cell does not stop the others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from train.conftest import MakeRecipe
from without_times import as_text

from holdfast.train import Comparison, RouterChoice, parse_routers

STEPS = 3


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Simulate a machine with two cores."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_parallel_cells_give_the_numbers_of_sequential_ones(
    tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is so large that more threads would round differently; another cell fails, after the others have begun."""
    monkeypatch.setattr("holdfast.train.comparison.preflight", lambda *_, **__: None)
    large = {"model.config.hidden_size": 64, "model.config.intermediate_size": 64, "sparse.hidden": 64, "data.length": 64}
    recipe = tiny({**large, "training.batch": 16, "training.steps": STEPS, "data.vocabulary": 2000})
    folder, routers = tmp_path / "jobs", parse_routers("smoe,symphony+smooth")
    told: list[tuple[str, int]] = []
    with pytest.raises(ValueError, match=r"tau.* -1") as caught:
        Comparison(recipe, [*routers, RouterChoice("broken", "similarity", {"tau": -1.0})], 1, folder).run(
            lambda cell, steps: told.append((cell.name, steps)), jobs=2
        )
    assert "\n" not in str(caught.value)
    assert any(steps == STEPS for _, steps in told) and {name for name, _ in told} <= {"smoe-seed0", "symphony+smooth-seed0"}

    finished = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/result.json")}
    assert sorted(path.parent.name for path in finished) == ["smoe-seed0", "symphony+smooth-seed0"]
    side_by_side = Comparison(recipe, routers, 1, folder).run()
    assert {path: path.stat().st_mtime_ns for path in finished} == finished  # none was trained again
    one_after_the_other = Comparison(recipe, routers, 1, tmp_path / "alone").run()
    assert as_text(side_by_side) == as_text(one_after_the_other)
    assert torch.get_num_threads() == 2


def test_finished_cells_need_no_workers(tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny({"training.steps": 1})
    first = Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run").run()

    def started(*_: Any) -> None:
        raise AssertionError("a finished cell was trained again")

    monkeypatch.setattr("holdfast.train.comparison._train_in_worker", started)
    assert Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run").run(jobs=2) == first


@pytest.mark.slow
def test_a_killed_worker_raises_a_one_line_error(tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.comparison._train_in_worker", kill_this_process)
    comparison = Comparison(tiny({"training.steps": 1}), parse_routers("smoe"), 1, tmp_path / "run")
    with pytest.raises(OSError, match=r"memory.*--jobs"):
        comparison.run(jobs=2)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_workers_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """Otherwise they would keep their memory forever."""
    program = (
        "from holdfast.train import comparison\n"
        "from multiprocessing import get_context\n"
        "import os, signal, time\n"
        "def wait(): comparison.end_with_parent(); print(os.getpid(), flush=True); time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    process = get_context('spawn').Process(target=wait, daemon=True)\n"
        "    process.start()\n"
        "    time.sleep(60)\n"
    )
    (tmp_path / "command.py").write_text(program)
    with subprocess.Popen([sys.executable, tmp_path / "command.py"], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        command.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2]


@pytest.mark.slow
def test_an_interrupted_comparison_ends_its_workers_at_once(
    tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the cells otherwise: these workers sleep for an hour. Ctrl-C itself never reaches them."""
    monkeypatch.setenv("NOTES_OF_A_WORKER", str(tmp_path / "notes"))
    monkeypatch.setattr("holdfast.train.comparison._train_in_worker", note_and_sleep)

    def wait_or_interrupt(*given: Any, **named: Any) -> Any:
        if (tmp_path / "notes").exists():
            raise KeyboardInterrupt
        return wait(*given, **named)

    monkeypatch.setattr("holdfast.train.comparison.wait", wait_or_interrupt)
    with pytest.raises(KeyboardInterrupt):
        Comparison(tiny({"training.steps": 1}), parse_routers("smoe"), 1, tmp_path / "run").run(jobs=2)
    assert active_children() == []
    assert (tmp_path / "notes").read_text() == "SIGINT is blocked: True"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def note_and_sleep(number: int) -> None:
    notes = Path(os.environ["NOTES_OF_A_WORKER"])
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    notes.with_suffix(".new").write_text(f"SIGINT is blocked: {blocked}")
    notes.with_suffix(".new").replace(notes)
    time.sleep(3600)


def kill_this_process(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
