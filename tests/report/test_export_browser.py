"""The buttons of a page save what `holdfast report` writes; pages of several runs fit on every screen."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from report import audited
from report.axe import axe as axe
from report.axe import violations_of_every_tab
from report.browsing import on_all_screens, require_fit, visit, wait
from report.stored import parse, stored_costs, stored_images

from holdfast.report.comparison_page import comparison_page
from holdfast.report.stored_pages import board_page, runs_page
from holdfast.report.tables import Record
from holdfast.train.ledger import read_ledger

pytestmark = pytest.mark.slow  # starts a browser

LEDGER = Path(__file__).parent.parent.parent / "results" / "ledger"


def saved(browser: Any, folder: Path, button: str) -> str:
    """Return the file that a button saves."""
    folder.mkdir()
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    (found,) = [one for one in browser.find_elements("css selector", ".export button") if one.text == button]
    found.click()
    complete = (".csv", ".tex", ".json")
    (file,) = wait(browser, lambda _: [one for one in folder.iterdir() if one.suffix in complete and one.stat().st_size])
    return str(file.read_text(encoding="utf-8"))


def test_the_buttons_save_the_exports(screen: Any, tmp_path: Path) -> None:
    content = stored_costs(("smoe", 'a "quoted", name\nof two lines', "ac", "smoe, top 3"))
    page = comparison_page(parse(content))
    (tmp_path / "page.html").write_text(page.html(), encoding="utf-8")
    visit(screen, tmp_path / "page.html")
    assert saved(screen, tmp_path / "csv", "CSV") == page.csv()
    assert saved(screen, tmp_path / "tex", "LaTeX") == page.latex()
    found = json.loads(saved(screen, tmp_path / "json", "JSON"))
    assert found["schema"] == 1
    written = [Record(**record) for record in json.loads(page.json())["records"]]
    shown = list(csv.reader(io.StringIO(page.csv(), newline="")))[1:]
    for record, own, line in zip(found["records"], written, shown, strict=True):
        texts = [record[name] for name in ("part", "row", "column", "text")]
        assert texts == [own.part, own.row, own.column, own.text]
        assert [record[name] for name in ("line", "value", "low", "high")] == pytest.approx(
            [None if field == "" else float(field) for field in (line[1], *line[4:7])]
        )


@on_all_screens
def test_pages_of_several_runs_fit_are_quiet_and_accessible(screen: Any, axe: str, tmp_path: Path) -> None:
    reports = {
        "text": parse(stored_costs()),
        "images": parse(stored_images()),
        "audit": audited.report_of(audited.stored_audit()),
    }
    for name, page in {"several": runs_page(reports), "board": board_page(read_ledger(LEDGER))}.items():
        (tmp_path / f"{name}.html").write_text(page.html(), encoding="utf-8")
        visit(screen, tmp_path / f"{name}.html")
        require_fit(screen)
        strip = "return document.querySelector('table').getBoundingClientRect().top"
        assert screen.execute_script(strip) < 844 / 2  # the first row of the strip is on the first screen
        assert violations_of_every_tab(screen, axe) == []
    first = "return document.querySelector('tbody th').innerText"
    shown = page.values["sections"][0].strip  # of the leaderboard, the last page
    assert shown.rows[shown.columns[1].best].label in screen.execute_script(first)
    screen.execute_script("document.querySelectorAll('thead .sort')[3].click()")  # by the cost of the attack
    assert screen.execute_script(first).split()[-1] == shown.rows[shown.columns[2].best].label
    for details in screen.find_elements("css selector", "summary"):
        details.click()
    require_fit(screen)
