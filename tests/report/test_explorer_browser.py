"""The Explorer in headless Chromium: pointing, clicking, keys, search, flips, two routers, and the numbers themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from auditing.audited_models import texts, tokenizer
from report.audited import report_of, stored_audit
from report.browsing import EVIL, on_all_screens, require_fit, show_explorer, visit
from report.routes import large_examples, large_routes, stored_routes
from report.stored import parse, stored_costs, stored_images
from tiny import tiny

import holdfast
from holdfast.auditing import audit
from holdfast.report import write_audit, write_report
from holdfast.report.page_shell import COLOURS

pytestmark = pytest.mark.slow  # starts a browser

Keys = pytest.importorskip("selenium.webdriver").Keys

PIECES = [
    "Re",
    "turn",
    " <script>alert(1)</script>",
    f" {EVIL}",
    " שלום\u202e",
    " two\n",
    "lines",
    "",
    " " + "a" * 500,
    " end",
]
ROUTERS = ("smoe", "smooth", EVIL)


def comparison() -> dict[str, Any]:
    """The second router sends the first seven tokens as the first one does, but for the numbers of the experts."""
    content = stored_costs(ROUTERS)
    for cell in content["cells"]:
        place = ROUTERS.index(cell["router"])
        routes = stored_routes(10, 2, place, flips=(1, 5))
        if place == 1:
            for layer in routes["layers"]:
                layer["experts"][7:] = [[(first + 1) % 4, (first + 3) % 4] for first, _ in layer["experts"][7:]]
        cell["view"] = {"examples": [{"pieces": PIECES}], "routes": routes}
    return content


def large() -> dict[str, Any]:
    content = stored_audit()
    content["view"] = {"examples": large_examples(400), "routes": large_routes(400, 2, experts=4)}
    content["what_if"]["routes"] = large_routes(400, 2, experts=4, seed=1)
    return content


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("explorer")
    return {
        "texts": write_report(parse(comparison()), folder / "texts.html"),
        "images": write_report(parse(stored_images(ROUTERS)), folder / "images.html"),
        "audit": write_audit(report_of(stored_audit()), folder / "audit.html"),
        "large": write_audit(report_of(large()), folder / "large.html"),
    }


def opened(browser: Any, page: Path, settings: str = "") -> Any:
    visit(browser, page)
    if settings:
        browser.execute_script("location.hash = arguments[0]", settings)
    show_explorer(browser)
    return browser


def all_of(browser: Any, selector: str) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
    )
    return found


def token(browser: Any, number: int, pane: int = 0) -> Any:
    return browser.find_elements("css selector", f".x-pane:nth-of-type({pane + 1}) .x-token[data-token='{number}']")[0]


def cells(browser: Any, number: int, pane: int = 0) -> list[str]:
    return [
        cell.get_attribute("textContent") for cell in token(browser, number, pane).find_elements("css selector", ".x-cell")
    ]


def classes(browser: Any, name: str) -> list[int]:
    """The numbers of the tokens of the first pane with a cell, or themselves, of this class."""
    ask = """
    return [...document.querySelector(".x-pane").querySelectorAll(".x-token")].filter((token) =>
      token.matches(arguments[0]) || token.querySelector(arguments[0])).map((token) => Number(token.dataset.token))
    """
    return sorted(set(browser.execute_script(ask, f".{name}")))


def point(browser: Any, number: int, pane: int = 0) -> None:
    """As a mouse does; the driver's own mouse does not reach a page that is emulated as a phone."""
    ask = "arguments[0].dispatchEvent(new PointerEvent('pointerover', { bubbles: true, pointerType: 'mouse' }))"
    browser.execute_script(ask, token(browser, number, pane))


def click(browser: Any, element: Any) -> None:
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", element)
    element.click()


def click_on(browser: Any, selector: str) -> None:
    """Click in the panel, which is drawn again when the mouse leaves a token: an element that was found may be gone."""
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def choose(browser: Any, name: str, value: str) -> None:
    select = browser.find_element("css selector", f".x-bar select[name='{name}']")
    browser.execute_script(
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))", select, value
    )


def table(browser: Any, name: str) -> list[list[str]]:
    ask = """
    return [...document.querySelectorAll(`.${arguments[0]} tr`)].map((row) =>
      [...row.cells].map((cell) => [...cell.childNodes].map((part) => part.textContent).join(" ")));
    """
    found: list[list[str]] = browser.execute_script(ask, name)
    return found


def state(browser: Any) -> str:
    found: str = browser.execute_script("return decodeURIComponent(location.hash)")
    return found


