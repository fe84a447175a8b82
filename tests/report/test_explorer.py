"""The data of the Explorer. What the script draws of it is for the browser's tests."""

import base64
import itertools
import json
import math
from typing import Any

import pytest
from report.audited import report_of, stored_audit
from report.routes import large_examples, large_routes, stored_routes
from report.stored import LAYERS, PIECES, parse, stored, stored_images

from holdfast.report import explorer, render, render_audit
from holdfast.report.explorer import audit_explorer, comparison_explorer
from holdfast.report.page_shell import COLOURS, luminance, with_text_colour

EVIL = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--",
    "\"'`&amp;",
    "שלום\u202e",
    "two\nlines\r\n",
    "",
    "a" * 5000,
    "{{ 7 * 7 }}",
    "\u2028\x00\ufffd",
]
MOST = 8_000_000  # bytes of a page


def test_a_comparison_has_the_routes_of_the_first_seed_and_one_text_for_all() -> None:
    content = stored()
    content["cells"].reverse()
    found = comparison_explorer(parse(content))
    assert [router["name"] for router in found["routers"]] == ["smoe", "smooth", "ac"]
    assert found["sets"] == [[{"pieces": PIECES[:4], "tokens": 4}, {"pieces": PIECES[4:], "tokens": 4}]]
    assert [router["set"] for router in found["routers"]] == [0, 0, 0] and not found["what_if"]
    first = found["routers"][1]["layers"][0]
    assert first["routes"] == stored_routes(8, LAYERS, 1)["layers"][0]["experts"]
    assert (first["experts"], first["load"], first["core"]) == (4, [70.0, 60.0, 40.0, 30.0], 2)


def test_routers_with_other_texts_have_a_set_of_their_own() -> None:
    content = stored()
    for cell in content["cells"]:
        if cell["router"] == "ac":
            cell["view"]["examples"][0]["pieces"] = ["an", "other", " te", "xt"]
    found = comparison_explorer(parse(content))
    assert [router["set"] for router in found["routers"]] == [0, 0, 1] and len(found["sets"]) == 2


def test_a_picture_is_kept_once_and_what_is_predicted_by_router() -> None:
    content = stored_images()
    content["cells"][1]["view"]["examples"][0]["picture"]["said"] = "9"
    found = comparison_explorer(parse(content))
    (pictures,) = found["sets"]
    assert [(one["picture"]["width"], one["picture"]["height"], one["tokens"]) for one in pictures] == [(6, 4, 6)] * 2
    assert base64.b64decode(pictures[1]["picture"]["pixels"]) == b"\x00\xff" + bytes(22)
    assert [router["said"] for router in found["routers"]] == [["3", "5"], ["9", "5"], ["3", "5"]]


def test_an_audit_has_the_model_and_the_what_if() -> None:
    found: Any = audit_explorer(report_of(stored_audit()))
    assert [router["name"] for router in found["routers"]] == ["tiny-mixtral", "smooth"] and found["what_if"]
    assert found["routers"][0]["layers"][0]["load"] == [80.0, 60.0, 60.0, 0.0]
    assert found["routers"][1]["layers"][0]["load"] is None  # an audit does not store that of the what-if
    assert found["routers"][0]["perturbed"]["noise"]["layers"][1]["tokens"] == [1, 4]
    content = stored_audit()
    del content["view"]
    assert audit_explorer(report_of(content)) is None
    assert 'id="explorer"' not in render_audit(report_of(content))


def large(routers: int, tokens: int, layers: int, texts: int = 1) -> dict[str, Any]:
    content = stored([f"router {number}" for number in range(routers)], seeds=1)
    for number, cell in enumerate(content["cells"]):
        one = {**cell["clean"]["routing"]["layers"][0], "experts": 64}
        one["load"] = {"percent": [3.125] * 64, "cv": 0.0, "dead": []}
        cell["clean"]["routing"]["layers"] = [{**one, "layer": layer} for layer in range(layers)]
        cell["view"] = {"examples": large_examples(tokens, texts), "routes": large_routes(tokens, layers, seed=number)}
    return content


def test_a_page_of_8_layers_and_2000_tokens_is_whole_and_below_8_megabytes() -> None:
    page = render(parse(large(1, 2000, 8)))
    assert len(page.encode()) < MOST
    found = json.loads(page.split('id="figures">')[1].split("</script>")[0])["explorer"]
    assert len(found["sets"][0][0]["pieces"]) == 2000 and len(found["routers"][0]["layers"]) == 8


def test_many_routers_share_the_page_and_keep_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "MOST_BYTES", 100_000)
    content = large(3, 400, 4, texts=8)
    found = comparison_explorer(parse(content))
    (texts,) = found["sets"]
    assert 1 < len(texts) < 8 and {text["tokens"] for text in texts} == {50}
    tokens = 50 * len(texts)
    for router in found["routers"]:
        for layer in router["layers"]:
            assert {len(layer[name]) for name in ("routes", "weights", "margins", "radii")} == {tokens}
        for perturbed in router["perturbed"].values():
            assert perturbed["compared"] == [[0, tokens]]
            assert all(token < tokens for layer in perturbed["layers"] for token in layer["tokens"])
    assert len(json.dumps(found["routers"], separators=(",", ":"))) < 110_000
    one = comparison_explorer(parse(large(1, 1000, 4)))  # one text: its beginning
    assert 100 < one["sets"][0][0]["tokens"] < 1000


def test_pieces_travel_as_data_and_nothing_of_them_is_markup() -> None:
    content, usual = stored(["smoe"], seeds=1), stored(["smoe"], seeds=1)
    for some, pieces in ((content, EVIL), (usual, ["a"] * len(EVIL))):
        some["cells"][0]["view"] = {"examples": [{"pieces": pieces}], "routes": stored_routes(len(EVIL))}
    page = render(parse(content))
    data = page.split('id="figures">')[1].split("</script>")[0]
    assert json.loads(data)["explorer"]["sets"][0][0]["pieces"] == EVIL
    assert "<" not in data
    assert page.count("<") == render(parse(usual)).count("<")


@pytest.mark.parametrize("colour", COLOURS)
def test_numbers_can_be_read_on_the_colour_of_their_expert(colour: str) -> None:
    dark, light = sorted((luminance(colour), luminance(with_text_colour(colour)["ink"])))
    assert (light + 0.05) / (dark + 0.05) > 4.5


def test_sixteen_experts_can_be_told_apart() -> None:
    """By their distance in CIELAB, where 2 can just be seen, and from the greys of the images."""

    def lab(colour: str) -> tuple[float, float, float]:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        white = (
            (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
            luminance(colour),
            (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
        )
        x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in white)
        return 116 * y - 16, 500 * (x - y), 200 * (y - z)

    assert len(COLOURS) == 16
    assert min(math.dist(lab(one), lab(other)) for one, other in itertools.combinations(COLOURS, 2)) > 25
    assert min(math.hypot(*lab(colour)[1:]) for colour in COLOURS) > 25
