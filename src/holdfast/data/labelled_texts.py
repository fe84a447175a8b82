"""Texts and pairs of texts with labels, to classify or to score: the record of a set, and how the user's files are read.

A text set (`TextSet`) has the splits train, valid and test. It is read from (`text_set`):

    one table       .csv, .tsv or .jsonl, split by row
    a folder        a file for each split: train, valid (or validation, dev, val) and test, as .csv, .tsv or .jsonl
    a folder        that `datasets` wrote with save_to_disk or to_parquet (`saved_datasets`)
    a name          of a known set, whose files are in a folder (`label_sources`)

All tables may be compressed (.gz or .xz). Which columns have the texts and the labels is named, or found by usual names.

If only one of valid and test has labels, it is the test split, and a tenth of train is held out as valid. If neither has, a
tenth of train is held out as test and another as valid. Which rows are held out depends on the texts, never on a seed.

Labels are classes. They are numbers to predict (regression) if that is asked for, or if all labels are numbers and one of
them is not whole.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, final

from holdfast.data.datasets import Dataset, require_splits
from holdfast.data.documents import SPLITS, hold_out
from holdfast.data.files import checksum, find_file, unpacked_name
from holdfast.data.text_files import JSON_LINES, LABEL_COLUMNS, SEPARATED, csv_rows, is_table, json_objects
from holdfast.errors import unknown_name

SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "dev", "val"), "test": ("test",)}
# If no column is named, the first of these that the table has is read, with its partner if it has that too.
TEXT_COLUMNS = {
    "text": None,
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "question": "sentence",
    "sentence": None,
    "utterance": None,
    "review": None,
    "content": None,
}
HIDDEN = "-1"  # the label of every row of a test set whose labels are not published
MOST_NAMED = 12  # classes in an error
LONGEST_LABEL = 200  # letters; longer ones are texts, perhaps of another column


@final
@dataclass(frozen=True)
class LabelledText:
    """A text, or a pair of texts, with the number of its class or the number to predict."""

    text: str
    label: float
    pair: str | None = None


def flat_texts(rows: Sequence[LabelledText]) -> list[str]:
    """Return the texts of some examples, followed by their pairs if they have any."""
    return [row.text for row in rows] + [row.pair for row in rows if row.pair is not None]


def with_texts(rows: Sequence[LabelledText], texts: Sequence[str]) -> list[LabelledText]:
    """Return the examples with other texts, in the order of `flat_texts`."""
    pairs = iter(texts[len(rows) :])
    return [
        replace(row, text=text, pair=None if row.pair is None else next(pairs))
        for row, text in zip(rows, texts[: len(rows)], strict=True)
    ]


@final
@dataclass(frozen=True)
class TextSet:
    """Texts with labels in the splits train, valid and test. Without `classes`, the labels are numbers to predict."""

    name: str
    about: str
    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[LabelledText]]
    checksum: str
    metric: str = "accuracy"  # the one that this set is usually scored by

    @property
    def is_regression(self) -> bool:
        return not self.classes

    @property
    def has_pairs(self) -> bool:
        return any(row.pair is not None for split in self.splits.values() for row in split[:1])

    @property
    def other_tests(self) -> list[str]:
        """The names of further test splits, such as MNLI's mismatched one."""
        return [split for split in self.splits if split not in SPLITS]

    def texts(self, split: str) -> Sequence[LabelledText]:
        if split not in self.splits:
            raise ValueError(unknown_name("split", split, self.splits))
        return self.splits[split]

    def describe(self) -> dict[str, Any]:
        """Return what is stored with a result to identify its texts."""
        sizes = {split: len(rows) for split, rows in self.splits.items()}
        return {"name": self.name, "about": self.about, "checksum": self.checksum, "examples": sizes}


