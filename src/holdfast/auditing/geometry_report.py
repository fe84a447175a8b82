"""`GeometryReport`: the results of `measure_geometry` as plain data. docs/geometry-pages.md explains every key."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from holdfast.auditing.stored_report import StoredReport


@final
@dataclass(frozen=True, kw_only=True)
class GeometryReport(StoredReport):
    """The geometry of routing on a model's own tokens."""

    kind: ClassVar[str] = "a geometry report"
    remedy: ClassVar[str] = "measure it again"

    layers: list[dict[str, Any]]  # a layer without affine keys has the reason under "skipped"
    what_if: dict[str, Any] | None = None  # the other router, and the cost before and after

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Return the layers that were not skipped."""
        return [layer for layer in self.layers if layer["skipped"] is None]
