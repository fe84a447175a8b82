"""Whose a folder is: output goes into an empty folder, or continues what the same run has begun there."""

import json
from pathlib import Path
from typing import Any

from holdfast.locking import is_lock
from holdfast.reading import read_json
from holdfast.train.stored import write_json
from holdfast.writing import remove_partial, require_no_links, require_no_links_inside

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
