"""The folder of a run: its JSON files, the run it belongs to, and the checkpoints that the run can resume from.

Every file is written atomically. Files that a later run reads back as results contain a checksum of their content.

A folder belongs to the run in its `run.json`: output goes into an empty folder, or resumes what the same run began there. A
run that has neither a checkpoint nor a result is replaced by another one.

A checkpoint is complete if it has a manifest with the size and SHA-256 of each of its files, and the files agree with it.
Others are skipped, because the Trainer would load some of them without an error and train another model. There are two
kinds: those of the training loop (`LOOP_FILES`) and those of the Hugging Face Trainer (`TRAINER_FILES`).
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from holdfast.files import (
    LARGE,
    LARGEST,
    PARTIAL,
    read_json,
    remove_folder,
    remove_partial,
    require_no_links,
    require_no_links_inside,
    write_atomically,
)
from holdfast.hub.folder_files import sha256_of
from holdfast.locking import Lock, OtherHostError, is_lock_file

RUN_FILE = "run.json"
BEGUN = {RUN_FILE, "router.json", "log.jsonl"}  # files that a run writes before its first checkpoint
SNAPSHOT = re.compile(r"\d{8}\.json")  # and in the folder `snapshots`
OPTIONAL = {"plugins", "sweep"}  # keys that not every run has
CHECKSUM = "checksum"

MANIFEST, FORMAT = "checkpoint.json", 1  # the manifest is written last
LOOP_STATE, TRAINER_STATE = "training.json", "trainer_state.json"  # both have `global_step` and `best_global_step`
LOOP_FILES = {
    "weights": "model*.safetensors",
    "optimizer": "optimizer.tensors",
    "random state": "random.tensors",
    "state of training": LOOP_STATE,
}
TRAINER_FILES = {  # the Trainer ignores some of these if they are missing, and trains another model
    "weights": "*.safetensors",
    "optimizer": "optimizer.pt",
    "scheduler": "scheduler.pt",
    "random state": "rng_state*.pth",
    "state of training": TRAINER_STATE,
}
KEPT_CHECKPOINTS = 2  # while a run trains: one to resume from, and an older one in case the first is damaged
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # what Python, torch and safetensors raise on a full disk

NeededFiles = Mapping[str, str]  # from what a file contains to the pattern of its name
FindDamage = Callable[[Path], str | None]  # returns what is wrong with a checkpoint, or None

logger = logging.getLogger("holdfast")


# JSON files


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, atomically."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def write_with_checksum(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, plain JSON, with its checksum."""
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_with_checksum(path: Path) -> dict[str, Any]:
    """Return what `write_with_checksum` wrote.

    Raise ValueError if the content has changed since, and FileNotFoundError if there is no file.
    """
    found = read_json(path, limit=LARGEST)
    if not isinstance(found, dict) or found.pop(CHECKSUM, None) != _checksum(found):
        raise ValueError(f"{path} is not the file that was saved.")
    return found


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# The run that a folder belongs to


def require_own(folder: Path, identity: dict[str, Any]) -> None:
    """Raise ValueError if the folder has something of another run that is worth keeping, or something that is not a run."""
    replaceable = is_only_begun(folder)  # before `agrees`: another process of this run may replace the old one meanwhile
    is_other = not agrees(folder / RUN_FILE, identity)
    if is_other and replaceable:  # if Holdfast wrote it: other programs use the name run.json too
        try:
            stored = read_json(folder / RUN_FILE)
            is_other = not isinstance(stored, dict) or "holdfast" not in stored
        except FileNotFoundError:  # another process of this run replaces it
            is_other = False
    if is_other:
        raise ValueError(
            f"{folder} belongs to another run ({_difference(folder, identity)}); choose another folder, or remove it."
        )
    is_used = folder.is_file() or (folder.exists() and not all(_is_of_process(path.name) for path in folder.iterdir()))
    if is_used and not (folder / RUN_FILE).exists():
        raise ValueError(f"{folder} is not empty and contains no run; choose another folder.")


