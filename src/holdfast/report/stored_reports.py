"""What the stored files of comparisons, audits, geometry and mismatch have in common, and how they are read and checked."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from holdfast.files import LARGEST, REPORT_SCHEMA, read_bytes


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]  # None stands for NaN and infinity, which JSON does not have


class StoredModel(BaseModel):
    """A part of a stored file. Keys that no page shows are skipped."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Pair(StoredModel):
    """A number before a change of router and after it."""

    before: Number
    after: Number


class ReportFile(StoredModel):
    """The stored file of an audit, of geometry or of a mismatch: what `auditing.stored_report` wrote."""

    file_name: ClassVar[str]
    kind: ClassVar[str]  # in errors: "an audit"
    remedy: ClassVar[str]  # in errors: what to do if the file cannot be used

    status: str
    model: dict[str, Any]
    data: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    seconds: Number

    @property
    def title(self) -> str:
        return str(self.model.get("name") or self.model.get("class") or "a model")

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        """Return what is stored in a file, or in the folder that the command wrote to, after all checks."""
        path = path / cls.file_name if path.is_dir() else path
        try:
            stored = json.loads(read_bytes(path, limit=LARGEST), parse_constant=_refuse)
        except OSError as problem:
            raise ValueError(f"{path} cannot be read: {problem.strerror or problem}.") from None
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{path} is damaged: it is not JSON ({problem}); {cls.remedy}.") from None
        cls.parse(stored, str(path))
        return dict(stored)

    @classmethod
    def parse(cls, stored: Any, source: str | None = None) -> Self:
        """Return what is stored as typed data. Raise ValueError in one line about the first problem in `source`."""
        source = cls.file_name if source is None else source
        if not isinstance(stored, Mapping) or stored.get("schema") != REPORT_SCHEMA:
            found = stored.get("schema") if isinstance(stored, Mapping) else None
            raise ValueError(f"{source} is not {cls.kind} of schema {REPORT_SCHEMA} (it says {found!r}); {cls.remedy}.")
        try:
            return cls.model_validate(stored)
        except ValidationError as error:
            raise ValueError(f"{source} is damaged at {first_problem(error)}; {cls.remedy}.") from None


def first_problem(error: ValidationError) -> str:
    """Return where a stored file is wrong first, and how."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "its top level"
    return f"{place}: {first['msg'].lower()}"
