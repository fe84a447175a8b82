"""Which outputs of a model the class folders of a test set belong to.

Published test sets have one folder per class, named by its WordNet id (n01498041), and often only some of the classes that a
model knows. A model's classes may be WordNet ids too, or names such as "tench, Tinca tinca". Then a class index is needed:
the list of ids, with or without names, from ImageNet's own folders or from a file. None is shipped; only checksums of
published lists are, which tell whether a list is complete.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from holdfast.files import MIB, read_json, read_text

WORDNET_ID = re.compile(r"n\d{8}")
# SHA-256 of the sorted WordNet ids of published sets, joined by spaces.
PUBLISHED = {
    "791ce0333040dd249d13133f90d28ef0263ffc01e5de0afd85b3e32048d7d456": "ImageNet",
    "ff8c384504d3ec59dd70537e83c7ed3dfa0debb07210febc47b58c136a443706": "ImageNet-A",
    "354baa0a46566aa68cee6a8093d8de471b7d45a1004b81a95c6210f757ad3740": "ImageNet-R",
    "55722c5b79803f3068747ee03f6506845c70cb9ff9bd3fca9e09d45357c793eb": "ImageNet-O",
}
# Some names of the usual thousand in their usual order. A list of ids without names is used only for a model that has these.
LANDMARKS = {
    0: "tench",
    1: "goldfish",
    207: "golden retriever",
    281: "tabby",
    388: "giant panda",
    508: "computer keyboard",
    620: "laptop",
    760: "refrigerator",
    850: "teddy",
    949: "strawberry",
    999: "toilet tissue",
}
FORMATS = (
    "a folder with ImageNet's class folders, a text file with a WordNet id in each line (LOC_synset_mapping.txt), or a JSON "
    "file (imagenet_class_index.json)"
)


def published_set(classes: Iterable[str]) -> str | None:
    """Return the name of the published set that has exactly these WordNet ids, or None."""
    return PUBLISHED.get(hashlib.sha256(" ".join(sorted(classes)).encode("utf-8", "replace")).hexdigest())


def are_wordnet_ids(classes: Iterable[str]) -> bool:
    return all(WORDNET_ID.fullmatch(name) for name in classes)


@final
@dataclass(frozen=True)
class ClassIndex:
    """WordNet ids in the order of a model's outputs, with the names of the classes if they are known."""

    source: str
    ids: tuple[str, ...]
    names: tuple[str, ...] | None = None

    def ids_of(self, classes: Sequence[str]) -> list[str | None]:
        """Return the WordNet id of each of a model's classes, None where it has none; raise ValueError if unclear."""
        if are_wordnet_ids(classes):
            return list(classes)
        if self.names is not None and not _are_unnamed(classes):
            return self._by_name(classes, self.names)
        extra = len(classes) - len(self.ids)
        has_background = extra == 1 and _plain(classes[0]) == "background"
        if extra and not has_background:
            raise ValueError(
                f"{self.source} lists {len(self.ids):,} classes, and the model has {len(classes):,}, such as {classes[0]!r}."
            )
        named = list(classes[1:] if has_background else classes)
        if not _are_unnamed(classes) and not (published_set(self.ids) == "ImageNet" and _are_usual(named)):
            raise ValueError(
                f"{self.source} has WordNet ids without names, and the model's classes ({_some(named)}) are not the usual "
                "ones of ImageNet in their usual order; give a class index with names."
            )
        return [None, *self.ids] if has_background else list(self.ids)

    def _by_name(self, classes: Sequence[str], names: Sequence[str]) -> list[str | None]:
        """Find classes by their names; two classes of ImageNet are called crane, and their place tells them apart."""
        whole: dict[str, list[int]] = {}
        first: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            whole.setdefault(_plain(name), []).append(number)
            first.setdefault(_first(name), []).append(number)
        offset = 1 if len(classes) == len(names) + 1 else 0
        found: list[str | None] = []
        for place, name in enumerate(classes):
            numbers = whole.get(_plain(name)) or first.get(_first(name)) or []
            if len(numbers) > 1:
                numbers = [number for number in numbers if number == place - offset]
            found.append(self.ids[numbers[0]] if numbers else None)
        return found