@on_all_screens
@pytest.mark.parametrize("name", ["texts", "images", "audit", "large"])
def test_it_fits_the_screen_and_is_silent(screen: Any, pages: dict[str, Path], name: str) -> None:
    opened(screen, pages[name], "explorer.token=1&explorer.beside=1&explorer.after=noise")
    require_fit(screen, ".x-bar *, .x-token, .x-panel, .x-picture canvas")
    assert screen.find_elements("css selector", "img") == []


@on_all_screens
def test_words_are_whole_unless_they_are_very_long(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["texts"])
    assert all_of(screen, ".x-piece")[1:] == [
        "Re", "turn", "<script>alert(1)</script>", EVIL, "שלום\u202e", "two↵", "lines", "∅", "a" * 500, "end",
    ]  # fmt: skip
    opened(screen, pages["large"])
    tops = """return [...document.querySelectorAll(".x-word:not(.x-long)")].map((word) =>
      new Set([...word.children].map((token) => Math.round(token.getBoundingClientRect().top))).size)"""
    assert set(screen.execute_script(tops)) == {1}
    opened(screen, pages["audit"])
    sizes = "return [...document.querySelectorAll('.x-word')].map((word) => word.children.length)"
    assert screen.execute_script(sizes) == [2, 1, 1, 1]
    assert screen.execute_script(tops) == [1, 1, 1, 1]


def test_a_token_has_a_cell_for_each_layer_in_the_colour_of_its_expert(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["texts"])
    assert [cells(screen, number) for number in range(3)] == [["0", "1"], ["1", "2"], ["2", "3"]]
    ask = "return getComputedStyle(arguments[0].querySelector('.x-cell')).backgroundColor"
    parts = [int(COLOURS[2][at : at + 2], 16) for at in (1, 3, 5)]
    assert screen.execute_script(ask, token(screen, 2)) == f"rgb({parts[0]}, {parts[1]}, {parts[2]})"
    choose(screen, "layer", "1")
    assert [cells(screen, number) for number in range(3)] == [["1"], ["2"], ["3"]]
    assert all_of(screen, ".x-legend .x-chip") == ["0", "1", "2", "3"]
    choose(screen, "colour", "radius")
    assert [classes(screen, f"risk-{level}") for level in range(5)] == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    assert len(all_of(screen, ".x-legend .x-key")) == 5


@on_all_screens
def test_pointing_at_a_token_shows_its_numbers_and_a_click_its_path(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["audit"])
    point(screen, 4)
    assert "“night”, 5 of 5" in screen.find_element("css selector", ".x-panel h3").text
    assert table(screen, "x-token-table") == [
        ["layer", "experts and weights", "margin", "radius"],
        ["0", "00.700 10.300", "0.05", "0.5"],
        ["1", "10.699 20.301", "0.05", "0.5"],
    ]
    assert table(screen, "x-path") == []
    click(screen, token(screen, 4))
    assert table(screen, "x-path") == [["layer", "unperturbed", "noise"], ["0", "0 1", "2 3"], ["1", "1 2", "3 0"]]
    assert all_of(screen, ".x-note") == ["Not compared under words."]
    assert "explorer.token=4" in state(screen)
    click_on(screen, ".x-close")
    assert table(screen, "x-path") == [] and "token" not in state(screen)
    click(screen, token(screen, 1))
    assert all_of(screen, ".x-note") == ["Flips in no layer under words."]


def test_a_perturbation_shows_the_routes_after_it_and_outlines_flips(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["audit"])
    choose(screen, "perturbation", "noise")
    assert classes(screen, "x-flip") == [1, 4] and cells(screen, 4) == ["2", "3"]
    assert "5 tokens, 2 flip under noise" in screen.find_element("css selector", ".x-status").text
    click(screen, screen.find_element("css selector", ".x-bar input[name='flipped']"))
    assert classes(screen, "x-dim") == [0, 2, 3]
    choose(screen, "text", "1")
    assert classes(screen, "x-dim") == [5, 6, 7] and cells(screen, 7) == ["?", "?"]  # the last token is not compared
    settings = ["explorer.after=noise", "explorer.flipped=true", "explorer.text=1", "tab=explorer"]
    assert sorted(state(screen)[1:].split("&")) == settings


def test_the_what_if_has_other_routes_and_no_flips(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["audit"], "explorer.after=noise&explorer.token=4")
    toggle = screen.find_element("css selector", ".x-toggle")
    assert toggle.text == "what if: smooth" and toggle.get_attribute("aria-pressed") == "false"
    assert cells(screen, 0) == ["0", "1"] and len(table(screen, "x-path")) == 3
    click(screen, toggle)
    assert screen.find_element("css selector", ".x-toggle").get_attribute("aria-pressed") == "true"
    assert cells(screen, 0) == ["1", "2"] and classes(screen, "x-flip") == [] and table(screen, "x-path") == []
    assert all_of(screen, ".x-note") == ["Flips in no layer under noise.", "Not compared under words."]
    assert "explorer.router=1" in state(screen)


