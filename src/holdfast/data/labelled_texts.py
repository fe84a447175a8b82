"""Texts and pairs of texts with labels, to classify or to score: the user's files, and known sets.

A text set (`TextSet`) has the splits train, valid and test. It is read from (`text_set`):

    one table       .csv, .tsv or .jsonl, split by row
    a folder        a file for each split: train, valid (or validation, dev, val) and test, as .csv, .tsv or .jsonl
    a folder        that `datasets` wrote with save_to_disk or to_parquet
    a name          of a known set, whose files are in a folder

All tables may be compressed (.gz or .xz). Which columns have the texts and the labels is named, or found by usual names.

If only one of valid and test has labels, it is the test split, and a tenth of train is held out as valid. If neither has, a
tenth of train is held out as test and another as valid. Which rows are held out depends on the texts, never on a seed.

Labels are classes. They are numbers to predict (regression) if that is asked for, or if all labels are numbers and one of
them is not whole.

The known sets:

    sst2, sst5      the Stanford Sentiment Treebank, "label sentence" in the files stsa.binary.* and stsa.fine.*
    banking77       PolyAI's CSV
    cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli      GLUE's own TSV files
    python-topics   embedded: which topic of Python's language reference a paragraph is from

GLUE does not publish the labels of its test files. Here, as in the papers, its dev split is the test split, and a tenth of
train is held out as valid. MNLI is tested on its matched dev file, and on the mismatched one as a further test split. QQP's
train file has a few broken rows, which are skipped, as in GLUE's own code.
"""

import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, final

from holdfast.data.datasets import DATASETS, Dataset, datasets_for, find_dataset, require_splits
from holdfast.data.documents import SPLITS, hold_out
from holdfast.data.files import (
    JSON_LINES,
    SEPARATED,
    Table,
    checksum,
    find_file,
    find_splits,
    is_table,
    read_table,
    read_text,
    saved_tables,
    source_folders,
    unpacked_name,
)
from holdfast.data.text_sources import BLANK, LABEL_COLUMNS, python_topics, without_repeated_paragraphs
from holdfast.errors import require_known

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
        require_known("split", split, self.splits)
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
class LabelledRows:
    """The rows of a set by split, before its labels have numbers, and how the set is scored; None: decided by the labels."""

    splits: Mapping[str, list[Row]]
    about: str
    metric: str | None = None
    regression: bool | None = None


def read_rows(table: Table, columns: Columns, *, labelled: bool = True) -> list[Row]:
    """Return the rows of a table. Without `labelled`, a table without a column of labels has rows without labels."""
    text, pair = table.column(columns.text, (), "data.text"), table.column(columns.pair, (), "data.pair")
    if text is None:
        known = {name.lower() for name in table.columns}
        usual = [text for text, pair in TEXT_COLUMNS.items() if text in known and (pair is None or pair in known)]
        text = table.column(None, usual[:1])
        pair = table.column(None, [pair for name in usual[:1] if (pair := TEXT_COLUMNS[name])])
    label = table.column(columns.label, LABEL_COLUMNS, "data.label")
    has = f"{table.place} has the columns {', '.join(table.columns)}"
    if text is None:
        raise ValueError(f"{has}; name the column of texts in data.text (and that of the second texts in data.pair).")
    if label is None and labelled:
        listed = f"{', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}"
        raise ValueError(f"{has}, none of them {listed}; name the column of labels in data.label.")
    rows = []
    for line, row in table.rows:
        texts = [table.text(line, row, column).strip() for column in (text, pair) if column is not None]
        if "" in texts:
            empty = (text, pair)[texts.index("")]
            raise ValueError(f"{table.place}, line {line}: {empty} is empty; every row needs its texts.")
        given = None if label is None else _label(row.get(label), f"{table.place}, line {line}")
        rows.append(Row(line, texts[0], texts[1] if pair is not None else None, given))
    if not rows:
        raise ValueError(f"{table.place} has a header but no rows.")
    return rows


