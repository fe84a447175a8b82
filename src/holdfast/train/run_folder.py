"""JSON files of a run, written whole; those that a later run takes for its own results hold a checksum.

Whose a folder is: output goes into an empty folder, or continues what the same run has begun there.

Checkpoints that a run can go on from: whole, with a manifest of all their files, or passed over.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from holdfast.files import (
    LARGE,
    LARGEST,
    read_json,
    remove_folder,
    remove_partial,
    require_no_links,
    require_no_links_inside,
    write_whole,
)
from holdfast.hub.folder_files import sha256_of
from holdfast.locking import is_lock

CHECKSUM = "checksum"


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, whole or not at all."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, plain JSON, with its checksum."""
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what `write_sealed` wrote; raise a ValueError where it was changed, and FileNotFoundError without a file."""
    found = read_json(path, limit=LARGEST)
    if not isinstance(found, dict) or found.pop(CHECKSUM, None) != _checksum(found):
        raise ValueError(f"{path} is not the file that was saved.")
    return found


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


NAME = "run.json"


def require_own(folder: Path, identity: dict[str, Any]) -> None:
    """A ValueError where the folder holds another run, or something that is no run."""
    if not agrees(folder / NAME, identity):
        raise ValueError(f"{folder} belongs to another run ({_whose(folder, identity)}); choose another folder.")
    if not (folder / NAME).exists() and folder.exists() and (folder.is_file() or _is_used(folder)):
        raise ValueError(f"{folder} is not empty and holds no run; choose another folder.")


def _is_used(folder: Path) -> bool:
    """Whether there is more in it than a lock and a file that is just being written."""
    return any(not (is_lock(path.name) or path.name.startswith(f".{NAME}.")) for path in folder.iterdir())


def _whose(folder: Path, identity: dict[str, Any]) -> str:
    """In what the run that is there is another than this one."""
    stored, mine = read_json(folder / NAME), json.loads(json.dumps(identity))
    if not isinstance(stored, dict) or stored.keys() != mine.keys():
        return "of another command"
    return ", ".join(_differing(key, stored[key]) for key in mine if stored[key] != mine[key])


def _differing(key: str, value: Any) -> str:
    if key == "router" and isinstance(value, dict) and "name" in value:
        return f"router {value['name']}"
    return f"{key} {value}" if key in ("holdfast", "seed") else f"another {key}"


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Record that the folder is this run's, or raise the ValueError of `require_own`; its lock is held meanwhile."""
    require_no_links(folder / NAME, folder)
    require_own(folder, identity)
    if not (folder / NAME).exists():
        write_json(folder / NAME, identity)


def prepare(home: Path, root: Path) -> None:
    """Make the folder of a trained model ready to be written, under its lock.

    A ValueError where a file or folder that is written is a symbolic link below `root`. What processes that were killed left
    half written is removed.
    """
    for name in ("training", "model"):
        require_no_links_inside(home / name, root)
    for name in ("task.json", "router.json", "result.json"):
        require_no_links(home / name, root)
    for folder in (home, home / "training", home / "training" / "snapshots"):
        remove_partial(folder)


def agrees(path: Path, content: Any) -> bool:
    """Does the file say the same, or is there none?"""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return True
    except ValueError as problem:
        raise ValueError(f"{path} is damaged ({problem}); remove {path.parent}, or choose another folder.") from None
    return bool(found == json.loads(json.dumps(content)))


STATE = "trainer_state.json"
MANIFEST, FORMAT = "checkpoint.json", 1  # written last
NEEDED = {  # the Trainer passes over some of these in silence where they are missing, and trains another model
    "weights": "*.safetensors",
    "optimizer": "optimizer.pt",
    "scheduler": "scheduler.pt",
    "random state": "rng_state*.pth",
    "state of training": STATE,
}
UNWRITTEN = (OSError, RuntimeError, SafetensorError)  # what Python, torch and safetensors raise on a full disk
KEPT = 2  # checkpoints while a run trains: one to go on from, and an older one in case that the first is damaged

