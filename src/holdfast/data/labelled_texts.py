"""Labelled texts by name or path: CSV as in Banking77, TSV as in GLUE."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from holdfast.data.documents import hold_out
from holdfast.data.files import checksum, find, places, plain_name, read_text
from holdfast.errors import unknown

TEXT, LABEL = ("text", "sentence"), ("category", "label")  # what the columns are called
NAMES = {"train": ("train",), "valid": ("valid", "validation", "dev", "val"), "test": ("test",)}
ENDINGS = (".csv", ".tsv")


@final
@dataclass(frozen=True)
class Source:
    about: str
    folders: tuple[str, ...]
    how: str  # to get it


SOURCES = {
    "banking77": Source(
        "13,083 questions to a bank, 77 intents",
        ("banking77",),
        "put train.csv and test.csv (columns text, category; from PolyAI's task-specific-datasets) into a folder banking77",
    ),
    "sst2": Source(
        "68,221 phrases and sentences of film reviews, good or bad: GLUE's SST-2",
        ("SST-2", "sst2"),
        "put GLUE's train.tsv and dev.tsv (columns sentence, label) into a folder SST-2",
    ),
}


@final
@dataclass(frozen=True)
class LabelledText:
    text: str
    label: int  # a number among the classes


@final
@dataclass(frozen=True)
class TextSet:
    """A source of texts to be classified."""

    name: str
    about: str
    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[LabelledText]]
    checksum: str

    def texts(self, split: str) -> Sequence[LabelledText]:
        if split not in self.splits:
            raise ValueError(unknown("split", split, self.splits))
        return self.splits[split]

    def describe(self) -> dict[str, Any]:
        """What a result records of its texts."""
        return {"name": self.name, "about": self.about, "checksum": self.checksum}


def text_sets() -> dict[str, str]:
    """Names of the sources of labelled texts, with one line each."""
    return {name: source.about for name, source in SOURCES.items()}


def text_set(name: str | Path, *, folder: str | Path | None = None) -> TextSet:
    """The labelled texts of this name, looked for in `folder`, or those in the folder at this path.

    A folder holds train, dev (or valid) and test as .csv or .tsv, plain or packed, with a header. Where one of dev and test
    is missing or has no labels, as GLUE's tests have none, the other is the test and a tenth of train is held out.
    """
    if isinstance(name, str) and name in SOURCES:
        source = SOURCES[name]
        for place in places(Path(folder), source.folders) if folder is not None else []:
            if _find(place, "train"):
                return _load(name, source.about, place)
        raise ValueError(f"{name} is not in {folder or 'any folder given'}: {source.how} there.")
    path = Path(name)
    if path.is_dir():
        return _load(path.resolve().name, f"the labelled texts of {path.resolve().name}", path)
    if isinstance(name, Path) or os.sep in name:
        raise ValueError(f"{path} is not a folder; labelled texts lie in one, as train and test, .csv or .tsv.")
    raise ValueError(unknown("source of labelled texts", name, SOURCES))


def _find(folder: Path, split: str) -> Path | None:
    return find(folder, [name + ending for name in NAMES[split] for ending in ENDINGS])


def _load(name: str, about: str, folder: Path) -> TextSet:
    train = _find(folder, "train")
    if train is None:
        raise ValueError(f"{folder} has no train.csv or train.tsv (plain, .gz or .xz).")
    rows = {"train": read_table(train)}
    if rows["train"] is None:
        raise ValueError(f"{train} has no column {' or '.join(LABEL)}.")
    others = {split: read_table(path) for split in ("valid", "test") if (path := _find(folder, split))}
    labelled = [table for table in others.values() if table is not None]
    if not labelled:
        raise ValueError(f"{folder} has a train but no labelled dev or test beside it.")
    known = rows["train"]
    if len(labelled) == 2:
        valid, test = labelled
    else:
        kept, held = hold_out([text for text, _ in known])
        known, valid, test = [known[i] for i in kept], [known[i] for i in held], labelled[0]
    tables = {"train": known, "valid": valid, "test": test}
    classes = _classes(label for _, label in rows["train"])
    if len(classes) < 2:
        raise ValueError(f"{folder} has texts of one class only, {classes[0]!r}; to classify takes two.")
    numbers = {label: number for number, label in enumerate(classes)}
    for split, table in tables.items():
        if stranger := next((label for _, label in table if label not in numbers), None):
            raise ValueError(f"{folder}: {split} has the label {stranger!r}, which train has not.")
    splits = {split: tuple(LabelledText(text, numbers[label]) for text, label in table) for split, table in tables.items()}
    parts = (part for split, table in tables.items() for row in table for part in (split, *row))
    return TextSet(name, about, classes, splits, checksum(part.encode() for part in parts))


def _classes(labels: Iterable[str]) -> tuple[str, ...]:
    """By number where all labels are numbers, by alphabet otherwise."""
    names = set(labels)
    return tuple(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))


def read_table(path: Path) -> list[tuple[str, str]] | None:
    """Texts and labels, or None where there is no column of labels. A TSV has no quotes: they are part of the text."""
    content = io.StringIO(read_text(path).decode(), newline="")
    if plain_name(path).endswith(".tsv"):
        rows = csv.reader(content, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(content, strict=True)
    try:
        header = next(rows)
        text, label = (next((header.index(name) for name in names if name in header), None) for names in (TEXT, LABEL))
        if text is None:
            raise ValueError(f"{path} has the columns {', '.join(header)}, none of them {' or '.join(TEXT)}.")
        if label is None:
            return None
        found = []
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"{path}, line {rows.line_num}: {len(row)} fields where the header has {len(header)}.")
            found.append((row[text].strip(), row[label].strip()))
    except csv.Error as error:  # a field beyond csv's limit of 128 KiB, an open quote
        raise ValueError(f"{path}, line {rows.line_num}: {error}.") from error
    if not found:
        raise ValueError(f"{path} has a header and no rows.")
    return found
