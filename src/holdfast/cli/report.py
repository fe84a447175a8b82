"""`holdfast report`: render pages of stored reports again, put several on one page, or export their numbers."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from holdfast.cli.common import require_folder, require_free


@dataclass(frozen=True)
class Report:
    """Render the HTML report of a finished comparison, audit, geometry or mismatch report, or of certified predictions: one
    file that works offline. Several comparisons and audits are put on one page. Or save the numbers as CSV or LaTeX and the
    main pictures as SVG.

    Examples: `holdfast report comparison`, `holdfast report comparison --csv --latex --svg`,
    `holdfast report runs/a runs/b audits/olmoe --out together.html`,
    `holdfast report runs/smooth --out smooth.html --force`, `holdfast report geometry/geometry.json --out again.html`
    """

    folders: Positional[tuple[Path, ...]]
    """A folder to which `holdfast compare`, audit, geometry, mismatch or certify wrote, or the JSON file in it;
    or several folders of comparisons and audits."""
    out: Path | None = None
    """The file to write; by default report.html, audit.html, geometry.html, mismatch.html or predictions.html beside the
    stored file."""
    csv: bool = False
    """Save every number of the page, in the schema of docs/exporting.md; not the page itself. The file has the name of the
    page, with the ending .csv."""
    latex: bool = False
    """Save the tables of the page as LaTeX, with the ending .tex; not the page itself."""
    svg: bool = False
    """Save the pictures with named rows, such as the differences to the baseline, as SVG; not the page itself."""
    force: bool = False
    """Overwrite the files if they exist."""

    def run(self) -> None:
        from holdfast.files import write_atomically
        from holdfast.report.page_shell import write_page
        from holdfast.report.stored_pages import exports, find_stored, page_name, read_page

        if not self.folders:
            raise ValueError(
                "name the folder of a comparison, an audit, a geometry or a mismatch report, or of certified predictions."
            )
        stored = [find_stored(folder) for folder in self.folders]
        if len(stored) > 1 and self.out is None:
            raise ValueError("several folders make one page; name its file with --out.")
        target = self.out or page_name(stored[0]).with_suffix(".html")
        require_folder(target.parent)
        if not (self.csv or self.latex or self.svg):
            print(f"Report: {write_page(target, lambda: read_page(*stored).html(), force=self.force)}")
            return
        files = exports(read_page(*stored), target.with_suffix(""), csv=self.csv, latex=self.latex, svg=self.svg)
        for file in files:
            require_free(file, self.force)
        for file, content in files.items():
            write_atomically(file, content)
            print(f"Saved: {file}")
