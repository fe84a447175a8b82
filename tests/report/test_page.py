"""The page without a browser: what it says, what it escapes, what it may fetch."""

import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from report.browsing import EVIL
from report.stored import parse, stored, stored_costs, stored_images
from report.tags import Tags

from holdfast.report import render
from holdfast.report.comparison_page import how, made
from holdfast.report.comparison_tables import metrics_table
from holdfast.report.page_shell import THEMES, luminance
from holdfast.report.plot_data import MARKS, SYMBOLS, WIDTH, wrapped_label
from holdfast.report.plots import plots
from holdfast.train import load_recipe
from holdfast.train.results import POINTS, Results, TrainingCurve


def page_of(content: dict[str, Any]) -> Tags:
    return Tags(render(parse(content)))


def test_the_cost_of_the_attack_is_in_the_verdict_the_table_and_a_plot() -> None:
    content = stored_costs()
    page = page_of(content)
    columns = [attributes["data-column"] for tag, attributes in page.tags if tag == "td"]
    assert columns.count("cost of the attack on untouched words") == columns.count("difference to equal compute") == 4
    for value in ("+2.30%", "smoe, top 3: ", "2.00% to 2.30%"):
        assert value in page.text
    (plot,) = [plot for plot in plots(parse(content)) if plot.name == "cost"]
    assert [trace["x"][0] for trace in plot.data] == pytest.approx([2.0, 2.1, 2.2, 2.3])
    assert all(trace["error_x"]["array"][0] > 0 for trace in plot.data)


def test_a_page_is_headed_by_the_name_of_its_own_data() -> None:
    content = stored_images()
    content["run"]["data"] |= {"name": "my images", "about": "60 images of 3 classes, 40 pixels per side; <b>mine</b>"}
    content["run"]["recipe"]["task"] = "images"
    assert "Holdfast: a small model, on my images (60 images of 3 classes, 40 pixels per side)" in render(parse(content))
    content["run"]["recipe"]["task"] = "text"
    assert "Holdfast: a small model, on my images<" in render(parse(content))


def test_results_of_images_do_not_talk_of_words() -> None:
    page = page_of(stored_images())
    columns = [attributes["data-column"] for tag, attributes in page.tags if tag == "td"]
    assert "clean error, %" in columns and "attacked error, %" in columns
    assert "lower is better" in page.text
    assert "PGD, l_inf 8/255, 20 steps" in page.text
    shown = page.text + page.scripts[1] + " ".join(filter(None, columns))
    for word in ("perplexity", "word", "text", "to be predicted"):
        assert not re.search(rf"\b{word}", shown.replace('"text":', "").replace("ticktext", ""), re.IGNORECASE), word


def test_figures_of_untouched_words_are_shown_only_where_they_are_stored() -> None:
    columns = [[attributes["data-column"] for tag, attributes in page_of(content).tags if tag == "td"]
               for content in (stored(), stored_images())]  # fmt: skip
    for text in ("clean", "attacked"):
        assert [f"{text}, untouched words" in found for found in columns] == [True, False]


def test_a_metric_without_a_figure_under_attack_has_no_column_for_it() -> None:
    content = stored()
    content["run"]["metrics"] = [{"name": name, "about": "", "better": "lower"} for name in ("blind", "prior")]
    for row in content["rows"]:
        row["metrics"] = {"blind": {"clean": 0.5, "attacked": 0.75}, "prior": {"clean": 0.25}}
    columns = metrics_table(parse(content)).columns
    assert "blind, attacked, difference" in columns and not any("prior, attacked" in name for name in columns)


def test_rows_have_the_same_columns_although_routers_differ() -> None:
    content = stored()
    for cell in content["cells"][::3]:  # the baseline's
        for layer in cell["clean"]["routing"]["layers"]:
            layer["near_ties"]["strips"] = []
    page = page_of(content)
    assert page.text.count("near-ties (0.01)") == 1
    columns = [attributes["data-column"] for tag, attributes in page.tags if tag == "td"]
    assert columns.count("near-ties (0.01)") == 3


def test_every_plot_is_there_with_every_router() -> None:
    made = {plot.name: plot for plot in plots(parse(stored()))}
    compared, of_baseline = {"differences", "training", "validation"}, {"training-level", "validation-level"}
    of_all = {"every-attack", "consistency", "price", "clean-attacked", "load", "entropy", "near-ties"}
    assert set(made) == compared | of_baseline | of_all
    for name, plot in made.items():
        routers = {1, 2} if name in compared else {0} if name in of_baseline else {0, 1, 2}
        assert {trace["meta"]["router"] for trace in plot.data} == routers, name


def test_single_seeds_stand_beside_the_means_of_clean_and_attacked_figures() -> None:
    plot = next(plot for plot in plots(parse(stored())) if plot.name == "clean-attacked")
    clean, attacked, line, *means = [trace for trace in plot.data if trace["meta"]["router"] == 1]
    assert (clean["x"], attacked["x"]) == ([183.5, 184.5, 185.5], [190.25, 191.25, 192.25])
    assert line["x"] == [mean["x"][0] for mean in means] == [181.375, 188.125]


def test_load_is_ranked_and_relative_to_an_even_load() -> None:
    load = next(plot for plot in plots(parse(stored())) if plot.name == "load")
    first = next(trace for trace in load.data if trace["meta"] == {"router": 0, "layer": "all"})
    assert first["x"] == [1, 2, 3, 4]
    assert first["y"] == pytest.approx([1.6, 1.2, 0.8, 0.4])