def read_class_index(path: Path) -> ClassIndex:
    """Return the class index in a file, or the sorted class folders of a folder; raise ValueError if it is none."""
    if path.is_dir():
        inner = next((path / name for name in ("train", "val") if (path / name).is_dir()), path)
        rows: list[tuple[str, str]] = [(one.name, "") for one in sorted(inner.iterdir()) if one.is_dir()]
    elif not path.exists():
        raise ValueError(f"{path} does not exist; a class index is {FORMATS}.")
    elif path.suffix == ".json":
        rows = _from_json(read_json(path, limit=MIB), path)
    else:
        lines = [line.split(maxsplit=1) for line in read_text(path, limit=MIB).splitlines() if line.strip()]
        rows = [(line[0], line[1].strip() if len(line) > 1 else "") for line in lines]
    ids, names = [row[0] for row in rows], [row[1] for row in rows]
    if not ids or not are_wordnet_ids(ids) or len(set(ids)) < len(ids):
        wrong = next((one for one in ids if not WORDNET_ID.fullmatch(one)), "the same id twice" if ids else "no classes")
        raise ValueError(f"{path} has {wrong[:40]!r}; a class index is {FORMATS}.")
    return ClassIndex(str(path), tuple(ids), tuple(names) if all(names) else None)


def _from_json(stored: Any, path: Path) -> list[tuple[str, str]]:
    """Return the rows of {"0": ["n01440764", "tench"], ...} or of a list of ids."""
    try:
        if isinstance(stored, list):
            return [(str(one), "") for one in stored]
        pairs = [stored[str(number)] for number in range(len(stored))]
        return [(str(pair[0]), str(pair[1])) for pair in pairs]
    except (AttributeError, IndexError, KeyError, TypeError):
        raise ValueError(f'{path} is not a class index of the form {{"0": ["n01440764", "tench"], ...}}.') from None


def outputs_of(folder: Path, folders: Sequence[str], classes: Sequence[str], index: ClassIndex | None = None) -> list[int]:
    """Return for each class folder the number of the model's output that it belongs to.

    folder      for messages
    folders     names of the class folders
    classes     the model's classes, in the order of its outputs
    index       used if the folders are named by WordNet id and the model's classes are not

    Raise ValueError if the model does not have one of the classes: its images could never be classified rightly.
    """
    known = _numbers(classes)
    if not any(name in known for name in folders) and are_wordnet_ids(folders) and not are_wordnet_ids(classes):
        if index is None:
            raise ValueError(
                f"{folder} names its classes by WordNet id, such as {folders[0]}, and the model's classes have names, such "
                f"as {classes[0]!r}; add --class-index with {FORMATS}."
            )
        known = _numbers(index.ids_of(classes))
    missing = [name for name in folders if name not in known]
    if len(missing) == len(folders):
        raise ValueError(
            f"{folder} has no class in common with the model: its classes are {_some(folders)}; the model has "
            f"{_some(classes)}."
        )
    if missing:
        raise ValueError(
            f"{folder} has classes that the model does not have, {len(missing)} of {len(folders)}: {_some(missing)}; the "
            f"model has {_some(classes)}."
        )
    outputs = [known[name] for name in folders]
    if None in outputs:
        twice = folders[outputs.index(None)]
        raise ValueError(f"the model has two classes {twice!r}, so it is not clear which of them {folder / twice} is.")
    return [number for number in outputs if number is not None]


def _numbers(classes: Sequence[str | None]) -> dict[str, int | None]:
    """Return the number of each class; None for a name that two classes have."""
    found: dict[str, int | None] = {}
    for number, name in enumerate(classes):
        if name is not None:
            found[name] = None if name in found else number
    return found


def _are_unnamed(classes: Sequence[str]) -> bool:
    """Return whether these are transformers' labels of classes without names."""
    return all(name == f"LABEL_{number}" for number, name in enumerate(classes))


def _are_usual(classes: Sequence[str]) -> bool:
    return len(classes) == 1000 and all(_first(classes[place]) == name for place, name in LANDMARKS.items())


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").lower().split())


def _first(name: str) -> str:
    """Return the first of the synonyms of a class."""
    return _plain(name.partition(",")[0])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name[:40] for name in names[:3])
    return f"{shown} and {len(names) - 3:,} more" if len(names) > 3 else shown
