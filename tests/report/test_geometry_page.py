"""The page of a geometry report without a browser: its numbers, what it draws, escapes and refuses."""

from typing import Any

import pytest
from report.geometries import measured, piece, report_of, stored_geometry
from report.tags import Tags

from holdfast.report import render_geometry
from holdfast.report.geometry_page import curve_plots, slice_plots
from holdfast.report.plot_data import Plot
from holdfast.report.slice_plots import COLOURS, cell_colours, set_name, token_name


def plots_of(stored: dict[str, Any]) -> dict[str, Plot]:
    geometry = report_of(stored)
    return {plot.name: plot for plot in [*slice_plots(geometry), *curve_plots(geometry)]}


def test_slices_have_their_cells_lines_points_and_strips() -> None:
    plots = plots_of(stored_geometry())
    names = [f"slice-{kind}-{panel}" for kind in ("boundaries", "tokens") for panel in (0, 1)]
    assert [name for name in plots if name.startswith("slice")] == names
    own, other = plots["slice-tokens-0"].data, plots["slice-tokens-1"].data
    cells = own[0]
    assert cells["z"] == piece("tokens")["cells"] and cells["meta"]["names"] == ["{0, 1}", "{0, 2}", "{1, 2}"]
    assert cells["x0"] == pytest.approx(-0.075) and cells["dx"] == pytest.approx(0.05)
    lines = next(trace for trace in own if trace.get("name", "").startswith("2 experts"))
    assert lines["x"][:4] == [0.0, 0.0, 0.0, None] and lines["text"][0] == "experts 1 and 2 tie"
    points = next(trace for trace in own if trace.get("name", "").startswith("3 tie"))
    assert (points["x"], points["y"], points["text"]) == ([0.0], [0.0], ["experts {0, 1, 2} tie"])
    assert not any(trace["meta"].get("fill") == "strip" for trace in own)
    strip = next(trace for trace in other if trace["meta"].get("fill") == "strip")
    assert strip["z"][0] == [None, 1, 1, None] and strip["z"][2][1] == 3
    names = [trace["name"] for trace in other if trace["meta"].get("ink") == "strip"]
    assert names == [f"+{count} experts" for count in ("1", "2", "3 or more")]
    assert all(trace["meta"]["layer"] == "0" for trace in own + other)  # the other layers have no pictures


def test_neighbouring_cells_have_different_colours() -> None:
    cells = [[row * 8 + column for column in range(8)] for row in range(8)]
    colours = cell_colours(cells, 64)
    assert max(colours) < COLOURS and len(set(colours)) == 4  # a board of squares that touch at corners needs four
    for row in range(8):
        for column in range(8):
            for other in ((row + 1, column), (row, column + 1), (row + 1, column + 1), (row + 1, column - 1)):
                if 0 <= other[0] < 8 and 0 <= other[1] < 8:
                    assert colours[cells[row][column]] != colours[cells[other[0]][other[1]]]


def test_more_neighbours_than_colours_share_one() -> None:
    crowded = [list(range(20)), [20] * 20]
    assert all(0 <= colour < COLOURS for colour in cell_colours(crowded, 21))


def test_curves_are_those_of_the_stored_numbers() -> None:
    plots = plots_of(stored_geometry())
    order, law = plots["ties"].data[:2]
    assert order["y"] == [2.0, pytest.approx(14.0), 90.0] and law["y"] == [1.0, 10.0, 95.0]
    second, law = plots["ties"].data[2:4]
    assert second["y"][0] is None and law["y"][0] is None  # a logarithmic axis has no 0
    upper, lower, walks = plots["hitting"].data[:3]
    assert upper["y"][1] == 6.0 and lower["y"][1] == 4.0 and walks["y"][1] == pytest.approx(5.23)
    own, other, token = plots["along"].data
    assert own["y"] == [0.0, 0.0, None, 50.0, 50.0] and None not in other["y"]  # the jump is a gap
    assert token["x"] == [-0.02] and token["name"] == "the token “night”"
    assert plots["difference"].data[1]["y"] == [50.0, 10.0, 1.0]
    assert {trace["meta"]["layer"] for trace in plots["ties"].data} == {"0", "2"}
    assert [(trace["name"], trace["x"]) for trace in plots["tsne"].data] == [("expert 0", [0.1]), ("expert 2", [0.2, -0.3])]


@pytest.mark.parametrize("text", ["x" * 300, "a\nb\r\nc", ""])
def test_a_token_is_named_on_one_short_line(text: str) -> None:
    name = token_name(text)
    assert len(name) <= 30 and "\n" not in name and "\r" not in name
    assert token_name(None) == "token" and set_name(range(9)) == "{0, 1, 2, 3, 4, 5, …}"


def test_a_report_without_a_what_if_or_without_layers_has_a_page() -> None:
    stored = stored_geometry()
    stored["what_if"] = None
    for layer in stored["layers"]:
        layer["what_if"] = None
        layer["jumps"]["routers"] = layer["jumps"]["routers"][:1]
    for found in stored["layers"][0]["pictures"]["slices"]:
        found["extra"] = found["extra"][:1]
    page = Tags(render_geometry(report_of(stored)))
    assert "What if" not in page.text and "on average." in page.text
    assert not any("slice-tokens-1" in str(attributes) for _, attributes in page.tags)
    stored["layers"] = []
    page = Tags(render_geometry(report_of(stored)))
    assert "No layer of this model has a known geometry" in page.text


def test_one_layer_needs_no_picker() -> None:
    stored = stored_geometry()
    stored["layers"] = [measured(4)]
    page = Tags(render_geometry(report_of(stored)))
    assert not any(attributes.get("id") == "layer" for _, attributes in page.tags)
    assert "layer 4" in page.text