@on_all_screens
def test_an_expert_has_its_load_its_tokens_and_its_companions(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["audit"], "explorer.token=4")
    click_on(screen, ".x-token-table tbody tr .x-chip")  # expert 0 of layer 0
    assert "Expert 0 of layer 0" in screen.find_element("css selector", ".x-panel h3").text
    facts = dict(zip(all_of(screen, ".x-facts dt"), all_of(screen, ".x-facts dd"), strict=True))
    assert facts == {
        "load, all data": "80.0% of the tokens",
        "load, here": "50.0% of the tokens (4 of 8)",
        "selected together with": "150.0%350.0%",
    }
    # Of the tokens 0, 3, 4 and 7: first for 0 and 4, second for 3 and 7.
    assert table(screen, "x-top") == [
        ["top tokens", "times", "mean weight"],
        ["Hold", "1", "0.700"], ["night", "1", "0.700"], ["text", "1", "0.300"], ["the", "1", "0.300"],
    ]  # fmt: skip
    assert classes(screen, "x-dim") == [1, 2]
    click_on(screen, ".x-close")
    assert classes(screen, "x-dim") == [] and "night" in screen.find_element("css selector", ".x-panel h3").text


def test_a_search_finds_words_over_several_tokens(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["audit"])
    box = screen.find_element("css selector", ".x-bar input[name='search']")
    box.send_keys("oldFAST i")
    assert screen.execute_script("return document.activeElement.name") == "search"
    assert classes(screen, "x-hit") == [0, 1, 2] and classes(screen, "x-dim") == [3, 4]
    assert "3 match “oldFAST i”" in screen.find_element("css selector", ".x-status").text
    assert "explorer.search=oldFAST+i" in state(screen)


@on_all_screens
def test_two_routers_stand_side_by_side_with_their_differences_outlined(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["texts"])
    choose(screen, "beside", "1")
    assert all_of(screen, ".x-pane h3") == ["smoe", "smooth"]
    assert cells(screen, 0) == ["0", "1"] and cells(screen, 0, 1) == ["1", "2"]
    assert classes(screen, "x-differs") == [7, 8, 9]  # the others have the same experts under other numbers
    assert "30% of their routes differ" in screen.find_element("css selector", ".x-status").text
    ask = "return arguments[0].querySelector('.x-cell').className.split(' ')[1]"
    assert [screen.execute_script(ask, token(screen, 0, pane)) for pane in (0, 1)] == ["expert-0", "expert-0"]
    boxes = [pane.rect for pane in screen.find_elements("css selector", ".x-pane")]
    wide = screen.execute_script("return innerWidth") > 1000
    assert (boxes[0]["y"] == boxes[1]["y"]) == wide
    point(screen, 2, 1)
    assert len(screen.find_elements("css selector", ".x-on")) == 2
    assert all_of(screen, ".x-panel h4") == ["smoe", "smooth"] and len(table(screen, "x-token-table")) == 6
    assert state(screen) == "#tab=explorer&explorer.beside=1"


def test_keys_reach_every_token(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["large"])
    assert len(screen.find_elements("css selector", ".x-token[tabindex='0']")) == 1
    now = "return Number(document.activeElement.dataset.token)"

    def press(key: str) -> int:
        screen.switch_to.active_element.send_keys(key)
        return int(screen.execute_script(now))

    screen.find_element("css selector", ".x-bar input[name='flipped']").send_keys(Keys.TAB)
    assert screen.execute_script(now) == 0 and "1 of 400" in screen.find_element("css selector", ".x-panel h3").text
    assert [press(Keys.ARROW_RIGHT), press(Keys.ARROW_RIGHT), press(Keys.ARROW_LEFT)] == [1, 2, 1]
    below = press(Keys.ARROW_DOWN)
    top = "return arguments[0].getBoundingClientRect().top"
    assert screen.execute_script(top, token(screen, below)) > screen.execute_script(top, token(screen, 1))
    assert press(Keys.ARROW_UP) < below
    assert [press(Keys.END), press(Keys.ARROW_RIGHT)] == [399, 399]
    assert press(Keys.ENTER) == 399 and "explorer.token=399" in state(screen)
    assert token(screen, 399).get_attribute("aria-selected") == "true"
    assert press(Keys.ESCAPE) == 399 and "token" not in state(screen)
    assert len(screen.find_elements("css selector", ".x-token[tabindex='0']")) == 1


