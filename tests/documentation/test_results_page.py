"""docs/results.md, its pictures and the numbers that other pages quote come from the files of results/."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import results_claims
import results_page
import yaml
from results_certified import certified, certified_difference, reports
from results_claims import published
from results_missing import Asked, asked_for, missing
from results_numbers import columns, difference, level
from results_page import DOCS, LEDGER
from results_robust import AUDITED, Judged, holm, judged, p_value, recommendation, with_audits
from scipy.stats import ttest_1samp

import holdfast
from holdfast.metrics import Difference
from holdfast.train.ledger import LARGEST_CELL, LedgerCell, read_ledger
from holdfast.train.results import Row, TrainingCurve, ValidationCurve
from holdfast.train.task import Measure

ERROR = Measure("error, %", "share of wrong answers, in percent", "PGD")
CLEAN = {"smoe": [20.0, 22.0, 21.0], "smooth": [19.0, 20.5, 20.5]}  # of three seeds


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


# Hand-made cells


def cell(router: str, seed: int, clean: float, *, data: str = "pictures", pgd: float = 60.0, **result: Any) -> LedgerCell:
    """Return the cell of a classifier of images with these errors."""
    routing = {"layers": [], "overall": {"experts_per_token": {"mean": 2.0}, "load": {"std": 1.0}}}
    recipe = {
        "task": "images",
        "model": {"family": "vit", "config": {"num_hidden_layers": 2, "hidden_size": 8}},
        "training": {"steps": 30, "batch": 4, "learning_rate": 0.001},
        "sparse": {"experts": 4, "k": 2},
    }
    return LedgerCell(
        experiment={"recipe": recipe, "data": {"name": data, "about": "ours"}, "attack": {"attack": "PGD"}},
        measure=ERROR,
        cell={"name": router},
        seed=seed,
        curve=TrainingCurve([1.0, 15.0, 30.0], [3.0, 2.0, 1.0 + seed / 10], 1),
        result={
            "router": router,
            "seed": seed,
            "parameters": 10,
            "first_batch": "a",
            "last_batch": "b",
            "clean": {"figure": clean, "routing": routing},
            "attacked": {"figure": pgd},
            "trials": {"PGD": {"figure": pgd, "budget": 2 / 255, "norm": "linf", "steps": 20, "examples": 9}},
            "consistency": {"what": "noise", "layers": [0.9 + seed / 100]},
            **result,
        },
        origin={"device": "a device", "versions": {"torch": "2"}, "commit": "c"},
    )


def stored(results: Path, *cells: LedgerCell) -> Path:
    for number, one in enumerate(cells):
        path = results / "ledger" / one.folder / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        one.save(path)
    return results


def three_seeds(errors: Mapping[str, Sequence[float]] = CLEAN, **more: Any) -> list[LedgerCell]:
    return [cell(router, seed, error, **more) for router, each in errors.items() for seed, error in enumerate(each)]


def row_of(page: str, router: str, column: str) -> list[str]:
    """Return the cells of a router in the first table with this column, from that column on."""
    lines = page.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| router") and f"| {column} |" in line)
    heads = lines[start].strip("| ").split(" | ")
    row = next(line for line in lines[start:] if line.startswith(f"| `{router}`"))
    return row.strip("| ").split(" | ")[heads.index(column) :]


def test_a_difference_is_paired_by_seed(tmp_path: Path) -> None:
    page = results_page.page(stored(tmp_path, *three_seeds()), Asked())["results.md"]
    differences = [mine - theirs for mine, theirs in zip(CLEAN["smooth"], CLEAN["smoe"], strict=True)]
    low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
    shown = row_of(page, "smooth", "clean error, %")
    assert shown[:2] == ["20.00", f"{statistics.fmean(differences):+.2f} ({low:+.2f} to {high:+.2f})"]
    assert row_of(page, "smoe", "clean error, %")[:2] == ["21.00", "baseline"]
    assert "- *PGD*: 9 test examples, within 2/255 (l_inf), 20 steps" in page


def test_a_router_is_compared_with_the_baseline_of_the_same_training(tmp_path: Path) -> None:
    trained = {f"{router}{{method=pgd}}": [error + 10 for error in errors] for router, errors in CLEAN.items()}
    trained["smooth{method=pgd}"] = [error - 3 for error in trained["smoe{method=pgd}"]]
    cells = three_seeds({**CLEAN, **trained, "ac{method=fast}": [1.0, 2.0, 3.0]})
    page = results_page.page(stored(tmp_path, *cells), Asked())["results.md"]
    assert row_of(page, "smooth{method=pgd}", "clean error, %")[:2] == ["28.00", "**-3.00 (-3.00 to -3.00)**"]
    assert row_of(page, "smoe{method=pgd}", "clean error, %")[1] == "baseline"
    assert row_of(page, "ac{method=fast}", "clean error, %")[:2] == ["2.00", "-"]


def test_few_seeds_and_lone_routers_have_no_intervals_and_no_verdicts(tmp_path: Path) -> None:
    for names, seeds in (("smoe", 1), ("symphony", 1), ("smoe,smooth", 1), ("smoe,ac", 2)):
        routers = names.split(",")
        cells = [cell(router, seed, 20.0 + seed) for router in routers for seed in range(seeds)]
        page = results_page.page(stored(tmp_path / f"{names}-{seeds}", *cells), Asked())["results.md"]
        section = page.partition("## pictures")[2].partition("## Which")[0]
        assert all(f"| `{router}` | {seeds} |" in section for router in routers)
        assert " to +" not in section and "**" not in section
        assert "**None is recommended yet**" in page


def test_seeds_without_the_baseline_and_routers_that_see_later_tokens_are_not_compared(tmp_path: Path) -> None:
    cells = [*three_seeds({name: [1.0, 2.0, 2.0] for name in ("smoe", "ac")}), cell("smooth", 7, 5.0)]
    cells += [cell("capacity", seed, 3.0, sees_later_tokens=True) for seed in range(2)]
    page = results_page.page(stored(tmp_path, *cells), Asked())["results.md"]
    assert row_of(page, "smooth", "clean error, %")[:2] == ["5.00", "-"]
    assert row_of(page, "capacity", "clean error, %")[:2] == ["3.00", "-"]
    assert "| `capacity`, sees later tokens, not compared | 2 |" in page and "it leaks" in page


def test_titles_tell_experiments_of_the_same_data_apart(tmp_path: Path) -> None:
    first, second, other = cell("smoe", 0, 1.0), cell("smoe", 0, 2.0), cell("smoe", 0, 3.0, data="digits")
    second.experiment["recipe"]["training"]["schedule"] = "cosine"
    page = results_page.page(stored(tmp_path, first, second, other), Asked())["results.md"]
    titles = ["digits, 30 steps", "pictures, 30 steps", "pictures, 30 steps, cosine rate"]
    assert re.findall("## (.*30 steps.*)", page) == titles


def test_a_curve_on_held_out_data_is_drawn_where_cells_have_one(tmp_path: Path) -> None:
    cells = three_seeds()
    page = results_page.page(stored(tmp_path / "without", *cells), Asked())
    assert any("Training loss minus that of smoe" in picture for picture in page.values())
    for one in cells:
        one.validation.steps.extend([10, 20])
        one.validation.losses.extend([2.0, 1.0 - (one.router == "smooth")])
    page = results_page.page(stored(tmp_path / "with", *cells), Asked())
    (picture,) = (content for path, content in page.items() if path.endswith("curves.svg"))
    assert "Held-out loss minus that of smoe" in picture


def test_claims_are_of_a_task_and_have_their_published_figure(tmp_path: Path) -> None:
    claims = yaml.safe_load((results_page.SITE / "claims.yaml").read_text())
    assert all(published(claim) is not None for claim in claims if "figure" in claim)
    errors = {"smoe": [20.0, 22.0, 21.0], "ac": [19.0, 21.0, 20.0]}
    (experiment,) = read_ledger(stored(tmp_path, *three_seeds(errors)) / "ledger")
    (section,), pictures = results_claims.claims([experiment], {experiment.name: "a title"}, "folder")
    found = section.splitlines()[-2:]
    assert [line.split(" | ")[0] for line in found] == [
        "| ACMoE: it classifies images better (`ac`, pictures)",
        "| ACMoE: it classifies images attacked by PGD better (`ac`, pictures)",
    ]
    assert "accuracy on ImageNet: 76.31 against 76.10" in found[0] and found[0].endswith("| 3 | **confirmed** |")
    assert found[1].endswith("| 3 | not shown |")
    assert all(path in section for path in pictures) and len(pictures) == 2


def test_the_picture_of_a_claim_has_the_claimed_direction_on_the_right(tmp_path: Path) -> None:
    errors = {"smoe": [20.0, 22.0, 21.0], "ac": [19.0, 20.0, 20.0]}  # 4/3 of 21% fewer errors; the paper: +0.21 of 76.10%
    (experiment,) = read_ledger(stored(tmp_path, *three_seeds(errors)) / "ledger")
    _, pictures = results_claims.claims([experiment], {experiment.name: "a title"}, "folder")
    drawn = next(content for content in pictures.values() if "it classifies images better" in content)
    middle = results_claims.WIDTH / 2
    found = [float(x) - middle for x in re.findall(r'<circle class="\w+" cx="([\d.]+)"', drawn)]
    (paper,) = (float(x) - middle for x in re.findall(r'<path class="fill0" d="M([\d.]+) ', drawn))
    percents = [100 / 21, 200 / 21, 100 / 21, 400 / 3 / 21]  # the seeds, and their mean
    unit = found[-1] / percents[-1]
    assert found == pytest.approx([unit * percent for percent in percents], abs=0.2) and unit > 0
    assert paper == pytest.approx(unit * 21 / 76.10, abs=0.2)


# Robustness


def test_holms_correction_is_that_of_the_definition() -> None:
    values = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    assert holm(values) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    draw = np.random.default_rng(0).random(7) ** 2
    ordered = sorted(draw)
    for name, corrected in holm({str(place): value for place, value in enumerate(draw)}).items():
        rank = ordered.index(draw[int(name)])
        assert corrected == pytest.approx(max(min(1.0, (7 - place) * ordered[place]) for place in range(rank + 1)))


def test_p_is_that_of_students_t(tmp_path: Path) -> None:
    (experiment,) = read_ledger(stored(tmp_path, *three_seeds()) / "ledger")
    found = difference(experiment, experiment.rows[1], columns(experiment)["clean"])
    differences = [mine - theirs for mine, theirs in zip(CLEAN["smooth"], CLEAN["smoe"], strict=True)]
    assert p_value(found) == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert p_value(Difference(1.0, 0.0, 2.0, 5)) == pytest.approx(0.05) == p_value(Difference(-1.0, -2.0, 0.0, 5))
    assert p_value(None) is None and p_value(Difference(1.0, None, None, 2)) is None


def audit(router: str, seed: int, flips: float, clean: float, **overall: float) -> dict[str, Any]:
    numbers = {"flips.noise.0.01": flips, "prediction_flips.model.bf16": 0.5, **overall}
    how = {"tokens": 9, "settings": {"budget": 0.01}, "certified": {"0.01": 0.7}}
    return {"router": router, "seed": seed, "clean": clean, "overall": numbers, **how}


def test_audits_stand_beside_the_cells_of_their_seeds(tmp_path: Path) -> None:
    results = stored(tmp_path, *three_seeds({"smoe": [1.0, 2.0, 3.0, 4.0], "smooth": [1.0, 2.0, 3.0, 4.0]}))
    (experiment,) = read_ledger(results / "ledger")
    flips = {"smoe": [0.10, 0.12, 0.11], "smooth": [0.05, 0.06, 0.07]}
    for router, values in flips.items():
        for seed, value in enumerate([*values, 0.9]):  # the fourth is of another training of the cell
            path = results / "audits" / experiment.name / f"{router}-seed{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(audit(router, seed, value, clean=min(seed + 1.0, 3.0))))
    page = results_page.page(results, Asked())["results.md"]
    differences = [mine - theirs for mine, theirs in zip(flips["smooth"], flips["smoe"], strict=True)]
    low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
    mean = statistics.fmean(differences)
    section = page.partition("## Where robustness shows")[2]
    assert row_of(section, "smoe", "flips, noise 1%, %")[0] == "11.0"
    shown = row_of(section, "smooth", "flips, noise 1%, %")[0]
    assert shown.strip("*") == f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    assert row_of(section, "smooth", "certified, %")[0] == "+0.0 (+0.0 to +0.0)"
    assert "Audits: seeds 0, 1, 2, 9 tokens" in section
    found = level(with_audits(experiment, results / "audits"), experiment.rows[0], AUDITED["rounding"])
    assert found is not None and (found.mean, found.seeds) == (0.5, 3)


def both_better(data: str) -> list[LedgerCell]:
    """Return the cells of an experiment in which smooth is better under PGD and keeps more routes, and as good without."""
    cells = []
    for seed in range(5):
        for router, pgd, kept in (("smoe", 60.0, 0.9), ("smooth", 50.0, 0.95)):
            jitter = 0.001 * seed * (router == "smooth")
            shares = {"what": "noise", "layers": [kept + jitter]}
            cells.append(cell(router, seed, 20.0 - jitter, data=data, pgd=pgd + jitter, consistency=shares))
    return cells


def test_a_router_is_recommended_on_two_data_sets_with_seeds_that_were_fixed(tmp_path: Path) -> None:
    experiments = read_ledger(stored(tmp_path, *both_better("digits"), *both_better("pictures")) / "ledger")
    asked = {(one.name, router): range(5) for one in experiments for router in ("smoe", "smooth")}
    titles = {one.name: one.name for one in experiments}

    def judge(asked: Mapping[tuple[str, str], Sequence[int]], count: int = 2) -> list[Judged]:
        return [found for one in experiments[:count] for found in judged(one, asked)]

    met = judge(asked)
    assert [set(one.better) for one in met] == [{"attacks on pixels", "noise"}] * 2 and not any(one.lacks for one in met)
    assert recommendation(met, titles).startswith("**`smooth` is recommended**: it meets the rule on digits and pictures")
    assert "on a second it is not: `smooth` (digits)" in recommendation(judge(asked, 1), titles)
    unfixed = judge({})
    assert [one.lacks for one in unfixed] == [["new cells with seeds fixed beforehand"]] * 2
    assert recommendation(unfixed, titles).startswith("**None is recommended yet**: the rule is met on no data set.")
    more = judge({key: range(6) for key in asked})  # one seed is missing
    assert [one.lacks for one in more] == [["new cells with seeds fixed beforehand"]] * 2
    never = judge({key: seeds for key, seeds in asked.items() if key[1] == "smoe"})  # a router that was not asked for
    assert [one.lacks for one in never] == [["new cells with seeds fixed beforehand"]] * 2
    fewer = judge({key: range(5 if key[1] == "smoe" else 3) for key in asked})  # the others were added later
    assert not any(one.lacks for one in fewer) and fewer[0].end != met[0].end


def test_a_worse_clean_figure_or_one_kind_is_not_enough(tmp_path: Path) -> None:
    cells = [*three_seeds({"smoe": [20.0, 21.0, 22.0], "smooth": [20.6, 21.6, 22.6]})]
    (experiment,) = read_ledger(stored(tmp_path, *cells) / "ledger")
    (found,) = judged(experiment, {(experiment.name, router): range(3) for router in CLEAN})
    assert found.lacks == ["an upper end below 0.5 points", "2 more kinds of robustness"]


# Certified accuracy, and what is missing


def test_certified_accuracy_is_counted_from_the_stored_examples(tmp_path: Path) -> None:
    radii = {"smoe": [0.0, 0.2, 0.6, 0.3], "smooth": [0.3, 0.4, 0.6, 0.7]}
    settings = {"sigma": 0.25, "samples": 100, "examples": 4, "radii": [0.25], "steps": 2, "votes": 10}
    for router, values in radii.items():
        for seed in range(3):
            examples = {
                "number": [0, 1, 2, 3],
                "label": [1, 1, 1, 1],
                "chosen": [1, 1, 1, 0],
                "hits": [50, 90, 100, 100],
                "radius": values,
                "attacked": [[[0.25, 4, False]], [[0.25, 9, True]], [[0.25, 10, True]], [[0.25, 3, False]]],
            }
            path = tmp_path / "folder" / f"{router}-seed{seed}-sigma0.25.json"
            path.parent.mkdir(exist_ok=True)
            how = {"router": router, "seed": seed, "clean": 20.0, "settings": settings, "unit": "of a pixel", "data": {}}
            path.write_text(json.dumps({**how, "examples": examples}))
    clean = {("folder", router, seed): 20.0 for router in radii for seed in range(3)}
    assert not list(reports(tmp_path, dict.fromkeys(clean, 20.1)))  # of another training of the cells
    ((name, report),) = reports(tmp_path, clean)
    assert name == "folder" and len(report.models) == 6
    lines = list(certified(tmp_path, {"folder": "pictures"}, clean))
    page = "\n".join(lines)
    # Right and certified beyond the radius: of smoe one example of four, of smooth two; the last is wrong.
    assert row_of(page, "smoe", "radius 0.25")[0] == "25.0 [50.0]" and row_of(page, "smoe", "radius 0")[0] == "50.0"
    assert row_of(page, "smooth", "radius 0.25")[0].startswith("75.0 [50.0], +50.0 (")
    assert row_of(page, "smoe", "abstains")[0] == "25.0"
    found = certified_difference(report, "smooth", 0.25)
    assert found is not None and (found.mean, found.seeds) == (50.0, 3)
    assert certified_difference(report, "smoe", 0.25) is None


def test_everything_that_is_asked_for_and_not_stored_is_listed_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    asked = asked_for(tmp_path)
    page = "\n".join(missing(asked))
    wanted = yaml.safe_load((DOCS.parent / "benchmarks" / "verdicts.yaml").read_text())["cells"]
    for entry in wanted:
        cells = len(entry["of"]) * len(entry["seeds"]) * len(entry["routers"])
        (row,) = (line for line in page.splitlines() if line.endswith(f"--only {entry['name']}` |"))
        assert f"| 0 of {cells} | {cells} cells (" in row
    assert not asked.seeds


# Real models


SMALL = {"training.steps": 4, "training.validate_every": 2}
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {"training.batch": 2, "data.test_bytes": 20_000, "data.train_tokens": 20_000},
    "labels-tiny": {},
    "vmoe-tiny": {"attack.steps": 2, "attack.examples": 16, "attack.spsa_examples": 8, "attack.corrupted_examples": 8},
    "llava-tiny": {
        **{f"stages.{stage}.steps": 2 for stage in ("vision", "language", "captions", "connector")},
        "data.pictures": 64,
        "training.batch": 4,
        "attack.examples": 8,
    },
}
FIGURES = {"clean perplexity": "clean, perplexity"}  # headings by the name of a row's measure


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_of_real_cells_has_the_numbers_of_their_comparison(recipe: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"seeds": 3, "match_compute": False, "changes": {**SMALL, **RECIPES[recipe]}}
    routers = "smoe,symphony,smoe{method=noise,budget=0.1}" if recipe == "vmoe-tiny" else "smoe,symphony"
    results = holdfast.compare(routers, recipe=recipe, out=tmp_path / "run", ledger=tmp_path / "results" / "ledger", **how)
    made = results_page.page(tmp_path / "results", Asked())
    page = made["results.md"]
    name = f"clean {results.run.measure.name}"
    baseline = results.rows[0]
    for row in results.rows:
        shown = row_of(page, row.router, FIGURES.get(name, name))
        assert row.clean is not None and float(shown[0]) == pytest.approx(row.clean, abs=0.006)
        if row.router == "symphony":
            assert baseline.clean is not None
            mean = float(shown[1].strip("*").split()[0])  # before its interval
            assert mean == pytest.approx(row.clean - baseline.clean, abs=0.012)
    for trial, expected in numbers_of(baseline, page):
        assert float(row_of(page, "smoe", trial)[0]) == pytest.approx(expected, abs=0.006), trial
    cells = [LedgerCell.load(path) for path in sorted((tmp_path / "results" / "ledger").glob("*/*.json"))]
    for one in cells:
        (stored_cell,) = (each for each in results.cells if (each.router, each.seed) == (one.router, one.seed))
        assert one.validation == stored_cell.validation != ValidationCurve([], [], [])
    (curves,) = (content for path, content in made.items() if path.endswith("curves.svg"))
    assert "Held-out loss" in curves


def numbers_of(row: Row, page: str) -> list[tuple[str, float]]:
    """Return further numbers of a row by the headings that the page must have."""
    found = {name: score.mean for name, score in row.scores.items() if name not in ("clean", "typos")}
    found |= {name: shift.figure for name, shift in row.shifts.items()}
    if "attacked" in page and "| attacked |" in page:
        found["attacked"] = row.attacked
    if row.cost is not None:
        found["cost of swaps, %"] = 100 * row.cost.mean
    if "without pictures" in page:
        found["without pictures"] = row.metrics["error without pictures, %"].clean
    known = [(name, value) for name, value in found.items() if value is not None and math.isfinite(value)]
    assert known
    return known
