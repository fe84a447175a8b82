"""`MismatchReport`: the results of `measure_mismatch` as plain data. docs/mismatch.md explains every key."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from holdfast.auditing.stored_report import StoredReport


@final
@dataclass(frozen=True, kw_only=True)
class MismatchReport(StoredReport):
    """How far a training forward is from a rollout; `data` also has the engine of a recorded rollout."""

    kind: ClassVar[str] = "a mismatch report"
    remedy: ClassVar[str] = "measure it again"

    rows: list[dict[str, Any]]  # one for each remedy and rollout; one that is not possible has the reason under "skipped"

    def row(self, remedy: str, rollout: str = "simulated") -> dict[str, Any]:
        """Return the row of a remedy: live, replay, smooth or float32, against the simulated or the recorded rollout."""
        for row in self.rows:
            if (row["remedy"], row["rollout"]) == (remedy, rollout):
                return row
        known = ", ".join(f"{row['remedy']} ({row['rollout']})" for row in self.rows)
        raise ValueError(f"there is no row of {remedy} against a {rollout} rollout; there are {known}.")