def is_only_begun(folder: Path) -> bool:
    """Return whether a run has left nothing worth keeping in the folder, and no other process writes there."""
    for place, _, names in os.walk(folder):
        is_snapshots = Path(place).name == "snapshots"
        for name in names:
            is_known = name in BEGUN or _is_of_process(name) or (is_snapshots and SNAPSHOT.fullmatch(name))
            if not is_known or Path(place, name).is_symlink():
                return False
        try:
            owner = Lock(Path(place)).holder()
        except OtherHostError:
            return False
        if owner is not None and not owner.is_this_process:
            return False
    return True


def _is_of_process(name: str) -> bool:
    """Return whether a file belongs to a lock, or is one that a killed process has not finished."""
    return is_lock_file(name) or PARTIAL.fullmatch(name) is not None


def agrees(path: Path, content: Any) -> bool:
    """Return whether the file contains `content` or does not exist."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return True
    except ValueError as problem:
        raise ValueError(f"{path} is damaged ({problem}); remove {path.parent}, or choose another folder.") from None
    return bool(found == json.loads(json.dumps(content)))


def _difference(folder: Path, identity: dict[str, Any]) -> str:
    """Return in which values the stored run differs from this one, as text."""
    stored, mine = read_json(folder / RUN_FILE), json.loads(json.dumps(identity))
    if not isinstance(stored, dict) or stored.keys() - OPTIONAL != mine.keys() - OPTIONAL:
        return "of another command"
    words = []
    for key in {**mine, **stored}:
        if (value := stored.get(key)) == mine.get(key):
            continue
        if key == "router" and isinstance(value, dict) and "name" in value:
            words.append(f"router {value['name']}")
        elif key == "plugins":
            words.append("other plugins, or another version of one")
        elif key == "sweep":
            words.append(f"a sweep of {', '.join(map(str, value))}" if isinstance(value, list) else "no sweep")
        else:
            words.append(f"{key} {value}" if key in ("holdfast", "seed") else f"another {key}")
    return ", ".join(words)


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Record that the folder belongs to this run, or raise the ValueError of `require_own`. The caller holds its lock."""
    require_no_links(folder / RUN_FILE, folder)
    require_own(folder, identity)
    if not agrees(folder / RUN_FILE, identity):
        logger.warning("%s had a run without a checkpoint or result; it is replaced by this one.", folder)
        for name in ("cells", "training"):
            remove_folder(folder / name, folder)
        (folder / RUN_FILE).unlink()
    if not (folder / RUN_FILE).exists():
        write_json(folder / RUN_FILE, identity)


def prepare(home: Path, root: Path) -> None:
    """Prepare the folder of a trained model for writing, under its lock: remove the half-written files of killed processes.

    Raise ValueError if a file or folder that will be written is a symbolic link below `root`.
    """
    for name in ("training", "model"):
        require_no_links_inside(home / name, root)
    for name in ("task.json", "router.json", "result.json"):
        require_no_links(home / name, root)
    for folder in (home, home / "training", home / "training" / "snapshots"):
        remove_partial(folder)


# Checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, the newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: -step_of(path))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def newest_complete(
    folder: Path, also: FindDamage = lambda _: None, *, needed: NeededFiles = LOOP_FILES
) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is complete, or None, and what is wrong with the newer ones.

    also     a further check; it returns a reason not to resume from a checkpoint, or None
    needed   the kind of checkpoint: `LOOP_FILES` or `TRAINER_FILES`
    """
    reasons: list[str] = []
    for checkpoint in checkpoints(folder):
        reason = find_damage(checkpoint, needed) or also(checkpoint)
        if reason is None:
            return checkpoint, reasons
        reasons.append(f"{checkpoint} {reason}")
    return None, reasons


def require_same_kind(folder: Path, needed: NeededFiles) -> None:
    """Raise ValueError if the newest checkpoint is of the other kind, from which this run cannot go on."""
    newest = next(iter(checkpoints(folder)), None)
    manifest: Any = None if newest is None else _read_or_none(newest / MANIFEST)
    listed = manifest.get("files") if isinstance(manifest, dict) else None
    for state_file, writer in ((LOOP_STATE, "Holdfast's training loop"), (TRAINER_STATE, "the Hugging Face Trainer")):
        if isinstance(listed, dict) and state_file in listed and state_file != needed["state of training"]:
            raise ValueError(
                f"{newest} was written by {writer}, and this run does not train with it (the Trainer is used on several "
                f"ranks and with --log): start the run as before, or remove {folder} to start it again."
            )


def find_damage(checkpoint: Path, needed: NeededFiles = LOOP_FILES) -> str | None:
    """Return what is wrong with a checkpoint or with the best one that it refers to; None if both are complete."""
    reason = _damaged_files(checkpoint, needed)
    if reason is not None:
        return reason
    state_file = needed["state of training"]
    state: Any = _read_or_none(checkpoint / state_file)
    step = state.get("global_step") if isinstance(state, dict) else None
    if type(step) is not int or step != step_of(checkpoint):
        return f"is damaged: its {state_file} is of another step"
    best = state.get("best_global_step")
    if best is None:
        return None
    if type(best) is not int or not 0 < best <= step:
        return f"is damaged: its {state_file} names no best step"
    if best == step:
        return None
    reason = _damaged_files(checkpoint.with_name(f"checkpoint-{best}"), needed)
    return None if reason is None else f"cannot be used: the best checkpoint, checkpoint-{best}, {reason}"


def _damaged_files(checkpoint: Path, needed: NeededFiles) -> str | None:
    """Return how the files of a checkpoint differ from its manifest; None if they agree."""
    manifest: Any = _read_or_none(checkpoint / MANIFEST)
    if manifest is None:
        return f"has no readable {MANIFEST}: it was not written completely"
    listed = manifest.get("files") if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None
    if not isinstance(listed, dict):
        return f"is damaged: its {MANIFEST} lists no files"
    existing = {file.name: file for file in _files(checkpoint)}
    for what, pattern in needed.items():
        if not any(Path(name).match(pattern) for name in listed):
            return f"is damaged: it has no {what} ({pattern})"
    for name in sorted(listed.keys() | existing.keys()):
        if name not in existing:
            return f"is damaged: {name} is missing"
        if name not in listed:
            return f"is damaged: {name} does not belong to it"
        if existing[name].is_symlink() or _size_and_hash(existing[name]) != listed[name]:
            return f"is damaged: {name} is not the file that was saved"
    return None


def write_checkpoint_manifest(checkpoint: Path) -> None:
    """Write the manifest: the size and the SHA-256 of every file in the checkpoint."""
    write_json(
        checkpoint / MANIFEST, {"format": FORMAT, "files": {file.name: _size_and_hash(file) for file in _files(checkpoint)}}
    )


def _files(checkpoint: Path) -> list[Path]:
    return sorted(file for file in checkpoint.iterdir() if file.name != MANIFEST)


def _size_and_hash(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file) if file.is_file() else None}


def _read_or_none(file: Path) -> Any:
    try:
        return read_json(file, limit=LARGE)
    except (OSError, ValueError):
        return None


def delete_old_checkpoints(folder: Path, step: int, kept: int, best: int | None) -> None:
    """Delete all checkpoints but the newest `kept` of up to `step` and the best one; those after `step` were damaged."""
    until_now = [checkpoint for checkpoint in checkpoints(folder) if step_of(checkpoint) <= step]
    stay = [*until_now[:kept], folder / f"checkpoint-{best}"]
    for checkpoint in checkpoints(folder):
        if checkpoint not in stay:
            remove_folder(checkpoint, folder)


@contextmanager
def writing_checkpoint(checkpoint: Path, guard: Callable[[], None]) -> Iterator[None]:
    """If a write inside the `with` fails, remove the checkpoint and raise a one-line OSError.

    guard   raises if the folder now belongs to another process: then nothing is removed
    """
    try:
        yield
    except WRITE_ERRORS as problem:
        guard()
        remove_folder(checkpoint, checkpoint.parent)
        raise write_error(checkpoint, problem) from problem


def write_error(path: Path, problem: Exception) -> OSError:
    reason = " ".join(str(problem).split())
    return OSError(f"{path} could not be written ({reason}): is the disk full? What was saved before is kept.")


@contextmanager
def reading_checkpoint(checkpoint: object) -> Iterator[None]:
    """Turn any error inside the `with`, where a checkpoint is read, into a one-line ValueError."""
    try:
        yield
    except Exception as problem:  # the files are untrusted, and a library that reads them may raise anything
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ValueError(f"{checkpoint} cannot be read ({reason}); delete it to resume without it.") from None
