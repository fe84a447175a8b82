"""Files of data: plain or packed with xz or gzip, tables in them, folders that `datasets` wrote, and checksums.

Every problem with a file is a one-line ValueError that names it. Checksums are stored with every result, so that results on
different texts or images are never mixed up.

A table (`Table`) is a CSV or TSV file with a header, a JSON-lines file, or what Hugging Face's `datasets` wrote with
`save_to_disk` (Arrow) or `to_parquet`:

    dataset_dict.json, train/, validation/, test/   a `DatasetDict`; each split is a folder with state.json and .arrow files
    state.json, data-00000-of-00001.arrow           one `Dataset`, which is the train split
    train.parquet, or data/train-00000-of-00001.parquet, and so on: the splits by the names of the files

Nothing in such a folder is executed. A file that a folder lists is read only if it is inside that folder. The names of
classes are in the metadata of the files.

CSV and JSON lines are read by Python's own modules: pyarrow guesses the types of JSON values, and does not say in which line
a row is. The line is named in errors, and decides the split of a text.
"""

import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

from holdfast.errors import require_extra
from holdfast.files import MIB, is_inside, read_json, require_regular

PACKED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
MOST_UNPACKED, MOST_RATIO = 64 * MIB, 100  # a file may unpack to this many bytes, or to this many times its size
SEPARATED, JSON_LINES = (".csv", ".tsv"), (".jsonl", ".ndjson")
# The names of files and of splits in folders, for each split.
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "dev", "val"), "test": ("test",)}
DICT, STATE = "dataset_dict.json", "state.json"
_BOM = b"\xef\xbb\xbf"  # some editors write it before a text
_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open the file for reading; its bytes are unpacked as they are read."""
    try:
        require_regular(path)  # a device has no end, and opening a pipe may wait forever
        with PACKED.get(path.suffix, open)(path, "rb") as file:
            yield file
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist.") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or does not have the format of its ending: {error}.") from error
    except OSError as error:
        raise ValueError(f"{path} could not be read: {error.strerror or error}.") from error


def read_bytes(path: Path) -> bytes:
    """Return the unpacked file; raise ValueError if it unpacks to far more than a text does, and could fill the memory."""
    with open_unpacked(path) as file:
        if path.suffix not in PACKED:
            return file.read()
        most = max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} unpacks to more than {MOST_RATIO} times its size; no text does, so it is not read.")
    return data


def read_text(path: Path) -> bytes:
    """Return the bytes of a text; raise ValueError if it is blank or not UTF-8."""
    data = read_bytes(path).removeprefix(_BOM)
    if not data.strip():
        raise ValueError(f"{path} contains no text.")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from error
    return data


def find_file(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first of the named files that exists in the folder, plain or packed."""
    for name in names:
        for ending in ("", *PACKED):
            if (path := folder / f"{name}{ending}").is_file():
                return path
    return None


def find_splits(folder: Path, *endings: str) -> dict[str, Path]:
    """Return the file of each split in a folder: `train.csv`, for example. Splits without a file are left out."""
    wanted = ((split, [name + end for name in names for end in endings]) for split, names in SPLIT_NAMES.items())
    return {split: path for split, names in wanted if (path := find_file(folder, names))}


