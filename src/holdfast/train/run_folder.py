"""The folder of a run: its JSON files, the run it belongs to, and the checkpoints that the run can resume from.

Every file is written atomically. Files that a later run reads back as results contain a checksum of their content.

A folder belongs to the run in its `run.json`: output goes into an empty folder, or resumes what the same run began there. A
run that has neither a checkpoint nor a result is replaced by another one.

A checkpoint is complete if it has a manifest with the size and SHA-256 of each of its files, and the files agree with it.
Others are skipped, because the Trainer would load some of them without an error and train another model. There are two
kinds: those of the training loop (`LOOP_FILES`) and those of the Hugging Face Trainer (`TRAINER_FILES`).

A checkpoint of the training loop has what a run needs to continue with the same numbers:

    model.safetensors, config.json, ...   the model with its routers, as `save_pretrained` writes it
    optimizer.tensors                     moments and step count of every parameter that has been updated
    random.tensors                        the states of all random number generators
    deltas.tensors                        with "free" robust training only: the perturbations that the next step starts from
    training.json                         step, best step and log
    checkpoint.json                       the manifest, written last

All of them are safetensors or JSON: reading a checkpoint runs nothing that is in it. Three are not named *.safetensors,
because in the folder of a model every file of that name is a part of its weights (`hub.folder_files`).
"""

import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

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
from holdfast.hub.folder_files import check_folder, sha256_of
from holdfast.locking import LOCK_FILES, Lock, OtherHostError

RUN_FILE = "run.json"
BEGUN = {RUN_FILE, "router.json", "log.jsonl"}  # files that a run writes before its first checkpoint
SNAPSHOT = re.compile(r"\d{8}\.json")  # and in the folder `snapshots`
OPTIONAL = {"plugins", "sweep"}  # keys that not every run has
DIFFERENCES = {
    "holdfast": "another version of Holdfast",
    "plugins": "other plugins, or another version of one",
    "rungs": "other rungs",
}
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
Guard = Callable[[], None]  # called before every write; raises if the folder now belongs to another process
FindDamage = Callable[[Path], str | None]  # returns what is wrong with a checkpoint, or None

logger = logging.getLogger("holdfast")


# JSON files
OPTIMIZER, RANDOM, DELTAS = "optimizer.tensors", "random.tensors", "deltas.tensors"
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # what AdamW keeps for each parameter that it has updated
WORDS = 624  # of a Mersenne Twister's state


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
    return name in LOCK_FILES or PARTIAL.fullmatch(name) is not None


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
    different = [key for key in {**mine, **stored} if stored.get(key) != mine.get(key)]
    words = {**DIFFERENCES, "seed": f"seed {stored.get('seed')}"}
    if isinstance(router := stored.get("router"), dict):
        words["router"] = f"router {router.get('name')}"
    return ", ".join(words.get(key, f"another {key}") for key in different)


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
    if (reason := _damaged_files(checkpoint, needed)) is not None:
        return reason
    state_file = needed["state of training"]
    state: Any = _read_or_none(checkpoint / state_file)
    step = state.get("global_step") if isinstance(state, dict) else None
    if type(step) is not int or step != step_of(checkpoint):
        return f"is damaged: its {state_file} is of another step"
    best = state.get("best_global_step")
    if best is not None and (type(best) is not int or not 0 < best <= step):
        return f"is damaged: its {state_file} names no best step"
    if best in (None, step):
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
    files = {file.name: _size_and_hash(file) for file in _files(checkpoint)}
    write_json(checkpoint / MANIFEST, {"format": FORMAT, "files": files})


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
def writing_checkpoint(checkpoint: Path, guard: Guard) -> Iterator[None]:
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


@final
@dataclass
class TrainingState:
    """What a run knows besides its model, optimizer and random numbers: the content of training.json."""

    global_step: int = 0  # finished steps
    best_global_step: int | None = None  # the step with the best result on held-out data
    best_loss: float | None = None  # that result: the smallest loss, or the smallest figure (`training.best_by`)
    compiled: bool = False  # whether the step is compiled; a resumed run does the same
    log: list[dict[str, float]] = field(default_factory=list)

    def compiles(self, wanted: bool) -> bool:
        """Return whether to compile the step: as wanted, or in a resumed run as the run before it did."""
        return wanted if self.global_step == 0 else self.compiled