def _label(value: Any, where: str) -> str | None:
    """Return a label as text; None if the row has none. `where` is the row in errors."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, str | Real):
        raise ValueError(f"{where}: the label is {value!r:.80}, a {type(value).__name__}; expected a string or a number.")
    written = str(int(value)) if isinstance(value, bool) else str(value).strip()
    return written or None


def labelled_splits(rows: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Return the splits that have labels, test first; a split in which no row has one is left out."""
    ordered = {split: rows[split] for split in ("test", "valid", "train", *rows) if split in rows}
    return {split: each for split, each in ordered.items() if any(row.label not in (None, HIDDEN) for row in each)}


def make_set(
    name: str, rows: LabelledRows, *, place: str, regression: bool | None = None, classes: Sequence[str] | None = None
) -> TextSet:
    """Return the set of some rows, with splits held out where they are missing; raise ValueError for wrong labels.

    regression      whether labels are numbers to predict; None: as the rows say, or decided by the labels
    classes         of a trained model, in the order of its outputs, that all labels must be of; none of them for regression
    """
    splits = labelled_splits(rows.splits)
    for split, each in splits.items():
        if missing := next((row for row in each if row.label is None), None):
            raise ValueError(f"{place}: row {missing.line} of {split} has no label, but others have one.")
        if long := next((row for row in each if len(row.label or "") > LONGEST_LABEL), None):
            raise ValueError(
                f"{place}: row {long.line} of {split} has a label of {len(long.label or ''):,} letters, more than "
                f"{LONGEST_LABEL}: name the column of labels in data.label."
            )
    if not splits:
        raise ValueError(f"{place}: no row has a label.")
    if "train" in splits:
        splits = {**_with_held_out(splits, place), **{split: splits[split] for split in splits if split not in SPLITS}}
    elif classes is None:
        raise ValueError(f"{place} has no labelled texts to train on.")
    regression = rows.regression if regression is None else regression
    if classes is not None and regression is not None and regression != (not classes):
        kind = "numbers to predict" if regression else "classes"
        outputs = f"{len(classes)} classes" if classes else "one number as its output"
        raise ValueError(f"the labels of {place} are {kind}, and the model has {outputs}.")
    labels = {row.label or "" for each in splits.values() for row in each}
    if regression is None:
        regression = _are_fractions(labels) if classes is None else not classes
    if classes is None and not regression:
        names = {row.label or "" for row in splits["train"]}
        classes = sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)
    if not regression and classes is not None and len(classes) < 2:
        raise ValueError(f"{place} has texts of only one class, {classes[0]!r}; classification needs at least two.")
    known = () if regression else tuple(classes or ())
    number_of = float if regression else class_numbers(known, labels).__getitem__
    made = {split: tuple(_labelled_texts(f"{place}: {split}", each, number_of, known)) for split, each in splits.items()}
    parts = (
        part.encode("utf-8", "surrogatepass")
        for split, each in splits.items()
        for row in each
        for part in (split, row.text, *([] if row.pair is None else [row.pair]), row.label or "")
    )
    return TextSet(name, rows.about, known, made, checksum(parts), rows.metric or ("pearson" if regression else "accuracy"))


def as_rows(dataset: Dataset, loaded: Any) -> LabelledRows:
    """Return what the function of a dataset has loaded as rows."""
    if isinstance(loaded, LabelledRows):
        return loaded
    require_splits(dataset.name, loaded, SPLITS, "pairs of text and label")
    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for split, rows in splits.items():
        place = f"dataset {dataset.name!r}, {split}"
        for number, row in enumerate([] if isinstance(loaded[split], str) else loaded[split]):
            parts = tuple(row) if isinstance(row, tuple | list) else ()
            texts, label = parts[:-1], parts[-1] if parts else None
            if len(parts) not in (2, 3) or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError(
                    f"{place}: row {number} is {row!r:.80}; expected (text, label) or (text, second text, label)."
                )
            if label is None or isinstance(label, bool):
                raise ValueError(f"{place}: row {number} has the label {label}; expected a string or a number.")
            pair = texts[1] if len(texts) == 2 else None
            rows.append(Row(number, texts[0], pair, _label(label, f"{place}: row {number}")))
        if not rows:
            raise ValueError(f"{place} has no rows.")
    if len({row.pair is None for rows in splits.values() for row in rows}) > 1:
        raise ValueError(f"dataset {dataset.name!r} has rows with a second text and rows without; give all or none.")
    return LabelledRows(splits, dataset.about)


