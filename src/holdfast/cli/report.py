"""`holdfast report`: render the page of a comparison, an audit, a geometry or a mismatch report again, from its JSON."""

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
    """The folder where `holdfast compare` wrote its results.json, or a folder or file of an audit, a geometry or a
    mismatch report."""
    out: Path | None = None
    """The file to write; by default report.html, audit.html, geometry.html or mismatch.html beside the stored file."""
    force: bool = False
    """Overwrite the file if it exists."""

    def run(self) -> None:
        from holdfast.report import read_results, write_audit, write_geometry, write_mismatch, write_report
        from holdfast.report.page_shell import AUDIT, GEOMETRY, MISMATCH
        from holdfast.report.stored_comparison import NAME

        writers = {AUDIT: write_audit, GEOMETRY: write_geometry, MISMATCH: write_mismatch}
        stored = self.folder if self.folder.name in writers else None
        if stored is None and not (self.folder / NAME).exists():
            stored = next((self.folder / name for name in writers if (self.folder / name).exists()), None)
        if stored is not None:
            page = self.out or stored.with_suffix(".html")
            require_folder(page.parent)
            print(f"Report: {writers[stored.name](stored, page, force=self.force)}")
            return
        out = self.out or self.folder / "report.html"
        results = read_results(self.folder)
        require_folder(out.parent)
        print(f"Report: {write_report(results, out, force=self.force)}")