def write_checkpoint(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, state: TrainingState, deltas: dict[str, Tensor], guard: Guard
) -> None:
    """Write a checkpoint of the step in `state`, and delete old ones. If a write fails, raise a one-line OSError."""
    checkpoint = folder / f"checkpoint-{state.global_step}"
    require_no_links(checkpoint, folder)
    guard()
    remove_folder(checkpoint, folder)  # an incomplete one: its files must not mix with the new ones
    with writing_checkpoint(checkpoint, guard):
        model.save_pretrained(checkpoint, save_original_format=False)  # `load_weights` needs the names of the model
        moments = {  # by parameter name: `exp_avg/lm_head.weight`
            f"{kind}/{name}": tensor.detach().cpu().contiguous()
            for name, parameter in model.named_parameters()
            for kind, tensor in optimizer.state.get(parameter, {}).items()
        }
        safetensors.torch.save_file(moments, checkpoint / OPTIMIZER)
        safetensors.torch.save_file(_random_states(), checkpoint / RANDOM)
        if deltas:
            safetensors.torch.save_file({name: delta.cpu() for name, delta in deltas.items()}, checkpoint / DELTAS)
        write_atomically(checkpoint / LOOP_STATE, json.dumps(asdict(state)) + "\n")
        guard()
        write_checkpoint_manifest(checkpoint)
    guard()
    delete_old_checkpoints(folder, state.global_step, KEPT_CHECKPOINTS, state.best_global_step)


def read_checkpoint(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Load model and optimizer from a complete checkpoint, and return the state; `restore_random` is separate.

    Raise a one-line ValueError if a file cannot be read.
    """
    check_folder(checkpoint)
    with reading_checkpoint(checkpoint):
        state = TrainingState(**read_json(checkpoint / LOOP_STATE, limit=LARGE))
        is_log = isinstance(state.log, list) and all(isinstance(line, dict) for line in state.log)
        if not is_log or not isinstance(state.best_loss, float | None):
            raise ValueError(f"its {LOOP_STATE} has values of other types")
        load_weights(checkpoint, model)
        _load_moments(safetensors.torch.load_file(checkpoint / OPTIMIZER), model, optimizer)
    return state


def load_weights(checkpoint: Path, model: Any) -> None:
    """Load the weights of a checkpoint into the model; raise ValueError if a weight is missing or of another model."""
    loaded: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("model*.safetensors")):
        loaded |= safetensors.torch.load_file(file)
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    state = model.state_dict()
    places = {state[name].data_ptr() for name in loaded if name in state}
    lost = [name for name in missing if state[name].data_ptr() not in places]  # a tied weight is saved under one name
    if lost or unexpected:
        raise ValueError(f"its weights are of another model: {(lost + unexpected)[0]} does not match")


def restore_random(checkpoint: Path) -> None:
    """Set all random number generators to their states in the checkpoint."""
    with reading_checkpoint(checkpoint):
        states = safetensors.torch.load_file(checkpoint / RANDOM)
        python, numpy = states["python"].tolist(), states["numpy"].tolist()
        has_python, of_python, has_numpy, of_numpy = states["normal"].tolist()  # the second number of a pair, if drawn
        random.setstate((python[0], tuple(python[1:]), of_python if has_python else None))
        words = np.array(numpy[:WORDS], dtype=np.uint32)
        np.random.set_state(("MT19937", words, numpy[WORDS], int(has_numpy), of_numpy))
        torch.set_rng_state(states["torch"])
        if torch.cuda.is_available() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


def read_deltas(checkpoint: Path, device: torch.device) -> dict[str, Tensor]:
    """Return the perturbations of "free" robust training; none if the checkpoint has no file of them."""
    if not (checkpoint / DELTAS).exists():
        return {}
    with reading_checkpoint(checkpoint):
        return {name: delta.to(device) for name, delta in safetensors.torch.load_file(checkpoint / DELTAS).items()}


def _random_states() -> dict[str, Tensor]:
    version, words, normal = random.getstate()
    numpy: Any = np.random.get_state()
    states = {
        "python": torch.tensor([version, *words]),
        "numpy": torch.tensor([*numpy[1].tolist(), numpy[2]]),
        "normal": torch.tensor([normal is not None, normal or 0.0, *numpy[3:]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _load_moments(tensors: dict[str, Tensor], model: Any, optimizer: torch.optim.Optimizer) -> None:
    named = dict(model.named_parameters())
    updated = named.keys() & {key.partition("/")[2] for key in tensors}
    wrong = tensors.keys() ^ {f"{kind}/{name}" for name in updated for kind in MOMENTS}
    if wrong or not updated:
        raise ValueError(f"its {OPTIMIZER} is of another model: {min(wrong, default='it is empty')} does not match")
    optimizer.state.clear()
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        parameter = named[name]
        place = parameter.new_zeros((), dtype=torch.float32) if kind == "step" else torch.zeros_like(parameter)
        if tensor.shape != place.shape:
            raise ValueError(f"its {OPTIMIZER} is of another model: {key} has shape {tuple(tensor.shape)}")
        optimizer.state[parameter][kind] = place.copy_(tensor)
