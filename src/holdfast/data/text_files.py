"""Read the user's text files: plain texts, tables with a column of texts, and labelled texts to classify.

A corpus (`text_corpus`) has documents without labels, in the splits train, valid and test. It is made from:

    one text file          split by position
    one table              split by row: a column of a CSV or TSV file with a header, or a field of a JSON-lines file
    a folder of texts      one file for each split (train.txt, valid.txt and test.txt), or any .txt files, split by file

A text set (`text_set`) has a label for each text. It is a folder with the files train, dev (or valid) and test, as CSV
(Banking77) or as TSV (GLUE). All files may be compressed (.gz or .xz).
"""

import csv
import io
import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from holdfast.data.documents import SPLITS, Corpus, Document, LazyDocuments, hold_out, split_by_position, split_by_title
from holdfast.data.files import PACKED, checksum, find_file, read_text, source_folders, unpacked_name
from holdfast.errors import unknown_name

SEPARATED, JSON_LINES = (".csv", ".tsv"), (".jsonl", ".ndjson")
SPLIT_FILES = {"train": ["train.txt"], "valid": ["valid.txt", "validation.txt", "dev.txt"], "test": ["test.txt"]}
# If no column is named, the first of these that the table has is read.
TEXT_COLUMNS = ("text", "sentence", "content", "document", "body", "article")

LABELLED_FILES = {"train": ("train",), "valid": ("valid", "validation", "dev", "val"), "test": ("test",)}
LABELLED_COLUMNS, LABEL_COLUMNS = ("text", "sentence"), ("category", "label")


def text_corpus(path: Path) -> Corpus:
    """Return the corpus of a text file, of a table with a column of texts, or of a folder of text files."""
    if path.is_dir():
        return _folder_corpus(path)
    return table_corpus(path) if is_table(path) else _file_corpus(path)


def _file_corpus(path: Path) -> Corpus:
    parts = split_by_position(read_text(path))
    if parts is None:
        raise ValueError(
            f"{path} has too few lines to be split into train, valid and test; "
            "give a longer text, or a folder with train.txt, valid.txt and test.txt."
        )
    splits = {split: (Document(f"{path.name}/{split}", part),) for split, part in zip(SPLITS, parts, strict=True)}
    return Corpus(path.name, f"the text of {path.name}, split by position", splits)


def _folder_corpus(folder: Path) -> Corpus:
    name = folder.resolve().name
    named = {split: path for split in SPLITS if (path := find_file(folder, SPLIT_FILES[split]))}
    if len(named) == len(SPLITS):
        return split_files(name, f"the texts of {name}", named)
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if unpacked_name(path).endswith(".txt") and path.is_file():
            title = path.relative_to(folder).with_name(unpacked_name(path)).as_posix()
            if title in files:
                raise ValueError(f"{folder} has {title} twice, as {files[title].name} and as {path.name}; remove one.")
            files[title] = path
    if len(files) < len(SPLITS):
        raise ValueError(
            f"{folder} has {len(files)} text files (.txt, or packed as .txt{' or .txt'.join(PACKED)}); "
            "splitting a folder by file needs 3, or train.txt, valid.txt and test.txt; a single file can be given by name."
        )
    split_of = split_by_title(dict.fromkeys(files, 1))  # not by size: packing a file must not move it to another split

    def read(split: str) -> Iterator[Document]:
        return (Document(title, read_text(files[title])) for title in sorted(files) if split_of[title] == split)

    splits = {split: LazyDocuments(partial(read, split)) for split in SPLITS}
    return Corpus(name, f"the {len(files)} texts of {name}, split by file", splits)


def split_files(name: str, about: str, paths: dict[str, Path], tokenizer: str = "words") -> Corpus:
    """Return a corpus with one file per split; each file is read at first use."""

    def read(split: str) -> list[Document]:
        return [Document(f"{name}/{split}", read_text(paths[split]))]

    return Corpus(name, about, {split: LazyDocuments(partial(read, split)) for split in SPLITS}, tokenizer)


def is_table(path: Path) -> bool:
    """Whether the file name ends as that of a table (.csv, .jsonl, ...), not of a plain text."""
    return unpacked_name(path).lower().endswith((*SEPARATED, *JSON_LINES, ".json"))


def table_and_column(name: str) -> tuple[Path, str] | None:
    """Split `reviews.csv:review` into the file and the column; return None if the name is not of this form."""
    file, colon, column = name.rpartition(":")
    path = Path(file)
    return (path, column) if colon and column and is_table(path) and path.is_file() else None


