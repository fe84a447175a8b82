"""Whose a folder is: output goes into an empty folder, or continues what the same run has begun there."""

import json
from pathlib import Path
from typing import Any

from holdfast.writing import write_whole

NAME = "run.json"


def require_own(folder: Path, identity: dict[str, Any]) -> None:
    """A ValueError where the folder holds another run, or something that is no run."""
    if not agrees(folder / NAME, identity):
        raise ValueError(f"{folder} belongs to another run (recipe, data or version differ); choose another folder.")
    if not (folder / NAME).exists() and folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty and holds no run; choose another folder.")


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """From now on the folder is this run's."""
    write_json(folder / NAME, identity)


def agrees(path: Path, content: Any) -> bool:
    """Does the file say the same, or is there none?"""
    if not path.is_file():
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is damaged and no JSON: {problem}") from None
    return bool(found == json.loads(json.dumps(content)))


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
