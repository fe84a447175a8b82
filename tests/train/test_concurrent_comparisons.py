"""Several processes on one folder, one of them killed: the numbers of a process that ran alone, to the bit."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from train.conftest import MakeRecipe
from without_times import without_times
from wording import mentions

from holdfast.locking import Lock
from holdfast.train import Comparison, parse_routers

STEPS = 6
SMALL = {"training.steps": STEPS, "training.save_every": 2, "data.test_bytes": 800, "model.config.num_hidden_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "seed"), [(1, 3), (10, 100)])
def test_three_processes_on_one_folder_give_the_numbers_of_one(
    rounds: int, seed: int, tiny: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny(SMALL).describe()))
    script = Path(__file__).with_name("concurrent_comparisons.py")
    command = [sys.executable, str(script), str(rounds), str(seed), str(tmp_path), str(recipe)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == rounds
    clean = stored(tmp_path / "clean")
    assert len(clean["cells"]) == 4
    for number, line in enumerate(lines):
        folder = tmp_path / f"round-{number}"
        said = [(tmp_path / f"round-{number}-{which}.txt").read_text() for which in range(3)]
        assert [code for which, code in enumerate(line["ended"]) if which != line["victim"]] == [0, 0], said
        assert line["ended"][line["victim"]] in (0, -9), said
        assert stored(folder) == clean, line
        for log in folder.glob("cells/*/training/log.jsonl"):
            assert [json.loads(text)["step"] for text in log.read_text().splitlines()] == list(range(1, STEPS + 1))
        assert len(list(folder.glob("cells/*/training/log.jsonl"))) == 4
        assert not list(folder.rglob(".*.saving-*"))


def test_a_process_logs_which_process_it_waits_for_and_reads_its_result(
    tiny: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains a free cell in the meantime."""
    few = {**SMALL, "training.steps": 2}
    clean = Comparison(tiny(few), parse_routers("smoe,ac"), 1, tmp_path / "clean").run()
    lock = Lock(tmp_path / "run" / "cells" / "smoe-seed0")
    shutil.copytree(tmp_path / "clean", tmp_path / "run", ignore=shutil.ignore_patterns("cells"))
    assert lock.attempt() is None

    def finish() -> None:
        for _ in range(6000):
            if "waiting for cell" in caplog.text:
                break
            time.sleep(0.1)
        shutil.copytree(tmp_path / "clean" / "cells" / "smoe-seed0", lock.folder, dirs_exist_ok=True)
        lock.release()

    other = threading.Thread(target=finish)
    other.start()
    done: list[tuple[str, int]] = []
    found = Comparison(tiny(few), parse_routers("smoe,ac"), 1, tmp_path / "run").run(
        lambda cell, steps: done.append((cell.name, steps))
    )
    other.join()
    assert without_times(found) == without_times(clean)
    assert done == [("ac-seed0", 0), ("ac-seed0", 1), ("ac-seed0", 2), ("smoe-seed0", 2)]
    said = [record.getMessage() for record in caplog.records if record.name == "holdfast"]
    assert len(said) == 1 and mentions(said[0], "smoe-seed0", f"process {os.getpid()} ", socket.gethostname())


def stored(folder: Path) -> dict[str, Any]:
    """Return all results without their times."""
    return dict(without_times(json.loads((folder / "results.json").read_text())))
