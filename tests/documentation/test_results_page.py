"""docs/results.md, its pictures and the numbers that other pages quote come from the cells of results/ledger."""

import results_page
from results_page import DOCS, LEDGER

from holdfast.train.ledger import LARGEST_CELL


def test_the_page_and_its_pictures_are_written_by_the_script() -> None:
    files = results_page.files()
    assert len(files) >= 3
    for path, content in files.items():
        assert (DOCS / path).read_bytes().decode() == content, f"docs/{path} is stale; run `make results`"
    pictures = {f"{results_page.PICTURES}/{path.name}" for path in (DOCS / results_page.PICTURES).iterdir()}
    assert pictures == files.keys() - {"results.md", *results_page.QUOTING}
    assert all(len(results_page.QUOTE.findall(files[page])) > 10 for page in results_page.QUOTING)


def test_every_stored_cell_is_small() -> None:
    sizes = {path.name: path.stat().st_size for path in LEDGER.glob("*/*.json")}
    assert sizes and max(sizes.values()) <= LARGEST_CELL