@final
@dataclass(frozen=True)
class Columns:
    """The names of the columns to read; None: found by usual names."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.pair is not None and self.text is None:
            raise ValueError(f"data.pair names the column {self.pair} for the second texts; name the first in data.text.")


class Row(NamedTuple):
    """One row of a table: its line, its text, its pair if any, and its label as text; None if it has none."""

    line: int
    text: str
    pair: str | None
    label: str | None


@final
@dataclass(frozen=True)
class Table:
    """A table before columns are chosen: where it is from, its columns, and its rows with the numbers of their lines."""

    place: str
    columns: Sequence[str]
    rows: Iterable[tuple[int, Mapping[str, Any]]]


def read_table(path: Path, header: Sequence[str] | None = None) -> Table:
    """Return the table in a .csv, .tsv or .jsonl file; `header` has the names of its columns if the file does not."""
    name = unpacked_name(path).lower()
    if name.endswith(SEPARATED):
        with closing(csv_rows(path, header)) as rows:
            columns = next(rows)[1]
            repeated = next((column for column in columns if column and columns.count(column) > 1), None)
            if repeated is not None:
                raise ValueError(f"{path} has {columns.count(repeated)} columns called {repeated}; rename all but one.")
            return Table(str(path), columns, [(line, dict(zip(columns, row, strict=True))) for line, row in rows])
    if name.endswith(JSON_LINES):
        objects = list(json_objects(path))
        return Table(str(path), list(dict.fromkeys(key for _, found in objects for key in found)), objects)
    raise ValueError(f"{path} is not a table; labelled texts are read from .csv, .tsv and .jsonl files.")


def read_rows(table: Table, columns: Columns, *, labelled: bool = True) -> list[Row]:
    """Return the rows of a table. Without `labelled`, a table without a column of labels has rows without labels."""
    text, pair = _text_columns(table, columns)
    label = _label_column(table, columns)
    if label is None and labelled:
        raise ValueError(
            f"{table.place} has the columns {', '.join(table.columns)}, none of them {_either(LABEL_COLUMNS)}; name the "
            "column of labels in data.label."
        )
    found = []
    for line, row in table.rows:
        texts = [_text(table, line, row, column) for column in (text, pair) if column is not None]
        given = None if label is None else _label(row.get(label), f"{table.place}, line {line}")
        found.append(Row(line, texts[0], texts[1] if pair is not None else None, given))
    if not found:
        raise ValueError(f"{table.place} has a header but no rows.")
    return found


def _text_columns(table: Table, columns: Columns) -> tuple[str, str | None]:
    has = f"{table.place} has the columns {', '.join(table.columns)}"
    for field, name in (("data.text", columns.text), ("data.pair", columns.pair)):
        if name is not None and name not in table.columns:
            raise ValueError(f"{has}, and none is called {name}, as {field} says.")
    if columns.text is not None:
        return columns.text, columns.pair
    lowercase = {name.lower(): name for name in reversed(table.columns)}
    for text, pair in TEXT_COLUMNS.items():
        if text in lowercase and (pair is None or pair in lowercase):
            return lowercase[text], None if pair is None else lowercase[pair]
    raise ValueError(f"{has}; name the column of texts in data.text (and that of the second texts in data.pair).")


def _label_column(table: Table, columns: Columns) -> str | None:
    if columns.label is not None:
        if columns.label not in table.columns:
            listed = ", ".join(table.columns)
            raise ValueError(
                f"{table.place} has the columns {listed}, and none is called {columns.label}, as data.label says."
            )
        return columns.label
    lowercase = {name.lower(): name for name in reversed(table.columns)}
    return next((lowercase[name] for name in LABEL_COLUMNS if name in lowercase), None)


def _text(table: Table, line: int, row: Mapping[str, Any], column: str) -> str:
    found = row.get(column)
    if not isinstance(found, str):
        raise ValueError(f"{table.place}, line {line}: {column} is missing or not a text.")
    if not found.strip():
        raise ValueError(f"{table.place}, line {line}: {column} is empty; every row needs its texts.")
    return found.strip()


def _label(value: Any, where: str) -> str | None:
    """Return a label as text; None if the row has none. `where` is the row in errors."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, str | Real):
        raise ValueError(f"{where}: the label is {value!r:.80}, a {type(value).__name__}; expected a string or a number.")
    written = str(int(value)) if isinstance(value, bool) else str(value).strip()
    return written or None


def find_splits(folder: Path) -> dict[str, Path]:
    """Return the table of each split in a folder."""
    endings = (*SEPARATED, *JSON_LINES)
    found = {
        split: find_file(folder, [name + end for name in names for end in endings]) for split, names in SPLIT_NAMES.items()
    }
    return {split: path for split, path in found.items() if path is not None}


