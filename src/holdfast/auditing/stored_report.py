"""`StoredReport`: what the reports of audits, geometry and mismatch have in common. They are plain data for JSON."""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from holdfast.files import LARGEST, REPORT_SCHEMA, read_json, write_atomically
from holdfast.stored import without_nan


@dataclass(frozen=True, kw_only=True)
class StoredReport:
    """A report as a file. Two reports of the same model, data and settings differ only in `seconds`."""

    kind: ClassVar[str]  # in errors: "an audit"
    remedy: ClassVar[str]  # in errors: what to do if a file cannot be used
    indent: ClassVar[int | None] = None  # of the JSON

    status: Literal["complete", "interrupted"]
    model: dict[str, Any]  # name, type, class, dtype, parameters, layers, experts, routers
    data: dict[str, Any]  # kind, checksum, sequences, tokens, and what is particular to a report
    settings: dict[str, Any]  # everything that determines the numbers, seeds included
    versions: dict[str, str]
    seconds: float
    schema: int = field(default=REPORT_SCHEMA)

    def to_json(self) -> str:
        return json.dumps(without_nan(asdict(self)), indent=self.indent, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the report to a file, atomically."""
        write_atomically(Path(path), self.to_json())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a report; raise ValueError if the file is damaged or of another schema."""
        try:
            stored = read_json(Path(path), limit=LARGEST)
        except (OSError, ValueError) as problem:
            raise ValueError(f"{path} cannot be read as {cls.kind}: {problem}") from None
        if not isinstance(stored, dict) or stored.get("schema") != REPORT_SCHEMA:
            found = stored.get("schema") if isinstance(stored, dict) else None
            raise ValueError(f"{path} is not {cls.kind} of schema {REPORT_SCHEMA} (it has {found!r}); {cls.remedy}.")
        needed = {entry.name for entry in fields(cls) if entry.default is MISSING}
        wrong = (needed - stored.keys()) | (stored.keys() - {entry.name for entry in fields(cls)})
        if wrong:
            raise ValueError(f"{path} has missing or unknown keys: {', '.join(sorted(wrong))}; {cls.remedy}.")
        if damaged := cls._damaged(stored):
            raise ValueError(f"{path} is damaged at {damaged}; {cls.remedy}.")
        return cls(**stored)

    @classmethod
    def _damaged(cls, stored: dict[str, Any]) -> str | None:
        """Return where the values of a file with the right keys are wrong; None if they are right."""
        return None
