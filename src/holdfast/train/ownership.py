"""Whose a folder is: output goes into an empty folder, or continues what the same run has begun there."""

import json
from pathlib import Path
from typing import Any

from holdfast.reading import read_json
from holdfast.writing import write_whole

NAME = "run.json"


def require_own(folder: Path, identity: dict[str, Any]) -> None:
    """A ValueError where the folder holds another run, or something that is no run."""
    if not agrees(folder / NAME, identity):
        raise ValueError(f"{folder} belongs to another run ({_whose(folder, identity)}); choose another folder.")
    if not (folder / NAME).exists() and folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty and holds no run; choose another folder.")


def _whose(folder: Path, identity: dict[str, Any]) -> str:
    """In what the run that is there is another than this one."""
    stored, mine = json.loads((folder / NAME).read_text(encoding="utf-8")), json.loads(json.dumps(identity))
    if not isinstance(stored, dict) or stored.keys() != mine.keys():
        return "of another command"
    return ", ".join(_differing(key, stored[key]) for key in mine if stored[key] != mine[key])


def _differing(key: str, value: Any) -> str:
    if key == "router" and isinstance(value, dict) and "name" in value:
        return f"router {value['name']}"
    return f"{key} {value}" if key in ("holdfast", "seed") else f"another {key}"


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """From now on the folder is this run's."""
    write_json(folder / NAME, identity)


def agrees(path: Path, content: Any) -> bool:
    """Does the file say the same, or is there none?"""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return True
    except ValueError as problem:
        raise ValueError(f"{path} is damaged: {problem}") from None
    return bool(found == json.loads(json.dumps(content)))


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
