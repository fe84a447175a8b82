"""`MismatchReport`: the results of `measure_mismatch` as plain data. docs/mismatch.md explains every key."""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, final

from holdfast.files import LARGEST, read_json, write_atomically
from holdfast.metrics.report import without_nan

SCHEMA = 1


@final
@dataclass(frozen=True)
class MismatchReport:
    """How far a training forward is from a rollout: dicts, lists, numbers, strings and None.

    Two reports of the same model, data and settings differ only in `seconds`.
    """

    status: Literal["complete", "interrupted"]
    model: dict[str, Any]  # name, type, class, dtype, parameters, layers, experts, routers
    data: dict[str, Any]  # kind, checksum, sequences, tokens, and the engine of a recorded rollout
    settings: dict[str, Any]  # everything that determines the numbers, seeds included
    versions: dict[str, str]
    seconds: float
    rows: list[dict[str, Any]]  # one for each remedy and rollout; one that is not possible has the reason under "skipped"
    schema: int = field(default=SCHEMA)

    def row(self, remedy: str, rollout: str = "simulated") -> dict[str, Any]:
        """Return the row of a remedy: live, replay, smooth or float32, against the simulated or the recorded rollout."""
        for row in self.rows:
            if (row["remedy"], row["rollout"]) == (remedy, rollout):
                return row
        known = ", ".join(f"{row['remedy']} ({row['rollout']})" for row in self.rows)
        raise ValueError(f"there is no row of {remedy} against a {rollout} rollout; there are {known}.")

    def to_json(self) -> str:
        return json.dumps(without_nan(asdict(self)), allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the report to a file, atomically."""
        write_atomically(Path(path), self.to_json())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "MismatchReport":
        """Read a report; raise ValueError if the file is damaged or of another schema."""
        try:
            stored = read_json(Path(path), limit=LARGEST)
        except (OSError, ValueError) as problem:
            raise ValueError(f"{path} cannot be read as a mismatch report: {problem}") from None
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            found = stored.get("schema") if isinstance(stored, dict) else None
            raise ValueError(f"{path} is not a mismatch report of schema {SCHEMA} (it has {found!r}); measure it again.")
        needed = {entry.name for entry in fields(cls) if entry.default is MISSING}
        wrong = (needed - stored.keys()) | (stored.keys() - {entry.name for entry in fields(cls)})
        if wrong:
            raise ValueError(f"{path} has missing or unknown keys: {', '.join(sorted(wrong))}; measure it again.")
        return cls(**stored)
