"""Read folders that Hugging Face's `datasets` wrote, with `save_to_disk` (Arrow) or `to_parquet`.

    dataset_dict.json, train/, validation/, test/   a `DatasetDict`; each split is a folder with state.json and .arrow files
    state.json, data-00000-of-00001.arrow           one `Dataset`, which is the train split
    train.parquet, or data/train-00000-of-00001.parquet, and so on: the splits by the names of the files

Nothing in such a folder is executed. A file that a folder lists is read only if it is inside that folder. The names of
classes are in the metadata of the files.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.data.labelled_texts import SPLIT_NAMES, Table
from holdfast.errors import require_extra
from holdfast.files import MIB, is_inside, read_json, require_regular

DICT, STATE = "dataset_dict.json", "state.json"


def saved_splits(folder: Path) -> dict[str, Table] | None:
    """Return the tables of a folder by split; None if `datasets` did not write it."""
    if (folder / DICT).is_file():
        names = _entry(folder / DICT, "splits")
        found = {split: folder / name for name in names if (split := _split_of(str(name))) is not None}
        if "train" not in found and "test" not in found:
            listed = ", ".join(map(str, names)) or "none"
            raise ValueError(f"{folder} has the splits {listed}; expected train, validation and test, or some of them.")
        return {split: _arrow_table(place, folder) for split, place in found.items()}
    if (folder / STATE).is_file():
        return {"train": _arrow_table(folder, folder)}
    parquet = _parquet_files(folder)
    return {split: _parquet_table(files, folder) for split, files in parquet.items()} or None


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


def _arrow_table(place: Path, home: Path) -> Table:
    files = [entry.get("filename") if isinstance(entry, dict) else None for entry in _entry(place / STATE, "_data_files")]
    return _table([_checked(place, name, home) for name in files], place, _read_arrow)


def _checked(place: Path, name: Any, home: Path) -> Path:
    """Return a file of a split; raise ValueError if it is not inside the folder."""
    if not isinstance(name, str) or not name or not is_inside(place / name, home):
        raise ValueError(f"{place / STATE} lists the file {name!r}, which is not inside {home}.")
    return place / name


def _parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Return the .parquet files of each split, from `folder` or `folder/data`, in the order of their names."""
    for place in (folder, folder / "data"):
        found: dict[str, list[Path]] = {}
        for path in sorted(place.glob("*.parquet")):
            split = _split_of(path.name.removesuffix(".parquet").partition("-")[0])
            if split is not None and is_inside(path, folder):
                found.setdefault(split, []).append(path)
        if found:
            return found
    return {}


def _parquet_table(files: list[Path], folder: Path) -> Table:
    return _table(files, folder, _read_parquet)


def _read_arrow(path: Path) -> Any:
    import pyarrow  # type: ignore[import-untyped]

    with path.open("rb") as file:
        return pyarrow.ipc.open_stream(file).read_all()


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet  # type: ignore[import-untyped]

    with path.open("rb") as file:
        return pyarrow.parquet.read_table(file)


def _table(files: list[Path], place: Path, read: Any) -> Table:
    require_extra(f"reading {place}", "datasets", "pyarrow")
    columns: list[str] = []
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for path in files:
        try:
            require_regular(path)
            found = read(path)
            rows += [(len(rows) + number, row) for number, row in enumerate(_rows(found), 1)]
        except Exception as problem:  # pyarrow raises several types, some of them not its own
            reason = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
            raise ValueError(f"{path} is damaged, or is not a file of `datasets`: {reason}.") from None
        columns = list(found.schema.names)
    if not files:
        raise ValueError(f"{place} has no files with rows.")
    return Table(str(place), columns, rows)


def _rows(found: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of an Arrow table, with the names of classes in place of their numbers."""
    names = _class_names(found.schema.metadata or {})
    for batch in found.to_batches():
        for row in batch.to_pylist():
            for column, classes in names.items():
                if isinstance(row.get(column), int) and 0 <= row[column] < len(classes):
                    row[column] = classes[row[column]]
            yield row


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of the classes of each column of type ClassLabel."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {column: [str(name) for name in one["names"]] for column, one in features.items() if "names" in one}
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError):
        return {}
