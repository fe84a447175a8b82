"""Read the user's text files without labels: plain texts, and tables with a column of texts.

A corpus (`text_corpus`) has documents without labels, in the splits train, valid and test. It is made from:

    one text file          split by position
    one table              split by row: a column of a CSV or TSV file with a header, or a field of a JSON-lines file
    a folder of texts      one file for each split (train.txt, valid.txt and test.txt), or any .txt files, split by file

All files may be compressed (.gz or .xz). A table with a column of labels is refused unless the column of texts is named:
somebody who has labels usually wants to classify (`labelled_texts`).
"""

import csv
import io
import json
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.data.documents import SPLITS, Corpus, Document, LazyDocuments, split_by_position, split_by_title
from holdfast.data.files import PACKED, find_file, read_text, unpacked_name

SEPARATED, JSON_LINES = (".csv", ".tsv"), (".jsonl", ".ndjson")
SPLIT_FILES = {"train": ["train.txt"], "valid": ["valid.txt", "validation.txt", "dev.txt"], "test": ["test.txt"]}
MOST_OTHERS = 100_000  # files in a folder of texts that are not texts: to find them takes about a second
# If no column is named, the first of these that the table has is read.
TEXT_COLUMNS = ("text", "sentence", "content", "document", "body", "article")

# Columns that have labels rather than texts.
LABEL_COLUMNS = ("label", "labels", "category", "class", "intent", "target", "sentiment", "gold_label", "is_duplicate")
_SURROGATE = re.compile("[\ud800-\udfff]")


def text_corpus(path: Path, column: str | None = None) -> Corpus:
    """Return the corpus of a text file, of a table with a `column` of texts, or of a folder of text files."""
    if not path.is_dir() and is_table(path):
        return table_corpus(path, column)
    if column is not None:
        raise ValueError(f"data.text names the column {column}, but {path} is not a table (.csv, .tsv or .jsonl).")
    return _folder_corpus(path) if path.is_dir() else _file_corpus(path)


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
    for path in sorted(_text_paths(folder)):
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


def _text_paths(folder: Path) -> Iterator[Path]:
    """Yield the text files in a folder and its folders; raise ValueError if it has too many other files, as a disk has."""
    others = 0
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if unpacked_name(path).endswith(".txt") and path.is_file():
                yield path
            elif (others := others + 1) > MOST_OTHERS:
                raise ValueError(
                    f"{folder} has over {MOST_OTHERS:,} files that are not texts (.txt); name a folder of texts."
                )


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
    with closing(csv_rows(path)) as rows:
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
    for number, found in json_objects(path):
        chosen = _text_column(path, list(found), column) if chosen is None else chosen
        if not isinstance(found.get(chosen), str):
            raise ValueError(f"{path}, line {number}: the field {chosen} is missing or not a text.")
        yield number, found[chosen]


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line of a JSON-lines file; blank lines are skipped."""
    for number, line in enumerate(read_text(path).decode().split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number}: this is not a JSON object; a .jsonl file has one per line.")
        if "\\ud" in line.lower() and _SURROGATE.search(json.dumps(found, ensure_ascii=False)):
            raise ValueError(
                f"{path}, line {number}: it has half of a surrogate pair, \\ud800 to \\udfff, which is no text."
            )
        yield number, found


def _text_column(path: Path, columns: Sequence[str], wanted: str | None) -> str:
    """Return the column to read: `wanted`, or else the first of `TEXT_COLUMNS` that the table has; case is ignored."""
    found_columns = f"{path} has the columns {', '.join(columns)}"
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"{found_columns}, and none is called {wanted}.")
        return wanted
    lowercase = {name.lower(): name for name in reversed(columns)}
    _require_no_labels(path, lowercase)
    if found := next((lowercase[name] for name in TEXT_COLUMNS if name in lowercase), None):
        return found
    raise ValueError(
        f"{found_columns}, none of them {', '.join(TEXT_COLUMNS[:-1])} or {TEXT_COLUMNS[-1]}; name the text column, as in "
        f"{path}:{columns[0] if columns else 'text'}."
    )


def _require_no_labels(path: Path, columns: Mapping[str, str]) -> None:
    """Raise ValueError if one of the columns, which have lower-case keys, is a column of labels."""
    label = next((columns[name] for name in LABEL_COLUMNS if name in columns), None)
    if label is None:
        return
    text = next((columns[name] for name in TEXT_COLUMNS if name in columns), "TEXT")
    raise ValueError(
        f"{path} has a column of labels, {label}, which a language model would ignore; use a recipe with `task: labels`, "
        f"such as labels-tiny, to classify its texts, or name the column of texts to learn them as prose (data.text={text}, "
        f"or {path}:{text})."
    )


def csv_rows(path: Path, columns: Sequence[str] | None = None) -> Generator[tuple[int, list[str]], None, None]:
    """Yield the rows of a CSV or TSV file with the numbers of their lines, the header first; blank rows are skipped.

    columns     the names of the columns, if the file has no header; they are yielded in its place
    """
    data = read_text(path).decode()
    content = io.StringIO(data, newline="")
    if unpacked_name(path).lower().endswith(".tsv"):  # as GLUE's: quotes are part of the text
        rows = csv.reader(content, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        first_line = data.partition("\n")[0]
        rows = csv.reader(content, delimiter=max(",;\t", key=first_line.count), strict=True)
    limit = csv.field_size_limit(max(len(data), csv.field_size_limit()))  # the default limit for a field is 128 KiB
    try:
        header = [name.strip() for name in (next(rows) if columns is None else columns)]
        yield rows.line_num, header
        for row in filter(None, rows):
            if len(row) != len(header):
                expected = "the header has" if columns is None else "expected"
                raise ValueError(f"{path}, line {rows.line_num}: {len(row)} fields, but {expected} {len(header)}.")
            yield rows.line_num, row
    except csv.Error as error:  # such as a quote that is not closed
        raise ValueError(f"{path}, line {rows.line_num}: {error}.") from error
    finally:
        csv.field_size_limit(limit)
