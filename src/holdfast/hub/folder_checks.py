"""Whether a folder is whole and its weights are those of the model: checked however the folder is opened."""

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from holdfast.hub.config_file import is_changed, read_config
from holdfast.hub.manifest import check_manifest
from holdfast.hub.model_size import require_sane_numbers
from holdfast.reading import LARGE, MIB, SMALL, read_json, require_regular

FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # what is fetched from a hub: no code, no pickles
INDEX = "*.safetensors.index*.json"
LARGEST = {  # bytes of a file by its name: the first pattern that fits; a model of 10^12 parameters has an index of 15 MB
    INDEX: 64 * MIB,
    "trainer_state.json": LARGE,  # holds the log of every step
    "*config.json": SMALL,
    "special_tokens_map.json": SMALL,
    "added_tokens.json": SMALL,
    "holdfast.json": SMALL,
    "tokenizer.json": LARGE,
    "vocab*.json": LARGE,
    "*.txt": LARGE,
    "*.model": LARGE,
    "*.jinja": SMALL,
    "*": None,  # weights, and what no library reads
}


def check_folder(folder: Path) -> dict[str, Any]:
    """Refuse a folder that is damaged, or names files that are not its own; return what its config.json says."""
    written = check_files(folder)
    if is_changed(written, folder):
        check_manifest(folder)
    return written


def check_files(folder: Path) -> dict[str, Any]:
    """As `check_folder`, but for the checksums: those of large weights take long."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter; load the model it belongs to, and put the adapter on with peft.")
    require_own_files(folder)
    written = read_config(folder)
    if is_changed(written, folder):
        check_manifest(folder, weights=False)
    require_sane_numbers(written, folder)
    _require_own_shards(folder)
    return written


def require_own_files(folder: Path) -> None:
    """Refuse a folder in which a file that a library would read is not regular, too large, or a link out of the folder."""
    for place in (folder, folder / "additional_chat_templates"):
        names = sorted(os.listdir(place)) if place.is_dir() else []
        for name in names:
            if any(fnmatch(name, pattern) for pattern in FILES):
                limit = next(size for pattern, size in LARGEST.items() if fnmatch(name, pattern))
                _require_own(place / name, folder, limit)


def _require_own(file: Path, folder: Path, limit: int | None) -> None:
    try:
        require_regular(file, limit=limit, inside=folder)
    except FileNotFoundError:
        raise ValueError(f"{file} is a link to a file that is not there: the folder is not complete.") from None


def _require_own_shards(folder: Path) -> None:
    """An index of shards may name any path; these must be safetensors in the folder itself."""
    for index in folder.glob(INDEX):
        content = read_json(index, limit=64 * MIB)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index} does not say which file holds each weight: the folder is damaged.")
        for name in sorted(set(shards.values())):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{index} names {name!r}, which is no safetensors file of this folder.")
            if not (folder / name).is_file():
                raise ValueError(f"{folder} lacks {name}, which its {index.name} lists: the folder is not complete.")


def fetched(name: str, **options: Any) -> Path:
    """The folder of a model on a hub, without its code and pickles."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise ValueError(
            f"{name} is no folder here, and no model of that name could be fetched from the hub ({reason})."
        ) from None


REPORTED = {"missing_keys": "lacks", "unexpected_keys": "has too many", "mismatched_keys": "reshapes"}


def require_all_used(found: Mapping[str, Any], model: Any, folder: object, *, layers: Iterable[str] | None = None) -> None:
    """Refuse what transformers has made up or left out (`found` is its loading info): all of it, or that of `layers`.

    A head that the folder does not have starts anew, and transformers says so. Another number of labels is the user's choice
    too (`ignore_mismatched_sizes`).
    """
    # What a folder has too much is named as there, the rest as in this model: with the base model's prefix or without.
    prefix = f"{model.base_model_prefix}."
    inside = tuple(f"{name.removeprefix(prefix)}." for name in layers or ())
    for key, what in REPORTED.items():
        names = sorted(entry if isinstance(entry, str) else str(entry[0]) for entry in found.get(key) or ())
        everything = layers is None and key != "mismatched_keys"
        _refuse(folder, what, [name for name in names if everything or name.removeprefix(prefix).startswith(inside)])


def require_fitting_files(files: Iterable[str], model: Any, layers: Iterable[str]) -> None:
    """Refuse safetensors with other names than the changed `layers` have, or with other shapes than the model."""
    from safetensors import safe_open

    files = list(files)
    prefix = f"{model.base_model_prefix}."
    ours = {name.removeprefix(prefix): tuple(value.shape) for name, value in model.state_dict().items()}
    inside = tuple(f"{name.removeprefix(prefix)}." for name in layers)
    theirs: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as content:
            theirs |= {name.removeprefix(prefix): tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    found = {
        "missing_keys": [name for name in ours.keys() - theirs.keys() if name.startswith(inside)],
        "unexpected_keys": [name for name in theirs.keys() - ours.keys() if name.startswith(inside)],
        "mismatched_keys": [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]],
    }
    for key, what in REPORTED.items():
        _refuse(Path(files[0]).parent, what, sorted(found[key]))


def _refuse(folder: object, what: str, names: list[str]) -> None:
    if names:
        raise ValueError(f"{folder} {what} weights ({len(names)}, the first is {names[0]}): it does not fit its config.")