def test_patches_lie_over_their_picture_row_by_row(screen: Any, pages: dict[str, Path]) -> None:
    opened(screen, pages["images"])
    assert all_of(screen, ".x-picture figcaption") == ["layer 0", "layer 1"] and all_of(screen, ".x-label") == ["3"]
    grey = """return [...document.querySelectorAll(".x-picture canvas")].map((canvas) =>
      [canvas.width, canvas.height, ...canvas.getContext("2d").getImageData(0, 0, 2, 1).data])"""
    assert screen.execute_script(grey) == [[6, 4, 255, 255, 255, 255, 0, 0, 0, 255]] * 2
    boxes = """
    const box = (part) => part.getBoundingClientRect(), whole = box(document.querySelector(".x-patches canvas"));
    return [...document.querySelector(".x-overlay").children].map(box).map(({ left, top, width, height }) => [
      (left - whole.left) / whole.width, (top - whole.top) / whole.height, width / whole.width, height / whole.height]);
    """
    wanted = [[column / 3, row / 2, 1 / 3, 1 / 2] for row in range(2) for column in range(3)]
    assert screen.execute_script(boxes) == [pytest.approx(box, abs=0.02) for box in wanted]
    choose(screen, "picture", "1")
    assert all_of(screen, ".x-label") == ["8, predicted 5"] and cells(screen, 6) == ["2"]
    click(screen, token(screen, 7))
    assert "patch 1, 2, 2 of 6" in screen.find_element("css selector", ".x-panel h3").text


def test_an_address_brings_everything_back_and_a_wrong_one_nothing(screen: Any, pages: dict[str, Path]) -> None:
    settings = (
        "explorer.router=1&explorer.beside=2&explorer.layer=1&explorer.after=noise&explorer.flipped=true&explorer.token=5"
    )
    opened(screen, pages["texts"], f"other=1&{settings}")
    assert all_of(screen, ".x-pane h3") == ["smooth", EVIL] and len(cells(screen, 5)) == 1
    assert classes(screen, "x-flip") == [1, 5] and len(table(screen, "x-path")) == 6
    choose(screen, "layer", "0")
    assert state(screen).startswith("#other=1&") and "explorer.layer=0" in state(screen)
    opened(
        screen,
        pages["audit"],
        "explorer.router=99&explorer.text=-1&explorer.layer=x&explorer.after=magic&explorer.token=1e9",
    )
    assert cells(screen, 0) == ["0", "1"] and classes(screen, "x-dim") == []


def test_it_prints_without_its_controls(screen: Any, pages: dict[str, Path]) -> None:
    visit(screen, pages["audit"])  # not scrolled to: printing draws it
    screen.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        screen.execute_script("dispatchEvent(new Event('beforeprint'))")
        assert len(screen.find_elements("css selector", ".x-token")) == 5
        assert not screen.find_element("css selector", ".x-bar").is_displayed()
        assert screen.find_element("css selector", ".x-text").is_displayed()
    finally:
        screen.execute_script("dispatchEvent(new Event('afterprint'))")
        screen.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_numbers_shown_are_those_of_a_direct_forward(chromium: Any, tmp_path: Path) -> None:
    model, read = tiny("mixtral"), texts(2, words=6)
    report = audit(model, read, tokenizer=tokenizer(), noise=[0.3], perturb=["noise"])
    opened(chromium, write_audit(report, tmp_path / "page.html"))
    inputs = tokenizer()(read, return_tensors="pt")
    with torch.no_grad(), holdfast.trace(model.eval()) as routes:
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    assert report.view is not None
    for number in range(6):
        point(chromium, number)
        rows = table(chromium, "x-token-table")[1:]
        for layer, (routing, row) in enumerate(zip(routes, rows, strict=True)):
            pairs = zip(routing.experts[number].tolist(), routing.weights[number].tolist(), strict=True)
            assert row[1] == " ".join(f"{expert}{weight:.3f}" for expert, weight in pairs)
            best = routing.logits[number].sort(descending=True).values
            assert float(row[2]) == pytest.approx(float(best[1] - best[2]), rel=6e-3)
            certified = report.view.routes.layers[layer].radii
            assert certified is not None and float(row[3]) == certified[number]
    flipped = sum(
        before != after
        for layer, changed in zip(report.view.routes.layers, report.view.routes.perturbed["noise.0.3"].layers, strict=True)
        for token_number, after in zip(changed.tokens, map(set, changed.experts), strict=True)
        if (before := set(layer.experts[token_number])) is not None and token_number < 6
    )
    choose(chromium, "perturbation", "noise.0.3")
    assert flipped and len(chromium.find_elements("css selector", ".x-cell.x-flip")) == flipped
    assert chromium.get_log("browser") == []
