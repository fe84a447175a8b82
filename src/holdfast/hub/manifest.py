"""Checksums of a folder's weights, so that a file that was cut short or changed is noticed before it is believed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from holdfast.hub.config_file import description_of
from holdfast.reading import read_json, require_regular
from holdfast.writing import write_whole

NAME = "holdfast.json"
FORMAT = 1


def write_manifest(folder: Path) -> None:
    """Write the checksums of the weights in `folder` and of what its config says about routers."""
    content = {"format": FORMAT, "description": _description(folder), "weights": _weights(folder)}
    write_whole(folder / NAME, json.dumps(content, indent=2) + "\n")


def check_manifest(folder: Path, *, weights: bool = True) -> None:
    """Refuse a folder whose description or weights are not those that were written.

    weights     False compares only the description: the checksums of large weights take long
    """
    try:
        content = read_json(folder / NAME)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {NAME}: it is not complete, or was not written by Holdfast.") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("weights"), dict):
        raise ValueError(f"{folder / NAME} is in a format that this Holdfast does not read.")
    for name in content["weights"]:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}, which its {NAME} lists: the folder is not complete.")
    if _description(folder) != content.get("description"):
        raise ValueError(f"{folder / 'config.json'} describes other routers than were saved: it was changed.")
    if not weights:
        return
    found = _weights(folder)
    for name in sorted(found.keys() | content["weights"].keys()):
        if found.get(name) != content["weights"].get(name):
            raise ValueError(
                f"{folder / name} is not the file that was saved (its checksum differs): it is damaged or changed."
            )


def _weights(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in sorted(folder.glob("*.safetensors"))}


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    require_regular(file)  # to open a pipe would wait for ever
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _description(folder: Path) -> str:
    config: Any = read_json(folder / "config.json")
    return hashlib.sha256(json.dumps(description_of(config), sort_keys=True).encode()).hexdigest()