def source_folders(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the folders where a source may be: `folder/NAME` for each name, or `folder` if it has one of the names."""
    known = list(names)
    return [*(folder / name for name in known), *([folder] if folder.resolve().name in known else [])]


def unpacked_name(path: Path) -> str:
    """Return the file's name without the ending of its packing."""
    return path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name


def checksum(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of the parts, each after its length, so that other parts with the same joined bytes differ."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def names_and_sizes(paths: Iterable[Path], folder: Path) -> Iterator[bytes]:
    """Yield the name in the folder and the size of each file, for a checksum that does not read the files."""
    for path in paths:
        yield path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        yield str(path.stat().st_size).encode()


def require_utf8_name(path: Path) -> Path:
    """Return the path of a folder whose name is shown in reports; raise ValueError if the name is not UTF-8."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name of the folder {path} is not UTF-8, so it cannot be shown; rename the folder.") from None
    return path


@final
@dataclass(frozen=True)
class Table:
    """A table before columns are chosen: where it is from, its columns, and its rows with the numbers of their lines."""

    place: str
    columns: Sequence[str]
    rows: Sequence[tuple[int, Mapping[str, Any]]]

    def column(self, wanted: str | None, usual: Iterable[str], option: str = "") -> str | None:
        """Return the column to read: `wanted`, or else the first of the `usual` ones that the table has; case is ignored.

        option      where the user has named the wanted column, for errors
        """
        lowercase = {name.lower(): name for name in reversed(self.columns)}
        column = next((lowercase[name] for name in usual if name in lowercase), None) if wanted is None else wanted
        if column is not None and column not in self.columns:
            says = f", as {option} says" if option else ""
            raise ValueError(f"{self.place} has the columns {', '.join(self.columns)}, and none is called {column}{says}.")
        if column is not None and self.columns.count(column) > 1:
            count = self.columns.count(column)
            raise ValueError(f"{self.place} has {count} columns called {column}; rename all but one.")
        return column

    def text(self, line: int, row: Mapping[str, Any], column: str) -> str:
        """Return the text in a row; raise ValueError if there is none."""
        text = row.get(column)
        if not isinstance(text, str):
            raise ValueError(f"{self.place}, line {line}: {column} is missing or not a text.")
        return text


def is_table(path: Path) -> bool:
    """Whether the file name ends as that of a table (.csv, .jsonl, ...), not of a plain text."""
    return unpacked_name(path).lower().endswith((*SEPARATED, *JSON_LINES, ".json"))


def read_table(path: Path, header: Sequence[str] | None = None, *, skip_broken: bool = False) -> Table:
    """Return the table in a .csv, .tsv or .jsonl file.

    header          the names of the columns of a .csv or .tsv file that does not have them
    skip_broken     leave out the rows of a .csv or .tsv file that have another number of fields, or an empty field
    """
    name = unpacked_name(path).lower()
    if name.endswith(SEPARATED):
        return separated_table(path, header, skip_broken=skip_broken)
    if not name.endswith(JSON_LINES):
        raise ValueError(f"{path} is not a table; tables are .csv, .tsv and .jsonl files (one JSON object in each line).")
    rows = list(json_objects(path))
    return Table(str(path), list(dict.fromkeys(key for _, row in rows for key in row)), rows)


def separated_table(
    path: Path, header: Sequence[str] | None = None, *, skip_broken: bool = False, quoted_tabs: bool = False
) -> Table:
    """Return the table in a .csv or .tsv file, as `read_table`; with `quoted_tabs`, of one with tabs and quotes."""
    data = read_text(path).decode()
    content = io.StringIO(data, newline="")
    if unpacked_name(path).lower().endswith(".tsv") and not quoted_tabs:  # as GLUE's: quotes are part of the text
        lines = csv.reader(content, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        first_line = data.partition("\n")[0]
        delimiter = "\t" if quoted_tabs else max(",;\t", key=first_line.count)
        lines = csv.reader(content, delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(max(len(data), csv.field_size_limit()))  # the default limit for a field is 128 KiB
    try:
        columns = [name.strip() for name in (next(lines) if header is None else header)]
        rows = []
        for row in filter(None, lines):  # without blank lines
            if skip_broken and (len(row) != len(columns) or not all(map(str.strip, row))):
                continue
            if len(row) != len(columns):
                expected = "the header has" if header is None else "expected"
                raise ValueError(f"{path}, line {lines.line_num}: {len(row)} fields, but {expected} {len(columns)}.")
            rows.append((lines.line_num, dict(zip(columns, row, strict=True))))
    except csv.Error as error:  # such as a quote that is not closed
        raise ValueError(f"{path}, line {lines.line_num}: {error}.") from error
    finally:
        csv.field_size_limit(limit)
    return Table(str(path), columns, rows)


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line of a JSON-lines file; blank lines are skipped."""
    for number, line in enumerate(read_text(path).decode().split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, line {number}: this is not a JSON object; a .jsonl file has one per line.")
        if "\\ud" in line.lower() and _SURROGATE.search(json.dumps(entry, ensure_ascii=False)):
            raise ValueError(
                f"{path}, line {number}: it has half of a surrogate pair, \\ud800 to \\udfff, which is no text."
            )
        yield number, entry


def saved_tables(folder: Path) -> dict[str, Table] | None:
    """Return the tables of a folder by split; None if `datasets` did not write it."""
    if (folder / DICT).is_file():
        names = _entry(folder / DICT, "splits")
        places = {split: folder / name for name in names if (split := _split_of(str(name))) is not None}
        if "train" not in places and "test" not in places:
            listed = ", ".join(map(str, names)) or "none"
            raise ValueError(f"{folder} has the splits {listed}; expected train, validation and test, or some of them.")
        return {split: _saved_table(_arrow_files(place, folder), place) for split, place in places.items()}
    if (folder / STATE).is_file():
        return {"train": _saved_table(_arrow_files(folder, folder), folder)}
    for place in (folder, folder / "data"):
        files: dict[str, list[Path]] = {}
        for path in sorted(place.glob("*.parquet")):
            split = _split_of(path.name.removesuffix(".parquet").partition("-")[0])
            if split is not None and is_inside(path, folder):
                files.setdefault(split, []).append(path)
        if files:
            return {split: _saved_table(paths, folder) for split, paths in files.items()}
    return None


def _split_of(name: str) -> str | None:
    return next((split for split, names in SPLIT_NAMES.items() if name in names), None)


def _entry(path: Path, name: str) -> list[Any]:
    try:
        found = read_json(path, limit=MIB)[name]
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path} is damaged: {problem}.") from None
    if not isinstance(found, list):
        raise ValueError(f"{path} is damaged: {name} is not a list.")
    return found


def _arrow_files(place: Path, home: Path) -> list[Path]:
    """Return the files of a split; raise ValueError if one is not inside the folder."""
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in _entry(place / STATE, "_data_files")]
    for name in names:
        if not isinstance(name, str) or not name or not is_inside(place / name, home):
            raise ValueError(f"{place / STATE} lists the file {name!r}, which is not inside {home}.")
    return [place / str(name) for name in names]


def _saved_table(files: Sequence[Path], place: Path) -> Table:
    require_extra(f"reading {place}", "datasets", "pyarrow")
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    columns: list[str] = []
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for path in files:
        try:
            require_regular(path)
            with path.open("rb") as file:
                is_parquet = path.suffix == ".parquet"
                table = pyarrow.parquet.read_table(file) if is_parquet else pyarrow.ipc.open_stream(file).read_all()
            rows += enumerate(_named_rows(table), len(rows) + 1)
        except Exception as problem:  # pyarrow raises several types, some of them not its own
            reason = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
            raise ValueError(f"{path} is damaged, or is not a file of `datasets`: {reason}.") from None
        columns = list(table.schema.names)
    if not files:
        raise ValueError(f"{place} has no files with rows.")
    return Table(str(place), columns, rows)


def _named_rows(table: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of an Arrow table, with the names of classes (columns of type ClassLabel) in place of their numbers."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = {column: [str(name) for name in one["names"]] for column, one in features.items() if "names" in one}
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError):
        names = {}
    for batch in table.to_batches():
        for row in batch.to_pylist():
            for column, classes in names.items():
                if isinstance(row.get(column), int) and 0 <= row[column] < len(classes):
                    row[column] = classes[row[column]]
            yield row