def test_a_long_training_curve_is_thinned_by_means() -> None:
    content = stored(["smoe"], seeds=1)
    curve = TrainingCurve.of([{"step": step + 1, "loss": step % 2} for step in range(1000)])
    content["cells"][0]["curve"] = vars(curve)
    plot = next(plot for plot in plots(parse(content)) if plot.name == "training-level")
    assert len(plot.data[0]["x"]) == POINTS and "the mean of 5 steps" in plot.caption
    assert plot.data[0]["y"] == curve.losses == pytest.approx([2 / 5, 3 / 5] * (POINTS // 2))
    broken: list[dict[str, Any]] = [{"step": 1, "loss": None}, {"step": 2, "loss": 3.0}, {"step": 2, "eval_loss": 9.0}]
    assert TrainingCurve.of(broken) == TrainingCurve([1, 2], [None, 3.0], 1)


def test_long_names_are_folded_between_words_and_nothing_is_lost() -> None:
    assert wrapped_label("smooth, attacked") == "smooth, attacked"
    assert wrapped_label("symphony+similarity, top 3, clean") == "symphony+similarity, <br>top 3, clean"
    for name in (EVIL, "a" * 50, " + ,, + a", "attention-posterior+smooth"):
        lines = wrapped_label(name).split("<br>")
        assert html.unescape("".join(lines)) == name
        assert all(len(html.unescape(line).rstrip()) <= WIDTH for line in lines)


def test_numbers_that_broke_are_dashes_and_gaps() -> None:
    content = stored()
    content["rows"][2]["clean"] = content["cells"][2]["clean"]["figure"] = float("nan")
    content["cells"][2]["curve"]["losses"][3] = float("inf")
    content["cells"][2]["trials"]["typos"]["figure"] = float("nan")
    content["cells"][2]["consistency"]["layers"][0] = float("nan")
    content["cells"][2]["snapshots"]["layers"][0]["fluctuation"][1] = float("nan")
    content["cells"][2]["snapshots"]["layers"][0]["graphs"][1][2][3] = float("nan")
    content["cells"][2]["snapshots"]["layers"][0]["states"][1]["entropy"] = float("nan")
    content["cells"][2]["validation"]["losses"][1] = float("nan")
    page = page_of(content)
    assert "–" in page.text  # noqa: RUF001
    json.loads(page.scripts[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_every_router_of_a_round_of_colours_has_its_own_mark() -> None:
    assert len(MARKS) == len(SYMBOLS) == len(THEMES["light"]["routers"]) == len(THEMES["dark"]["routers"])


@pytest.mark.parametrize("theme", THEMES)
def test_colours_can_be_told_from_their_ground(theme: str) -> None:
    """WCAG 2.1 asks for a contrast of 3 for marks and 4.5 for text."""

    def contrast(colour: str) -> float:
        light, dark = sorted((luminance(colour), luminance(THEMES[theme]["ground"])), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    assert min(contrast(THEMES[theme][name]) for name in ("ink", "muted")) > 4.5
    assert min(contrast(colour) for colour in THEMES[theme]["routers"]) > 3


def test_the_checksum_is_that_of_the_file(tmp_path: Path) -> None:
    parse(stored()).save(tmp_path / "results.json")
    checksum = hashlib.sha256((tmp_path / "results.json").read_bytes()).hexdigest()
    assert checksum in Tags(render(Results.load(tmp_path))).text


def test_a_column_shows_dropped_experts_only_if_a_router_has_a_limit() -> None:
    content = stored()
    assert "dropped experts" not in page_of(content).text
    for cell in content["cells"]:
        if cell["router"] == "ac":
            for layer in cell["clean"]["routing"]["layers"]:
                layer["dropped"] = {"share": 0.125}
    shown = page_of(content)
    assert "dropped experts" in shown.text and "12.50%" in shown.text


def test_the_title_names_the_data_in_use_and_not_those_of_the_recipe() -> None:
    content = stored()
    content["run"]["recipe"] |= {"about": load_recipe("labels-tiny").about, "task": "labels"}
    content["run"]["data"] = {"name": "trec", "about": "questions, what is asked for; 6 classes"}
    assert parse(content).title == "a BERT of 2 layers, of a size for two cores, on trec (questions, what is asked for)"


def test_the_method_lists_only_keys_that_differ_from_the_defaults() -> None:
    content = stored()
    recipe = load_recipe("tiny", {"training.learning_rate": 0.0031, "attack.rate": 0.03})
    content["run"]["recipe"] = recipe.describe()
    shown = how(parse(content))["Recipe, where it differs from the defaults"]
    assert shown["training.learning_rate"] == "0.0031" and shown["attack.rate"] == "0.03"
    assert shown["model.family"] == "llama" and shown["model.config.hidden_size"] == "64"
    assert not {"training.accumulate", "training.augment.pad", "losses.z", "data.label", "attack.samples"} & shown.keys()


def test_the_line_of_origin_has_only_what_is_stored() -> None:
    content = stored()
    assert made(parse(content)) == []
    for cell, day in zip(content["cells"], (17, 18, 17) * 3, strict=True):
        cell["origin"] = {"device": "CPU, x86_64", "finished": f"2026-11-{day}T15:04:05+00:00", "seconds": 400.0}
    assert made(parse(content)) == ["18 November 2026, 15:04 UTC", "CPU, x86_64", "1 h for 9 cells"]
