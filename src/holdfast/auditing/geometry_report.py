"""`GeometryReport`: the results of `measure_geometry` as plain data. docs/geometry-pages.md explains every key."""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, final

from holdfast.files import LARGEST, read_json, write_atomically
from holdfast.metrics.report import without_nan

SCHEMA = 1


@final
@dataclass(frozen=True)
class GeometryReport:
    """The geometry of routing on a model's own tokens: dicts, lists, numbers, strings and None.

    Two reports of the same model, data and settings differ only in `seconds`.
    """

    status: Literal["complete", "interrupted"]
    model: dict[str, Any]  # name, type, class, dtype, parameters, layers, experts, routers
    data: dict[str, Any]  # kind, checksum, batches, sequences, tokens
    settings: dict[str, Any]  # everything that determines the numbers, seeds included
    versions: dict[str, str]
    seconds: float
    layers: list[dict[str, Any]]  # a layer without affine keys has the reason under "skipped"
    what_if: dict[str, Any] | None = None  # the other router, and the cost before and after
    schema: int = field(default=SCHEMA)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Return the layers that were not skipped."""
        return [layer for layer in self.layers if layer["skipped"] is None]

    def to_json(self) -> str:
        return json.dumps(without_nan(asdict(self)), allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the report to a file, atomically."""
        write_atomically(Path(path), self.to_json())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "GeometryReport":
        """Read a report; raise ValueError if the file is damaged or of another schema."""
        try:
            stored = read_json(Path(path), limit=LARGEST)
        except (OSError, ValueError) as problem:
            raise ValueError(f"{path} cannot be read as a geometry report: {problem}") from None
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            found = stored.get("schema") if isinstance(stored, dict) else None
            raise ValueError(f"{path} is not a geometry report of schema {SCHEMA} (it has {found!r}); measure it again.")
        needed = {entry.name for entry in fields(cls) if entry.default is MISSING}
        wrong = (needed - stored.keys()) | (stored.keys() - {entry.name for entry in fields(cls)})
        if wrong:
            raise ValueError(f"{path} has missing or unknown keys: {', '.join(sorted(wrong))}; measure it again.")
        return cls(**stored)
