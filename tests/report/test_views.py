"""Words and patches in the colours of their experts: the data of the page. What is made of it is for the browser's tests."""

import base64
import itertools
import json
import math

import pytest
from report.stored import PIECES, parse, stored, stored_images

from holdfast.report import render
from holdfast.report.expert_views import css_classes, views
from holdfast.report.page_shell import BORDERS, COLOURS, luminance, text_colour_on

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


def test_a_text_has_the_experts_of_the_first_seed() -> None:
    content = stored()
    content["cells"].reverse()
    found = views(parse(content))
    assert [view["router"] for view in found.shown] == [0, 1, 2]
    assert found.shown[1]["pieces"] == PIECES
    assert found.shown[1]["experts"] == [[1, 2, 3, 0, 1, 2], [2, 3, 0, 1, 2, 3]]
    assert found.experts == [0, 1, 2, 3]
    assert "seed 0" in found.caption


def test_an_image_is_kept_once_for_all_routers() -> None:
    found = views(parse(stored_images()))
    assert [[image["pixels"] for image in view["images"]] for view in found.shown] == [[0, 1]] * 3
    assert [(width, height) for width, height, _ in found.pixels] == [(6, 4)] * 2
    assert base64.b64decode(found.pixels[1][2]) == b"\x00\xff" + bytes(22)
    image = found.shown[2]["images"][1]
    assert (image["label"], image["said"], list(image["grid"])) == ("8", "5", [2, 3])
    assert image["experts"][1] == [2, 3, 0, 1, 2, 3]


def test_pieces_travel_as_data_and_nothing_of_them_is_markup() -> None:
    content, usual = stored(["smoe"], seeds=1), stored(["smoe"], seeds=1)
    content["cells"][0]["view"] = {"kind": "text", "pieces": EVIL, "experts": [[0] * len(EVIL)]}
    usual["cells"][0]["view"] = {"kind": "text", "pieces": ["a"], "experts": [[0]]}

    page = render(parse(content))
    data = page.split('id="figures">')[1].split("</script>")[0]
    assert json.loads(data)["views"][0]["pieces"] == EVIL
    assert "<" not in data
    assert page.count("<") == render(parse(usual)).count("<")


def test_experts_of_one_colour_have_another_border() -> None:
    looks = [css_classes(expert) for expert in range(len(COLOURS) * len(BORDERS))]
    assert len(set(looks)) == len(looks)
    assert css_classes(3) == "expert-3 border-0" and css_classes(19) == "expert-3 border-1"


@pytest.mark.parametrize("colour", COLOURS)
def test_words_can_be_read_on_the_colour_of_their_expert(colour: str) -> None:
    dark, light = sorted((luminance(colour), luminance(text_colour_on(colour))))
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