def labelled_splits(rows: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Return the splits that have labels, test first; a split in which no row has one is left out."""
    found = {split: rows[split] for split in ("test", "valid", "train", *rows) if split in rows}
    return {split: own for split, own in found.items() if any(row.label not in (None, HIDDEN) for row in own)}


def make_set(
    name: str,
    about: str,
    rows: Mapping[str, list[Row]],
    *,
    place: str,
    metric: str | None = None,
    regression: bool | None = None,
    classes: Sequence[str] | None = None,
) -> TextSet:
    """Return the set of some rows, with splits held out where they are missing; raise ValueError for wrong labels.

    regression      whether labels are numbers to predict; None: decided by the labels
    classes         of a trained model, in the order of its outputs, that all labels must be of; none of them for regression
    """
    splits = labelled_splits(rows)
    for split, own in splits.items():
        missing = next((row.line for row in own if row.label is None), None)
        if missing is not None:
            raise ValueError(f"{place}: row {missing} of {split} has no label, but others have one.")
        long = next((row for row in own if len(row.label or "") > LONGEST_LABEL), None)
        if long is not None:
            raise ValueError(
                f"{place}: row {long.line} of {split} has a label of {len(long.label or ''):,} letters, more than "
                f"{LONGEST_LABEL}: name the column of labels in data.label."
            )
    if not splits:
        raise ValueError(f"{place}: no row has a label.")
    if "train" in splits:
        splits = {**_with_held_out(splits, place), **{split: own for split, own in splits.items() if split not in SPLITS}}
    elif classes is None:
        raise ValueError(f"{place} has no labelled texts to train on.")
    if classes is not None and regression is not None and regression != (not classes):
        kind = "numbers to predict" if regression else "classes"
        outputs = f"{len(classes)} classes" if classes else "one number as its output"
        raise ValueError(f"the labels of {place} are {kind}, and the model has {outputs}.")
    if regression is None:
        numbers = [row.label or "" for own in splits.values() for row in own]
        regression = not classes if classes is not None else _are_fractions(numbers)
    number_of: Callable[[str], float]
    found: tuple[str, ...] = ()
    if regression:
        number_of = float
    else:
        found = _classes(row.label or "" for row in splits["train"]) if classes is None else tuple(classes)
        if len(found) < 2:
            raise ValueError(f"{place} has texts of only one class, {found[0]!r}; classification needs at least two.")
        number_of = class_numbers(found, {row.label or "" for own in splits.values() for row in own}).__getitem__
    made = {split: tuple(_labelled_texts(place, split, own, number_of, found)) for split, own in splits.items()}
    usual = ("pearson" if regression else "accuracy") if metric is None else metric
    parts = (part for split, own in splits.items() for row in own for part in (split, *_parts(row)))
    return TextSet(name, about, found, made, checksum(part.encode("utf-8", "surrogatepass") for part in parts), usual)


@final
@dataclass(frozen=True)
class LabelledRows:
    """The rows of a set by split, before its labels have numbers, and how the set is scored; None: decided by the labels."""

    splits: Mapping[str, list[Row]]
    about: str
    metric: str | None = None
    regression: bool | None = None

    def make_set(self, name: str, regression: bool | None, classes: Sequence[str] | None) -> TextSet:
        wanted = self.regression if regression is None else regression
        how: dict[str, Any] = {"metric": self.metric, "regression": wanted, "classes": classes}
        return make_set(name, self.about, self.splits, place=name, **how)


def as_rows(dataset: Dataset, loaded: Any) -> LabelledRows:
    """Return what the function of a dataset has loaded as rows."""
    if isinstance(loaded, LabelledRows):
        return loaded
    require_splits(dataset.name, loaded, SPLITS, "pairs of text and label")
    splits = {split: list(_given_rows(f"dataset {dataset.name!r}, {split}", loaded[split])) for split in SPLITS}
    if len({row.pair is None for rows in splits.values() for row in rows}) > 1:
        raise ValueError(f"dataset {dataset.name!r} has rows with a second text and rows without; give all or none.")
    return LabelledRows(splits, dataset.about)


def _given_rows(place: str, rows: Any) -> Iterator[Row]:
    number = -1
    for number, row in enumerate([] if isinstance(rows, str) else rows):
        parts = tuple(row) if isinstance(row, tuple | list) else ()
        texts, label = parts[:-1], parts[-1] if parts else None
        if len(parts) not in (2, 3) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{place}: row {number} is {row!r:.80}; expected (text, label) or (text, second text, label).")
        if label is None or isinstance(label, bool):
            raise ValueError(f"{place}: row {number} has the label {label}; expected a string or a number.")
        yield Row(number, texts[0], texts[1] if len(texts) == 2 else None, _label(label, f"{place}: row {number}"))
    if number < 0:
        raise ValueError(f"{place} has no rows.")


def _labelled_texts(
    place: str, split: str, rows: Sequence[Row], number_of: Callable[[str], float], classes: Sequence[str]
) -> Iterator[LabelledText]:
    if not rows:
        raise ValueError(f"{place}: {split} has no rows.")
    for row in rows:
        assert row.label is not None
        try:
            number = number_of(row.label)
        except KeyError:
            named = ", ".join(classes[:MOST_NAMED]) + (", ..." if len(classes) > MOST_NAMED else "")
            raise ValueError(
                f"{place}: {split} has the label {row.label!r}, which is not in train or not one of the model's ({named})."
            ) from None
        except ValueError:
            raise ValueError(f"{place}: {split} has the label {row.label!r}, which is not a number to predict.") from None
        if not math.isfinite(number):
            raise ValueError(f"{place}: {split} has the label {row.label!r}, which is not a number to predict.")
        yield LabelledText(row.text, number, row.pair)


def class_numbers(classes: Sequence[str], labels: Iterable[str]) -> dict[str, int]:
    """Return the number of the class of each known label.

    A label is the name of a class; upper and lower case count only if two classes differ by nothing else. If the names of
    the classes are not numbers, as `LABEL_0` or `negative`, labels may also be the numbers of classes.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    wanted = set(labels)
    lowercase = {name.lower(): number for name, number in numbers.items()}
    if len(lowercase) == len(numbers):
        numbers |= {label: lowercase[label.lower()] for label in wanted if label.lower() in lowercase}
    if wanted <= numbers.keys() or all(name.isdecimal() for name in classes):
        return numbers
    by_number = {str(number): number for number in range(len(classes))}
    return by_number if wanted <= by_number.keys() else numbers


def _parts(row: Row) -> tuple[str, ...]:
    return (row.text, *(() if row.pair is None else (row.pair,)), row.label or "")


def _with_held_out(splits: Mapping[str, list[Row]], place: str) -> dict[str, list[Row]]:
    """Return train, valid and test; parts of train are held out for those that are missing."""
    train, others = splits["train"], [splits[split] for split in ("valid", "test") if split in splits]
    held: list[list[Row]] = []
    for _ in range(2 - len(others)):
        if len(train) < 2:
            raise ValueError(f"{place} has too few labelled texts to hold some out for testing.")
        kept, out = hold_out([f"{row.text}\n{row.pair or ''}" for row in train])
        held.append([train[number] for number in out])
        train = [train[number] for number in kept]
    valid, test = (others if len(others) == 2 else [held[0], others[0]]) if others else (held[1], held[0])
    return {"train": train, "valid": valid, "test": test}


def _are_fractions(labels: Sequence[str]) -> bool:
    """Return whether all labels are numbers and one of them is not whole."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return any(not number.is_integer() for number in numbers)


def _classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the classes in the order of their numbers if all labels are whole numbers, else in alphabetical order."""
    names = set(labels)
    return tuple(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))


def file_and_columns(name: str) -> tuple[Path, Columns] | None:
    """Split `FILE:TEXT,LABEL` or `FILE:TEXT,PAIR,LABEL` into the file and its columns; None if the name has another form."""
    file, colon, written = name.rpartition(":")
    names = [column.strip() for column in written.split(",")]
    if not colon or not is_table(Path(file)) or not Path(file).is_file() or len(names) not in (2, 3) or not all(names):
        return None
    return Path(file), Columns(names[0], names[1] if len(names) == 3 else None, names[-1])


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
