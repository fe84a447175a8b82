"""`holdfast report`: render the page of a comparison, an audit, a geometry or a mismatch report again, from its JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from holdfast.cli.common import require_folder


@dataclass(frozen=True)
class Report:
    """Render the HTML report of a finished comparison, audit, geometry or mismatch report: one file that works
    offline.

    Examples: `holdfast report comparison`, `holdfast report runs/smooth --out smooth.html --force`,
    `holdfast report geometry/geometry.json --out again.html`
    """

    folder: Positional[Path]
    """A folder to which `holdfast compare`, audit, geometry or mismatch wrote, or the JSON file in it."""
    out: Path | None = None
    """The file to write; by default report.html, audit.html, geometry.html or mismatch.html beside the stored file."""
    force: bool = False
    """Overwrite the file if it exists."""

    def run(self) -> None:
        from holdfast.report import write_audit, write_geometry, write_mismatch, write_report
        from holdfast.report.page_shell import AUDIT, GEOMETRY, MISMATCH
        from holdfast.train.results import Results

        kinds: dict[str, tuple[Callable[..., Path], str]] = {
            Results.file_name: (write_report, "report.html"),
            AUDIT: (write_audit, "audit.html"),
            GEOMETRY: (write_geometry, "geometry.html"),
            MISMATCH: (write_mismatch, "mismatch.html"),
        }
        files = [self.folder] if self.folder.name in kinds else [self.folder / name for name in kinds]
        stored = next((file for file in files if file.exists()), files[0])
        write, name = kinds[stored.name]
        page = self.out or stored.with_name(name)
        require_folder(page.parent)
        print(f"Report: {write(stored, page, force=self.force)}")