def _labelled_texts(
    place: str, rows: Sequence[Row], number_of: Callable[[str], float], classes: Sequence[str]
) -> Iterator[LabelledText]:
    for row in rows:
        assert row.label is not None
        try:
            number = number_of(row.label)
        except KeyError:
            named = ", ".join(classes[:MOST_NAMED]) + (", ..." if len(classes) > MOST_NAMED else "")
            raise ValueError(
                f"{place} has the label {row.label!r}, which is not in train or not one of the model's ({named})."
            ) from None
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{place} has the label {row.label!r}, which is not a number to predict.")
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


def _are_fractions(labels: Iterable[str]) -> bool:
    """Return whether all labels are numbers and one of them is not whole."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return any(not number.is_integer() for number in numbers)


Rows = dict[str, list[Row]]
EMBEDDED = "python-topics"
EMBEDDED_ABOUT = "paragraphs of Python's language reference, by topic; embedded"
EMBEDDED_TOPICS = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "types")
LEAST_WORDS, MOST_WORDS = 6, 60  # of a paragraph of the embedded set


@final
@dataclass(frozen=True)
class Glue:
    """One GLUE task: its folder, its columns and how it is scored."""

    folder: str
    columns: Columns
    about: str
    metric: str = "accuracy"
    header: tuple[str, ...] | None = None  # of files without one
    tests: tuple[tuple[str, str], ...] = (("test", "dev.tsv"),)
    regression: bool = False
    skips_broken_rows: bool = False

    def find(self, folder: Path) -> Rows:
        """Return the rows of the task's files in a folder; empty if they are not there."""
        around = [os.path.join(place, self.folder) for place in GLUE_PLACES] + [self.folder.lower()]
        names = {"train": "train.tsv", **dict(self.tests)}
        paths = _find_all(source_folders(folder, around), names, ", whose labels are published: test.tsv has none")
        tables = {split: read_table(path, self.header, skip_broken=self.skips_broken_rows) for split, path in paths.items()}
        return {split: read_rows(table, self.columns) for split, table in tables.items()}


def _find_all(places: Iterable[Path], names: Mapping[str, str], why: str = "") -> dict[str, Path]:
    """Return the files of these names, by split, in the first place that has that of train; raise ValueError for a gap."""
    for place in places:
        paths = {split: path for split, name in names.items() if (path := find_file(place, [name]))}
        if "train" in paths:
            if missing := next((split for split in names if split not in paths), None):
                raise ValueError(f"{place} has {names['train']} but no {names[missing]}{why}.")
            return paths
    return {}


_SINGLE, _PAIR = Columns("sentence", None, "label"), Columns("sentence1", "sentence2", "label")
_COLA_HEADER = ("source", "label", "mark", "sentence")
_MNLI_TESTS = (("test", "dev_matched.tsv"), ("mismatched", "dev_mismatched.tsv"))
_MNLI = "pairs of sentences, the second follows from the first, contradicts it, or neither"
_MRPC = "pairs of sentences of the news, with the same meaning or not"
_QQP, _STSB = "pairs of questions, duplicates or not", "pairs of sentences, how similar they are from 0 to 5"
_QNLI = "questions and sentences, the sentence answers the question or not"
GLUE = {
    "cola": Glue("CoLA", _SINGLE, "sentences, acceptable English or not", "matthews", _COLA_HEADER),
    "sst2": Glue("SST-2", _SINGLE, "sentences of film reviews, good or bad"),
    "mrpc": Glue("MRPC", Columns("#1 String", "#2 String", "Quality"), _MRPC, "f1"),
    "qqp": Glue("QQP", Columns("question1", "question2", "is_duplicate"), _QQP, "f1", skips_broken_rows=True),
    "stsb": Glue("STS-B", replace(_PAIR, label="score"), _STSB, "pearson", regression=True),
    "mnli": Glue("MNLI", replace(_PAIR, label="gold_label"), _MNLI, tests=_MNLI_TESTS),
    "qnli": Glue("QNLI", Columns("question", "sentence", "label"), _QNLI),
    "rte": Glue("RTE", _PAIR, "pairs of sentences, the second follows from the first or not"),
    "wnli": Glue("WNLI", _PAIR, "pairs of sentences, a pronoun means what the second says or not"),
}
GLUE_PLACES = ("", "glue", "GLUE", "glue_data")  # folders around the folders of tasks


