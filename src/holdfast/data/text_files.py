"""Texts in tables: one column of a CSV or TSV file with a header, one field of the objects of a JSON-lines file.

Any text of the user's: one file, split by position, a table, split by row, or a folder of files, split by file.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from holdfast.data.documents import SPLITS, Corpus, Document, Lazy, by_position, by_title
from holdfast.data.files import PACKED, find, plain_name, read_text

SEPARATED, LINES = (".csv", ".tsv"), (".jsonl", ".ndjson")
COLUMNS = ("text", "sentence", "content", "document", "body", "article")  # read without being named, in this order

Row = tuple[int, str]  # the number of its line, and its text


def is_table(path: Path) -> bool:
    """Whether the file's name says that it holds a table, and not a text."""
    return plain_name(path).lower().endswith((*SEPARATED, *LINES, ".json"))


def table_and_column(name: str) -> tuple[Path, str] | None:
    """Split `reviews.csv:review` into the file and the column, where that is what the name says."""
    file, sign, column = name.rpartition(":")
    path = Path(file)
    return (path, column) if sign and column and is_table(path) and path.is_file() else None


def table_corpus(path: Path, column: str | None = None) -> Corpus:
    """Return the corpus of a table: every row is a document, and the hash of its number decides its split."""
    name = plain_name(path).lower()
    if name.endswith(".json"):
        raise ValueError(
            f"{path} is one JSON value, not a text; give its texts as .jsonl, an object a line, or as a .txt file."
        )
    data = read_text(path).decode()
    rows = _separated(path, data, column) if name.endswith(SEPARATED) else _lines(path, data, column)
    texts = {f"{path.name}/{number}": text.encode() for number, text in rows if text.strip()}
    if len(texts) < len(SPLITS):
        raise ValueError(f"{path} has {len(texts)} rows with a text; train, valid and test take at least {len(SPLITS)}.")
    split_of = by_title({title: len(text) for title, text in texts.items()})
    splits = {
        split: tuple(Document(title, text) for title, text in texts.items() if split_of[title] == split) for split in SPLITS
    }
    return Corpus(path.name, f"{len(texts):,} texts of {path.name}, split by row", splits)


def _separated(path: Path, data: str, column: str | None) -> Iterator[Row]:
    content = io.StringIO(data, newline="")
    if plain_name(path).lower().endswith(".tsv"):  # as in GLUE: quotes are part of the text
        rows = csv.reader(content, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        head = data.partition("\n")[0]
        rows = csv.reader(content, delimiter=max(",;\t", key=head.count), strict=True)
    limit = csv.field_size_limit(max(len(data), csv.field_size_limit()))  # a text may be longer than csv's 128 KiB
    try:
        header = [name.strip() for name in next(rows)]
        chosen = _chosen(path, header, column)
        if header.count(chosen) > 1:
            raise ValueError(f"{path} has {header.count(chosen)} columns called {chosen}; rename all but one.")
        place = header.index(chosen)
        for row in rows:
            if row and len(row) != len(header):
                raise ValueError(f"{path}, line {rows.line_num}: {len(row)} fields where the header has {len(header)}.")
            if row:
                yield rows.line_num, row[place]
    except csv.Error as error:  # an open quote
        raise ValueError(f"{path}, line {rows.line_num}: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _lines(path: Path, data: str, column: str | None) -> Iterator[Row]:
    chosen: str | None = None
    for number, line in enumerate(data.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number}: this is no JSON object; a .jsonl file holds one a line.")
        chosen = _chosen(path, list(found), column) if chosen is None else chosen
        if not isinstance(found.get(chosen), str):
            raise ValueError(f"{path}, line {number}: the field {chosen} is missing, or no text.")
        yield number, found[chosen]


def _chosen(path: Path, columns: Sequence[str], wanted: str | None) -> str:
    """The column to read: the named one, or the first of those that are usual for texts."""
    have = f"{path} has the columns {', '.join(columns)}"
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"{have}, and none is called {wanted}.")
        return wanted
    usual = {name.lower(): name for name in reversed(columns)}
    if found := next((usual[name] for name in COLUMNS if name in usual), None):
        return found
    raise ValueError(
        f"{have}, none of them {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}; name the one that holds the text, as "
        f"{path}:{columns[0] if columns else 'text'}."
    )


NAMES = {"train": ["train.txt"], "valid": ["valid.txt", "validation.txt", "dev.txt"], "test": ["test.txt"]}


def text_corpus(path: Path) -> Corpus:
    """The corpus of a text file, of a table with a column of texts, or of a folder of text files."""
    if path.is_dir():
        return _folder(path)
    return table_corpus(path) if is_table(path) else _file(path)


def split_files(name: str, about: str, paths: dict[str, Path], tokenizer: str = "words") -> Corpus:
    """A corpus of one file a split, each read when it is asked for."""

    def read(split: str) -> list[Document]:
        return [Document(f"{name}/{split}", read_text(paths[split]))]

    return Corpus(name, about, {split: Lazy(partial(read, split)) for split in SPLITS}, tokenizer)


def _file(path: Path) -> Corpus:
    parts = by_position(read_text(path))
    if parts is None:
        raise ValueError(
            f"{path} has too few lines to be split into train, valid and test; "
            "give a longer text, or a folder with train.txt, valid.txt and test.txt."
        )
    splits = {split: (Document(f"{path.name}/{split}", part),) for split, part in zip(SPLITS, parts, strict=True)}
    return Corpus(path.name, f"the text of {path.name}, split by position", splits)


def _folder(folder: Path) -> Corpus:
    name = folder.resolve().name
    named = {split: path for split in SPLITS if (path := find(folder, NAMES[split]))}
    if len(named) == len(SPLITS):
        return split_files(name, f"the texts of {name}", named)
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if _is_text(path):
            title = path.relative_to(folder).with_name(plain_name(path)).as_posix()
            if title in files:
                raise ValueError(f"{folder} holds {title} twice, as {files[title].name} and as {path.name}.")
            files[title] = path
    if len(files) < 3:
        raise ValueError(
            f"{folder} holds {len(files)} text files (.txt, or packed as .txt{' or .txt'.join(PACKED)}); "
            "splitting a folder by file takes 3, or train.txt, valid.txt and test.txt; a single file can be given by name."
        )
    split_of = by_title(dict.fromkeys(files, 1))  # not by size: how a file is packed must not move it to another split

    def read(split: str) -> Iterator[Document]:
        return (Document(title, read_text(files[title])) for title in sorted(files) if split_of[title] == split)

    splits = {split: Lazy(partial(read, split)) for split in SPLITS}
    return Corpus(name, f"the {len(files)} texts of {name}, split by file", splits)


def _is_text(path: Path) -> bool:
    return plain_name(path).endswith(".txt") and path.is_file()