def table_corpus(path: Path, column: str | None = None) -> Corpus:
    """Return the corpus of a table: every row is a document, and a hash of its line number decides its split."""
    name = unpacked_name(path).lower()
    if name.endswith(".json"):
        raise ValueError(
            f"{path} is a single JSON value, not a text; write its texts as .jsonl, one object per line, or as a .txt file."
        )
    read = _texts_in_csv if name.endswith(SEPARATED) else _texts_in_json_lines
    texts = {f"{path.name}/{line}": text.encode() for line, text in read(path, column) if text.strip()}
    if len(texts) < len(SPLITS):
        raise ValueError(f"{path} has {len(texts)} rows with a text; train, valid and test need at least {len(SPLITS)}.")
    split_of = split_by_title({title: len(text) for title, text in texts.items()})
    splits = {
        split: tuple(Document(title, text) for title, text in texts.items() if split_of[title] == split) for split in SPLITS
    }
    return Corpus(path.name, f"{len(texts):,} texts of {path.name}, split by row", splits)


def _texts_in_csv(path: Path, column: str | None) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each row of a CSV or TSV file."""
    with closing(_csv_rows(path)) as rows:
        _, header = next(rows)
        chosen = _text_column(path, header, column)
        if header.count(chosen) > 1:
            raise ValueError(f"{path} has {header.count(chosen)} columns called {chosen}; rename all but one.")
        position = header.index(chosen)
        for line, row in rows:
            yield line, row[position]


def _texts_in_json_lines(path: Path, column: str | None) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each object of a JSON-lines file."""
    chosen: str | None = None
    for number, line in enumerate(read_text(path).decode().split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number}: this is not a JSON object; a .jsonl file has one per line.")
        chosen = _text_column(path, list(found), column) if chosen is None else chosen
        if not isinstance(found.get(chosen), str):
            raise ValueError(f"{path}, line {number}: the field {chosen} is missing or not a text.")
        yield number, found[chosen]


def _text_column(path: Path, columns: Sequence[str], wanted: str | None) -> str:
    """Return the column to read: `wanted`, or else the first of `TEXT_COLUMNS` that the table has; case is ignored."""
    found_columns = f"{path} has the columns {', '.join(columns)}"
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"{found_columns}, and none is called {wanted}.")
        return wanted
    lowercase = {name.lower(): name for name in reversed(columns)}
    if found := next((lowercase[name] for name in TEXT_COLUMNS if name in lowercase), None):
        return found
    raise ValueError(
        f"{found_columns}, none of them {', '.join(TEXT_COLUMNS[:-1])} or {TEXT_COLUMNS[-1]}; name the text column, as in "
        f"{path}:{columns[0] if columns else 'text'}."
    )


def _csv_rows(path: Path) -> Generator[tuple[int, list[str]], None, None]:
    """Yield the rows of a CSV or TSV file with the numbers of their lines, the header first; blank rows are skipped."""
    data = read_text(path).decode()
    content = io.StringIO(data, newline="")
    if unpacked_name(path).lower().endswith(".tsv"):  # as GLUE's: quotes are part of the text
        rows = csv.reader(content, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        first_line = data.partition("\n")[0]
        rows = csv.reader(content, delimiter=max(",;\t", key=first_line.count), strict=True)
    limit = csv.field_size_limit(max(len(data), csv.field_size_limit()))  # the default limit for a field is 128 KiB
    try:
        header = [name.strip() for name in next(rows)]
        yield rows.line_num, header
        for row in filter(None, rows):
            if len(row) != len(header):
                raise ValueError(f"{path}, line {rows.line_num}: {len(row)} fields, but the header has {len(header)}.")
            yield rows.line_num, row
    except csv.Error as error:  # such as a quote that is not closed
        raise ValueError(f"{path}, line {rows.line_num}: {error}.") from error
    finally:
        csv.field_size_limit(limit)


@final
@dataclass(frozen=True)
class LabelledText:
    """A text and the number of its class."""

    text: str
    label: int


@final
@dataclass(frozen=True)
class TextSet:
    """Texts to classify, with their labels, in the splits train, valid and test."""

    name: str
    about: str
    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[LabelledText]]
    checksum: str

    def texts(self, split: str) -> Sequence[LabelledText]:
        if split not in self.splits:
            raise ValueError(unknown_name("split", split, self.splits))
        return self.splits[split]

    def describe(self) -> dict[str, Any]:
        """Return what is stored with a result to identify its texts."""
        return {"name": self.name, "about": self.about, "checksum": self.checksum}


@final
@dataclass(frozen=True)
class TextSetSource:
    """A known text set: its usual folder names, and how to get it."""

    about: str
    folders: tuple[str, ...]
    how: str