def _treebank_rows(kind: str, folder: Path) -> Rows:
    places = (*source_folders(folder, ("sst", "SST", "sst2", "sst5", "stanford-sentiment")), folder)
    names = {split: f"stsa.{kind}.{'dev' if split == 'valid' else split}" for split in SPLITS}
    rows: Rows = {}
    for split, path in _find_all(places, names).items():
        for number, line in enumerate(read_text(path).decode().removesuffix("\n").split("\n"), 1):
            label, _, sentence = line.partition(" ")
            if not label.isdecimal() or not sentence.strip():
                raise ValueError(f"{path}, line {number}: this is not a number, a space and a sentence.")
            rows.setdefault(split, []).append(Row(number, sentence.strip(), None, label))
    return rows


def _banking_rows(folder: Path) -> Rows:
    for place in source_folders(folder, ("banking77",)):
        paths = find_splits(place, *SEPARATED, *JSON_LINES)
        if "train" in paths:
            return {split: read_rows(read_table(path), Columns("text", None, "category")) for split, path in paths.items()}
    return {}


def _topic_rows(_: Path | None) -> LabelledRows:
    """Return the paragraphs of some long topics of the language reference, each with its topic as the label."""
    topics = dict(without_repeated_paragraphs(python_topics().items()))
    if missing := next((topic for topic in EMBEDDED_TOPICS if topic not in topics), None):
        raise ValueError(f"this Python's language reference has no topic {missing}, so {EMBEDDED} is not available.")
    paragraphs = ((topic, part.split()) for topic in EMBEDDED_TOPICS for part in BLANK.split(topics[topic]))
    long = [(topic, " ".join(words[:MOST_WORDS])) for topic, words in paragraphs if len(words) >= LEAST_WORDS]
    rows = [Row(number, text, None, topic) for number, (topic, text) in enumerate(long, 1)]
    return LabelledRows({"train": rows}, f"{EMBEDDED_ABOUT}; Python {platform.python_version()}")


def _add_known(
    name: str, about: str, how: str, find: Callable[[Path], Rows], metric: str = "accuracy", regression: bool = False
) -> None:
    """Register a known set. `find` returns its rows from a folder, none if they are not there: `how` says what to do."""

    def load(folder: Path | None) -> LabelledRows:
        rows = {} if folder is None else find(folder)
        if not rows:
            raise ValueError(f"{name} is not in {folder or 'any folder given'}: {how} there (--data FOLDER).")
        return LabelledRows(rows, about, metric, regression)

    DATASETS.add(Dataset(name, about, "labels", load))


DATASETS.add(Dataset(EMBEDDED, EMBEDDED_ABOUT, "labels", _topic_rows))
_add_known(
    "banking77",
    "questions to a bank, 77 intents",
    "put train.csv and test.csv (columns text, category; from PolyAI's task-specific-datasets) into a folder banking77",
    _banking_rows,
)
_add_known(
    "sst2",
    GLUE["sst2"].about,
    "put stsa.binary.train, .dev and .test into a folder sst, or GLUE's train.tsv and dev.tsv into a folder SST-2",
    lambda folder: _treebank_rows("binary", folder) or GLUE["sst2"].find(folder),
)
_add_known(
    "sst5",
    "sentences of film reviews, from very bad (0) to very good (4)",
    "put stsa.fine.train, .dev and .test into a folder sst",
    partial(_treebank_rows, "fine"),
)
for _name, _task in GLUE.items():
    if _name != "sst2":
        _files = " and ".join(["train.tsv", *(file for _, file in _task.tests)])
        _about, _how = f"{_task.about}: GLUE's {_task.folder}", f"put GLUE's {_files} into a folder {_task.folder}"
        _add_known(_name, _about, _how, _task.find, _task.metric, _task.regression)


