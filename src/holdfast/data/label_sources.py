"""Known sets of labelled texts, where their files are in a folder, and `text_set`, which returns a set by name or path.

    sst2, sst5      the Stanford Sentiment Treebank, "label sentence" in the files stsa.binary.* and stsa.fine.*
    banking77       PolyAI's CSV
    cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli      GLUE's own TSV files
    python-topics   embedded: which topic of Python's language reference a paragraph is from

GLUE does not publish the labels of its test files. Here, as in the papers, its dev split is the test split, and a tenth of
train is held out as valid. MNLI is tested on its matched dev file, and on the mismatched one as a further test split. QQP's
train file has a few broken rows, which are skipped, as in GLUE's own code.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from holdfast.data.datasets import DATASETS, Dataset, datasets_for, find_dataset
from holdfast.data.documents import SPLITS
from holdfast.data.files import find_file, read_text, source_folders, unpacked_name
from holdfast.data.labelled_texts import (
    Columns,
    LabelledRows,
    Row,
    Table,
    TextSet,
    as_rows,
    file_and_columns,
    find_splits,
    labelled_splits,
    make_set,
    read_rows,
    read_table,
)
from holdfast.data.saved_datasets import saved_splits
from holdfast.data.text_files import is_table
from holdfast.data.text_sources import python_topics, without_repeated_paragraphs

Rows = dict[str, list[Row]]
EMBEDDED_TOPICS = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "types")
LEAST_WORDS, MOST_WORDS = 6, 60  # of a paragraph of the embedded set
_BLANK = re.compile(r"\n\s*\n")


@final
@dataclass(frozen=True)
class Glue:
    """The files of one GLUE task: its folder, its columns and how it is scored."""

    folder: str
    columns: Columns
    metric: str = "accuracy"
    header: tuple[str, ...] | None = None  # of files without one
    tests: tuple[tuple[str, str], ...] = (("test", "dev.tsv"),)
    regression: bool = False
    skips_broken_rows: bool = False


GLUE = {
    "cola": Glue("CoLA", Columns("sentence", None, "label"), "matthews", ("source", "label", "mark", "sentence")),
    "sst2": Glue("SST-2", Columns("sentence", None, "label")),
    "mrpc": Glue("MRPC", Columns("#1 String", "#2 String", "Quality"), "f1"),
    "qqp": Glue("QQP", Columns("question1", "question2", "is_duplicate"), "f1", skips_broken_rows=True),
    "stsb": Glue("STS-B", Columns("sentence1", "sentence2", "score"), "pearson", regression=True),
    "mnli": Glue(
        "MNLI",
        Columns("sentence1", "sentence2", "gold_label"),
        tests=(("test", "dev_matched.tsv"), ("mismatched", "dev_mismatched.tsv")),
    ),
    "qnli": Glue("QNLI", Columns("question", "sentence", "label")),
    "rte": Glue("RTE", Columns("sentence1", "sentence2", "label")),
    "wnli": Glue("WNLI", Columns("sentence1", "sentence2", "label")),
}
GLUE_PLACES = ("", "glue", "GLUE", "glue_data")  # folders around the folders of tasks


@final
@dataclass(frozen=True)
class TextSetSource:
    """A known text set. `find` returns its rows from a folder, or None if they are not there."""

    about: str
    how: str
    find: Callable[[Path], Rows | None]
    metric: str = "accuracy"
    regression: bool = False

    def load(self, name: str, folder: Path | None) -> LabelledRows:
        rows = None if folder is None else self.find(folder)
        if rows is None:
            raise ValueError(f"{name} is not in {folder or 'any folder given'}: {self.how} there (--data FOLDER).")
        return LabelledRows(rows, self.about, self.metric, self.regression)


def _glue_rows(task: Glue) -> Callable[[Path], Rows | None]:
    def find(folder: Path) -> Rows | None:
        names = [os.path.join(around, task.folder) for around in GLUE_PLACES] + [task.folder.lower()]
        for place in source_folders(folder, names):
            train = find_file(place, ["train.tsv"])
            if train is None:
                continue
            rows = {"train": _glue_file(train, task)}
            for split, name in task.tests:
                path = find_file(place, [name])
                if path is None:
                    raise ValueError(f"{place} has train.tsv but no {name}, whose labels are published: test.tsv has none.")
                rows[split] = _glue_file(path, task)
            return rows
        return None

    return find


def _glue_file(path: Path, task: Glue) -> list[Row]:
    table = _without_broken_rows(path) if task.skips_broken_rows else read_table(path, task.header)
    return read_rows(table, task.columns)


def _without_broken_rows(path: Path) -> Table:
    """Return a TSV without the rows that have other numbers of fields, or empty fields: QQP has a few of both."""
    lines = read_text(path).decode().replace("\r\n", "\n").split("\n")
    columns = lines[0].split("\t")
    fields = ((number, line.split("\t")) for number, line in enumerate(lines[1:], 2))
    rows = [(number, dict(zip(columns, row, strict=True))) for number, row in fields if len(row) == len(columns)]
    return Table(str(path), columns, [(number, row) for number, row in rows if all(cell.strip() for cell in row.values())])


def _treebank_rows(kind: str) -> Callable[[Path], Rows | None]:
    def find(folder: Path) -> Rows | None:
        endings = {"train": "train", "valid": "dev", "test": "test"}
        for place in (*source_folders(folder, ("sst", "SST", "sst2", "sst5", "stanford-sentiment")), folder):
            paths = {split: find_file(place, [f"stsa.{kind}.{end}"]) for split, end in endings.items()}
            if paths["train"] is not None:
                missing = next((end for split, end in endings.items() if paths[split] is None), None)
                if missing is not None:
                    raise ValueError(f"{place} has stsa.{kind}.train but no stsa.{kind}.{missing}.")
                return {split: list(_treebank_file(path)) for split, path in paths.items() if path is not None}
        return None

    return find


def _treebank_file(path: Path) -> Iterator[Row]:
    lines = read_text(path).decode().split("\n")
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
        label, _, sentence = line.partition(" ")
        if not label.isdecimal() or not sentence.strip():
            raise ValueError(f"{path}, line {number}: this is not a number, a space and a sentence.")
        yield Row(number, sentence.strip(), None, label)


def _sst2_rows(folder: Path) -> Rows | None:
    return _treebank_rows("binary")(folder) or _glue_rows(GLUE["sst2"])(folder)


def _banking_rows(folder: Path) -> Rows | None:
    for place in source_folders(folder, ("banking77",)):
        paths = find_splits(place)
        if "train" in paths:
            columns = Columns("text", None, "category")
            return {split: read_rows(read_table(path), columns) for split, path in paths.items()}
    return None


def _glue_source(name: str, about: str) -> TextSetSource:
    task = GLUE[name]
    files = " and ".join(["train.tsv", *(file for _, file in task.tests)])
    how = f"put GLUE's {files} into a folder {task.folder}"
    return TextSetSource(f"{about}: GLUE's {task.folder}", how, _glue_rows(task), task.metric, task.regression)


TEXT_SETS = {
    "banking77": TextSetSource(
        "questions to a bank, 77 intents",
        "put train.csv and test.csv (columns text, category; from PolyAI's task-specific-datasets) into a folder banking77",
        _banking_rows,
    ),
    "sst2": TextSetSource(
        "sentences of film reviews, good or bad",
        "put stsa.binary.train, .dev and .test into a folder sst, or GLUE's train.tsv and dev.tsv into a folder SST-2",
        _sst2_rows,
    ),
    "sst5": TextSetSource(
        "sentences of film reviews, from very bad (0) to very good (4)",
        "put stsa.fine.train, .dev and .test into a folder sst",
        _treebank_rows("fine"),
    ),
    "cola": _glue_source("cola", "sentences, acceptable English or not"),
    "mrpc": _glue_source("mrpc", "pairs of sentences of the news, with the same meaning or not"),
    "qqp": _glue_source("qqp", "pairs of questions, duplicates or not"),
    "stsb": _glue_source("stsb", "pairs of sentences, how similar they are from 0 to 5"),
    "mnli": _glue_source("mnli", "pairs of sentences, the second follows from the first, contradicts it, or neither"),
    "qnli": _glue_source("qnli", "questions and sentences, the sentence answers the question or not"),
    "rte": _glue_source("rte", "pairs of sentences, the second follows from the first or not"),
    "wnli": _glue_source("wnli", "pairs of sentences, a pronoun means what the second says or not"),
}
EMBEDDED = "python-topics"
EMBEDDED_ABOUT = "paragraphs of Python's language reference, by topic; embedded"


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
        found = rows.make_set(dataset.name, regression, classes)
    else:
        if not path.exists() and (written := file_and_columns(str(name))) is not None:
            path, columns = written
        if name == "" or not path.exists():
            if isinstance(name, Path) or os.sep in name or is_table(path):
                raise ValueError(f"{path} does not exist; labelled texts are a folder, or a .csv, .tsv or .jsonl file.")
            raise ValueError(f"there is no file or folder {name}; {DATASETS.unknown(str(name), text_sets())}")
        about, splits = _from_path(path, columns, test_only=test_only)
        how = {"regression": regression, "classes": classes}
        found = make_set(unpacked_name(path.resolve()), about, splits, place=str(path), **how)  # type: ignore[arg-type]
    for split in SPLITS if classes is None else ("test",):
        found.texts(split)
    return found


def _folder_tables(folder: Path) -> dict[str, Table]:
    """Return the table of each split in a folder of tables, or in one that `datasets` wrote."""
    saved = saved_splits(folder)
    if saved is not None:
        return saved
    paths = find_splits(folder)
    if "train" not in paths and "test" not in paths:
        raise ValueError(
            f"{folder} has no train.csv, train.tsv or train.jsonl (plain, .gz or .xz), and `datasets` did not write it."
        )
    return {split: read_table(path) for split, path in paths.items()}


def _from_path(path: Path, columns: Columns, *, test_only: bool) -> tuple[str, dict[str, list[Row]]]:
    """Return what a file or folder is, and its rows by split; with `test_only`, all rows of a single file are the test."""
    name = path.resolve().name
    if path.is_dir():
        tables = _folder_tables(path)
        rows = {split: read_rows(table, columns, labelled=split == "train") for split, table in tables.items()}
        if test_only:
            return f"the labelled texts of {name}", {"test": next(iter(labelled_splits(rows).values()))}
        return f"the labelled texts of {name}", rows
    rows = {"test" if test_only else "train": read_rows(read_table(path), columns)}
    return f"the labelled texts of {name}" + ("" if test_only else ", split by row"), rows


def _embedded_rows(_: Path | None) -> LabelledRows:
    return LabelledRows({"train": list(_topic_rows())}, f"{EMBEDDED_ABOUT}; Python {platform.python_version()}")


def _topic_rows() -> Iterator[Row]:
    """Yield the paragraphs of some long topics of the language reference, each with its topic as the label."""
    topics = dict(without_repeated_paragraphs(python_topics().items()))
    missing = next((topic for topic in EMBEDDED_TOPICS if topic not in topics), None)
    if missing is not None:
        raise ValueError(f"this Python's language reference has no topic {missing}, so {EMBEDDED} is not available.")
    number = 0
    for topic in EMBEDDED_TOPICS:
        for paragraph in _BLANK.split(topics[topic]):
            words = paragraph.split()
            if len(words) >= LEAST_WORDS:
                number += 1
                yield Row(number, " ".join(words[:MOST_WORDS]), None, topic)


DATASETS.add(Dataset(EMBEDDED, EMBEDDED_ABOUT, "labels", _embedded_rows))
for _name, _source in TEXT_SETS.items():
    DATASETS.add(Dataset(_name, _source.about, "labels", partial(_source.load, _name)))