Flaw = Callable[[Path], str | None]  # what is wrong with a checkpoint, or None


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, the newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: -step_of(path))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def last_whole(folder: Path, also: Flaw = lambda _: None) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, or None, and what is wrong with the newer ones.

    also   a further reason not to go on from a checkpoint
    """
    reasons: list[str] = []
    for checkpoint in checkpoints(folder):
        reason = flaw(checkpoint) or also(checkpoint)
        if reason is None:
            return checkpoint, reasons
        reasons.append(f"{checkpoint} {reason}")
    return None, reasons


def seal(checkpoint: Path) -> None:
    """Write the manifest: size and SHA-256 of every file in the checkpoint."""
    content = {"format": FORMAT, "files": {file.name: _measured(file) for file in _files(checkpoint)}}
    write_whole(checkpoint / MANIFEST, json.dumps(content, indent=1) + "\n")


def flaw(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint or with the best one that it names; None where both are whole."""
    reason = _damage(checkpoint)
    if reason is not None:
        return reason
    state: Any = _read(checkpoint / STATE)
    if not isinstance(state, dict) or state.get("global_step") != step_of(checkpoint):
        return f"is damaged: its {STATE} is of another step"
    best = state.get("best_global_step")
    if best is None or best == step_of(checkpoint):
        return None
    if not isinstance(best, int):
        return f"is damaged: its {STATE} names no best step"
    reason = _damage(checkpoint.with_name(f"checkpoint-{best}"))
    return None if reason is None else f"cannot be used: the best checkpoint, checkpoint-{best}, {reason}"


def rotate(folder: Path, step: int, kept: int, best: int | None) -> None:
    """Delete all but the newest `kept` checkpoints of up to `step` and the best one; later ones were damaged."""
    until_now = [checkpoint for checkpoint in checkpoints(folder) if step_of(checkpoint) <= step]
    stay = [*until_now[:kept], folder / f"checkpoint-{best}"]
    for checkpoint in checkpoints(folder):
        if checkpoint not in stay:
            remove_folder(checkpoint, folder)


@contextmanager
def writing(checkpoint: Path, guard: Callable[[], None]) -> Iterator[None]:
    """Remove what fails to be written inside the `with`, and say in one sentence what it was.

    guard   raises where the folder is another process's by now: then nothing is removed
    """
    try:
        yield
    except UNWRITTEN as problem:
        guard()
        remove_folder(checkpoint, checkpoint.parent)
        raise unwritten(checkpoint, problem) from problem


def unwritten(path: Path, problem: Exception) -> OSError:
    reason = " ".join(str(problem).split())
    return OSError(f"{path} could not be written ({reason}): is the disk full? What was saved before is kept.")


@contextmanager
def resuming(checkpoint: object) -> Iterator[None]:
    """Turn whatever is raised inside the `with`, where a checkpoint is read, into one sentence."""
    try:
        yield
    except Exception as problem:  # its files may hold anything, and what trips over them raises what it likes
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ValueError(f"{checkpoint} cannot be read ({reason}); remove it, and the run goes on without it.") from None


def _damage(checkpoint: Path) -> str | None:
    manifest: Any = _read(checkpoint / MANIFEST)
    if manifest is None:
        return f"has no readable {MANIFEST}: it was not written to its end"
    listed = manifest.get("files") if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None
    if not isinstance(listed, dict):
        return f"is damaged: its {MANIFEST} lists no files"
    there = {file.name: file for file in _files(checkpoint)}
    for what, pattern in NEEDED.items():
        if not any(Path(name).match(pattern) for name in listed):
            return f"is damaged: it has no {what} ({pattern})"
    for name in sorted(listed.keys() | there.keys()):
        if name not in there:
            return f"is damaged: {name} is missing"
        if name not in listed:
            return f"is damaged: {name} does not belong to it"
        if there[name].is_symlink() or _measured(there[name]) != listed[name]:
            return f"is damaged: {name} is not the file that was saved"
    return None


def _files(checkpoint: Path) -> list[Path]:
    return sorted(file for file in checkpoint.iterdir() if file.name != MANIFEST)


def _measured(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file) if file.is_file() else None}


def _read(file: Path) -> Any:
    try:
        return read_json(file, limit=LARGE)
    except (OSError, ValueError):
        return None