def text_sets() -> dict[str, str]:
    """Return the names of the known text sets, each with one line of help."""
    return datasets_for("labels")


def text_set(
    name: str | Path,
    *,
    folder: str | Path | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    regression: bool | None = None,
    classes: Sequence[str] | None = None,
    test_only: bool = False,
) -> TextSet:
    """Return a known text set, which is searched for in `folder`, or the labelled texts in the file or folder `name`.

    `FILE:TEXT,LABEL` and `FILE:TEXT,PAIR,LABEL` name columns too.

    text, pair, label   columns of a table; by default they are found by usual names
    regression          whether labels are numbers to predict; by default decided by the labels
    classes             of a trained model, in the order of its outputs: labels must be of these; () for regression
    test_only           all rows of a single file are the test split, and train and valid are not needed
    """
    columns, path = Columns(text, pair, label), Path(name)
    is_name = isinstance(name, str) and os.sep not in name
    dataset = find_dataset(str(name), "labels", installed=not path.exists() and not is_table(path)) if is_name else None
    if dataset is not None:
        if columns != Columns():
            raise ValueError(f"data.text, data.pair and data.label are for files; {name} has columns of its own.")
        rows = as_rows(dataset, dataset.load(None if folder is None else Path(folder)))
        set_name = place = dataset.name
    else:
        if not path.exists() and (written := file_and_columns(str(name))) is not None:
            path, columns = written
        if name == "" or not path.exists():
            if not is_name or is_table(path):
                raise ValueError(f"{path} does not exist; labelled texts are a folder, or a .csv, .tsv or .jsonl file.")
            raise ValueError(f"there is no file or folder {name}; {DATASETS.unknown(str(name), text_sets())}")
        rows, set_name, place = _from_path(path, columns, test_only=test_only), unpacked_name(path.resolve()), str(path)
    found = make_set(set_name, rows, place=place, regression=regression, classes=classes)
    for split in SPLITS if classes is None else ("test",):
        found.texts(split)
    return found


def file_and_columns(name: str) -> tuple[Path, Columns] | None:
    """Split `FILE:TEXT,LABEL` or `FILE:TEXT,PAIR,LABEL` into the file and its columns; None if the name has another form."""
    file, colon, written = name.rpartition(":")
    names = [column.strip() for column in written.split(",")]
    if not colon or not is_table(Path(file)) or not Path(file).is_file() or len(names) not in (2, 3) or not all(names):
        return None
    return Path(file), Columns(names[0], names[1] if len(names) == 3 else None, names[-1])


def _from_path(path: Path, columns: Columns, *, test_only: bool) -> LabelledRows:
    """Return the rows of a file or folder; with `test_only`, all rows of a single file are the test."""
    about = f"the labelled texts of {path.resolve().name}"
    if not path.is_dir():
        rows = read_rows(read_table(path), columns)
        return LabelledRows({"test": rows}, about) if test_only else LabelledRows({"train": rows}, f"{about}, split by row")
    tables = saved_tables(path)
    if tables is None:
        paths = find_splits(path, *SEPARATED, *JSON_LINES)
        if "train" not in paths and "test" not in paths:
            raise ValueError(
                f"{path} has no train.csv, train.tsv or train.jsonl (plain, .gz or .xz), and `datasets` did not write it."
            )
        tables = {split: read_table(file) for split, file in paths.items()}
    splits = {split: read_rows(table, columns, labelled=split == "train") for split, table in tables.items()}
    return LabelledRows({"test": next(iter(labelled_splits(splits).values()))} if test_only else splits, about)
