"""The main pages of the site are for everyone: axe-core finds nothing serious."""

from pathlib import Path
from typing import Any

import pytest
from report.axe import axe as axe
from report.axe import violations
from report.browsing import on_all_screens, require_fit, visit

pytestmark = pytest.mark.slow  # builds the site, starts a browser

PAGES = ("index.html", "routers/smooth.html", "geometry.html", "tutorials/audit-and-mend.html", "reference/attacks.html")


@on_all_screens
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_serious(screen: Any, site: Path, axe: str, page: str) -> None:
    visit(screen, site / page)
    found = violations(screen, axe)
    assert not found, "\n".join(found)
    screen.get_log("browser")  # axe asks for the style sheets, which a page from a file may not read


@pytest.mark.parametrize("screen", [(390, "light")], indirect=True)
def test_formulas_are_drawn_as_mathematics_and_fit_or_scroll_by_themselves(screen: Any, site: Path) -> None:
    visit(screen, site / "geometry.html")
    boxes = "return [...document.querySelectorAll('math')].map((one) => one.getBoundingClientRect().height)"
    heights = screen.execute_script(boxes)
    assert len(heights) > 50 and min(heights) > 5
    require_fit(screen)
