"""`holdfast report`: render the HTML report of a finished comparison again, from its stored results."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from holdfast.cli.common import require_folder


@dataclass(frozen=True)
class Report:
    """Render the HTML report of a finished comparison: one file that works offline.

    Examples: `holdfast report comparison`, `holdfast report runs/smooth --out smooth.html --force`
    """

    folder: Positional[Path]
    """The folder where `holdfast compare` wrote its results.json."""
    out: Path | None = None
    """The file to write; by default report.html in the folder."""
    force: bool = False
    """Overwrite the file if it exists."""

    def run(self) -> None:
        from holdfast.report import read_results, write_report

        out = self.out or self.folder / "report.html"
        results = read_results(self.folder)
        require_folder(out.parent)
        print(f"Report: {write_report(results, out, force=self.force)}")