TEXT_SETS = {
    "banking77": TextSetSource(
        "13,083 questions to a bank, 77 intents",
        ("banking77",),
        "put train.csv and test.csv (columns text, category; from PolyAI's task-specific-datasets) into a folder banking77",
    ),
    "sst2": TextSetSource(
        "68,221 phrases and sentences of film reviews, good or bad: GLUE's SST-2",
        ("SST-2", "sst2"),
        "put GLUE's train.tsv and dev.tsv (columns sentence, label) into a folder SST-2",
    ),
}


def text_sets() -> dict[str, str]:
    """Return the names of the known text sets, each with one line of help."""
    return {name: source.about for name, source in TEXT_SETS.items()}


def text_set(name: str | Path, *, folder: str | Path | None = None) -> TextSet:
    """Return a known text set, which is searched for in `folder`, or the labelled texts in the folder with the path `name`.

    The folder has the files train, dev (or valid) and test as .csv or .tsv with a header; they may be compressed. If dev or
    test is missing, or has no labels (as the test sets of GLUE), the other one is the test split and a tenth of train
    becomes the valid split.
    """
    if isinstance(name, str) and name in TEXT_SETS:
        source = TEXT_SETS[name]
        for candidate in source_folders(Path(folder), source.folders) if folder is not None else []:
            if _find_split(candidate, "train"):
                return _load_text_set(name, source.about, candidate)
        raise ValueError(f"{name} is not in {folder or 'any folder given'}: {source.how} there.")
    path = Path(name)
    if path.is_dir():
        return _load_text_set(path.resolve().name, f"the labelled texts of {path.resolve().name}", path)
    if isinstance(name, Path) or os.sep in name:
        raise ValueError(
            f"{path} is not a folder; put the labelled texts into a folder, as files train and test (.csv or .tsv)."
        )
    raise ValueError(unknown_name("source of labelled texts", name, TEXT_SETS))


def _find_split(folder: Path, split: str) -> Path | None:
    return find_file(folder, [name + ending for name in LABELLED_FILES[split] for ending in SEPARATED])


def _load_text_set(name: str, about: str, folder: Path) -> TextSet:
    path = _find_split(folder, "train")
    if path is None:
        raise ValueError(f"{folder} has no train.csv or train.tsv (plain, .gz or .xz).")
    train = _read_labelled(path)
    if train is None:
        raise ValueError(f"{path} has no column {' or '.join(LABEL_COLUMNS)}.")
    classes = _classes(label for _, label in train)
    others = (_read_labelled(path) for split in ("valid", "test") if (path := _find_split(folder, split)))
    labelled = [table for table in others if table is not None]
    if not labelled:
        raise ValueError(f"{folder} has a train file, but no valid, dev or test file with labels.")
    if len(labelled) == 2:
        valid, test = labelled
    else:
        kept, held = hold_out([text for text, _ in train])
        train, valid, test = [train[i] for i in kept], [train[i] for i in held], labelled[0]
    tables = {"train": train, "valid": valid, "test": test}
    if len(classes) < 2:
        raise ValueError(f"{folder} has texts of only one class, {classes[0]!r}; classification needs at least two.")
    numbers = {label: number for number, label in enumerate(classes)}
    for split, table in tables.items():
        if new := next((label for _, label in table if label not in numbers), None):
            raise ValueError(f"{folder}: {split} has the label {new!r}, which is not in train.")
    splits = {split: tuple(LabelledText(text, numbers[label]) for text, label in table) for split, table in tables.items()}
    parts = (part for split, table in tables.items() for row in table for part in (split, *row))
    return TextSet(name, about, classes, splits, checksum(part.encode() for part in parts))


def _classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the classes in the order of their numbers if all labels are numbers, else in alphabetical order."""
    names = set(labels)
    return tuple(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))


def _read_labelled(path: Path) -> list[tuple[str, str]] | None:
    """Return the text and the label of each row, or None if the table has no column of labels."""
    with closing(_csv_rows(path)) as rows:
        _, header = next(rows)
        text = next((header.index(name) for name in LABELLED_COLUMNS if name in header), None)
        label = next((header.index(name) for name in LABEL_COLUMNS if name in header), None)
        if text is None:
            raise ValueError(f"{path} has the columns {', '.join(header)}, none of them {' or '.join(LABELLED_COLUMNS)}.")
        if label is None:
            return None
        found = [(row[text].strip(), row[label].strip()) for _, row in rows]
    if not found:
        raise ValueError(f"{path} has a header but no rows.")
    return found
