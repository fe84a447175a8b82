"""Checkpoints that a run can go on from: written to their end, or not there at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from holdfast.reading import LARGE, read_json

STATE = "trainer_state.json"  # the Trainer writes it last
UNWRITTEN = (OSError, RuntimeError, SafetensorError)  # what Python, torch and safetensors raise on a full disk


def last_whole(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: a run that is killed while it writes one leaves it torn."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    newest_first = sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: -int(steps[path]))
    return next((path for path in newest_first if _is_whole(path)), None)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What fails inside leaves no folder behind, and says in one sentence what could not be written."""
    try:
        yield
    except UNWRITTEN as problem:
        shutil.rmtree(folder, ignore_errors=True)
        raise unwritten(folder, problem) from problem


def unwritten(path: Path, problem: Exception) -> OSError:
    reason = " ".join(str(problem).split())
    return OSError(f"{path} could not be written ({reason}): is the disk full? What was saved before is kept.")


def _is_whole(checkpoint: Path) -> bool:
    try:
        read_json(checkpoint / STATE, limit=LARGE)
    except (OSError, ValueError):
        return False
    return True
