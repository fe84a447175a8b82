"""`StoredRecord`: a report as a file. It is typed, made where its numbers are made, dumped to JSON and loaded from it."""

import json
import math
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from holdfast.checked import from_mapping
from holdfast.files import LARGEST, read_bytes, write_atomically

SCHEMA = 1  # of every stored record


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """What the records of comparisons, audits, geometry and mismatch have in common.

    A number that may be infinite or NaN is `float | None`: JSON has neither, so it is stored as null and read as None.
    """

    file_name: ClassVar[str]  # in the folder that its command writes
    kind: ClassVar[str]  # in errors: "an audit"
    remedy: ClassVar[str]  # in errors: what to do if a file cannot be used

    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(without_nan(self), allow_nan=False) + "\n"

    def as_stored(self) -> Self:
        """Return the record as `load` would return it after `save`: with None in place of NaN and infinity."""
        return from_mapping(type(self), without_nan(self))

    def save(self, path: str | Path) -> Path:
        """Write the record to a file, atomically."""
        write_atomically(Path(path), self.to_json())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record from a file, or from the folder that its command wrote; raise ValueError if it cannot be used."""
        path = Path(path) / cls.file_name if Path(path).is_dir() else Path(path)
        try:
            stored = json.loads(read_bytes(path, limit=LARGEST), parse_constant=_refuse)
        except OSError as problem:
            raise ValueError(f"{path} cannot be read: {problem.strerror or problem}.") from None
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{path} is damaged: it is not JSON ({problem}); {cls.remedy}.") from None
        schema = stored.get("schema") if isinstance(stored, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"{path} is not {cls.kind} of schema {SCHEMA} (it has {schema!r}); {cls.remedy}.")
        try:
            return from_mapping(cls, stored)
        except ValueError as problem:
            raise ValueError(f"{path} is damaged or of another version: {str(problem).rstrip('.')}; {cls.remedy}.") from None


@dataclass(frozen=True, kw_only=True, repr=False)
class ShownRecord(StoredRecord):
    """A record with a page: it prints as a short table, is a table in notebooks, and has all its numbers as a frame."""

    page: ClassVar[str]  # "module:function" of `holdfast.report` that makes its page; imported late, since it is above

    def __str__(self) -> str:
        return str(late(self.page)(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return str(late(self.page)(self).brief_html())

    def frame(self) -> Any:
        """Return every number of the report's page as a pandas frame, in the schema of docs/exporting.md."""
        return late(self.page)(self).frame()


def late(place: str) -> Any:
    """Return the function "module:name", imported now. For records, which must not import what shows them."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def without_nan(data: Any) -> Any:
    """Return `data` with None in place of NaN and infinity, which JSON cannot store, and dataclasses as dictionaries."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if is_dataclass(data):
        data = vars(data)
    if isinstance(data, dict):
        return {key: without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_nan(value) for value in data]
    return data
