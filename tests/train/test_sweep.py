"""Sweeps: every combination of values with every router and seed, compared within equal settings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from train.conftest import TEXT, MakeRecipe
from without_times import as_text
from wording import assert_refused

import holdfast
from holdfast.train import Comparison, Recipe, parse_routers
from holdfast.train.cells import merge_results, parse_sweep, settings_of
from holdfast.train.saved_model import load_model_and_task
from holdfast.train.summary import summarise

FEW = {"training.steps": 2, "training.batch": 2}


def test_settings_are_every_combination_with_the_values_of_the_recipe(tiny: MakeRecipe) -> None:
    swept = parse_sweep(["sparse.k=1,2", "training.learning_rate=1e-3,1"])
    assert swept == {"sparse.k": [1, 2], "training.learning_rate": ["1e-3", 1]}  # YAML reads 1e-3 as a string
    settings = settings_of(tiny(), swept)
    expected = [(k, rate) for k in (1, 2) for rate in (0.001, 1.0)]
    assert [one.label for one in settings] == [f"sparse.k={k}, training.learning_rate={rate}" for k, rate in expected]
    assert [(one.recipe.sparse.k, one.recipe.training.learning_rate) for one in settings] == expected
    lists = settings_of(tiny(), parse_sweep(["sparse.layers=[0],[0,1],last:1"]))
    assert [one.values["sparse.layers"] for one in lists] == [[0], [0, 1], "last:1"]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("sparse.k", "'sparse.k' sets no value; write for example sparse.k=1,2,4"),
        ("sparse.k=", "write for example sparse.k=1,2,4"),
        ("sparse.k=[1", "is not YAML"),
        ("sparse.k=1 sparse.k=2", "sparse.k is swept twice"),
        ("sparse.kk=1", "unknown key 'kk': did you mean 'k'?"),
        ("sprse.k=1", "unknown section 'sprse': did you mean 'sparse'?"),
        ("sparse=1", "it is a section"),
        ("model.config=1", "it is a section"),
        ("model.config.hiden_size=1", "unknown entry 'hiden_size': did you mean 'hidden_size'?"),
        ("sparse.k=0", "sparse.k is 0, not a whole number from 1 to 10"),
        ("sparse.k=1,9", "the sweep cannot have sparse.k=9: k is 9; it must be between 1 and the number of experts, 8"),
        ("sparse.k=4,8 sparse.experts=4,8", "the sweep cannot have sparse.k=8, sparse.experts=4"),
        ("sparse.k=2,2", "the sweep has sparse.k=2 twice"),
        ("training.learning_rate=1e-3,0.001", "the sweep has training.learning_rate=0.001 twice"),
        ("data.vocabulary=100,200", "scored on the same test data under the same attack"),
        ("attack.rate=0.1,0.2", "scored on the same test data under the same attack"),
        ("model.checkpoint=a,b", "run a comparison for each checkpoint"),
        ("training.steps=1,2 training.epochs=1,2", "the sweep cannot have training.steps=1, training.epochs=1"),
        ("task=text,images", "scored on the same test data under the same attack"),
        (f"training.steps={','.join(map(str, range(1, 2002)))}", "2,001 settings; at most 1,000 cells"),
    ],
)
def test_a_wrong_sweep_is_one_sentence(written: str, sentence: str, tiny: MakeRecipe) -> None:
    assert_refused(re.escape(sentence), lambda: settings_of(tiny(), parse_sweep(written.split(" "))))


@pytest.mark.parametrize("values", [[], "12", 3, None])
def test_values_in_python_are_a_list(values: Any, tiny: MakeRecipe) -> None:
    assert_refused("give a list with at least one", lambda: settings_of(tiny(), {"sparse.k": values}))


def test_too_many_cells_are_counted_before_anything_is_read(tiny: MakeRecipe, tmp_path: Path) -> None:
    settings = settings_of(tiny(), {"training.steps": list(range(1, 101))})
    with pytest.raises(ValueError, match=r"2,200 cells \(100 settings x 2 routers x 11 seeds\)"):
        Comparison(tiny(), parse_routers("smoe,ac"), 11, tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def swept(recipe: Recipe, folder: Path, sweep: dict[str, list[Any]], routers: str = "smoe", seeds: int = 1) -> Comparison:
    return Comparison(recipe, parse_routers(routers), seeds, folder, settings=settings_of(recipe, sweep))


def without(result: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in keys}


@pytest.mark.slow
def test_a_swept_cell_is_the_cell_of_a_comparison_with_these_values(tiny: MakeRecipe, tmp_path: Path) -> None:
    """To the bit; the tasks of all settings share their data."""
    recipe = tiny(FEW)
    comparison = swept(recipe, tmp_path / "swept", {"sparse.k": [1, 3], "training.steps": [3]})
    results = comparison.run()
    assert sorted(path.name for path in (tmp_path / "swept" / "cells").iterdir()) == [
        "smoe-sparse.k=1-training.steps=3-seed0",
        "smoe-sparse.k=3-training.steps=3-seed0",
    ]
    for result, k in zip(results, (1, 3), strict=True):
        assert result["settings"] == {"sparse.k": k, "training.steps": 3}
        changes = {**FEW, "sparse.k": k, "training.steps": 3}
        (alone,) = Comparison(tiny(changes), parse_routers("smoe"), 1, tmp_path / f"alone-{k}").run()
        assert as_text(without(result, "settings")) == as_text(alone)
    cell = tmp_path / "swept" / "cells" / "smoe-sparse.k=3-training.steps=3-seed0"
    model, task = load_model_and_task(str(cell), source=recipe.data.source)
    assert task.recipe.sparse.k == 3 and task.recipe.training.steps == 3
    assert model.config.holdfast is not None


def test_swept_epochs_replace_the_steps_of_the_recipe(tiny: MakeRecipe, tmp_path: Path) -> None:
    comparison = swept(tiny(FEW), tmp_path / "swept", {"training.epochs": [1, 2]})
    blocks = comparison.task.examples(0).order.count
    assert [comparison.steps_of(cell) for cell in comparison.cells] == [-(-blocks // 2), blocks]  # batches of 2


def test_a_setting_that_cannot_be_trained_is_named_before_any_training(tiny: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny({**FEW, "training.warmup": 20})
    with pytest.raises(ValueError, match=r"with training.schedule=linear: training.warmup is 20"):
        swept(recipe, tmp_path / "swept", {"training.schedule": ["constant", "linear"]}).run()
    assert not (tmp_path / "swept").exists()


@pytest.mark.slow
def test_an_interrupted_sweep_is_resumed_and_more_values_are_added(tiny: MakeRecipe, tmp_path: Path) -> None:
    recipe, folder = tiny(FEW), tmp_path / "run"

    def stop(cell: Any, steps: int) -> None:
        if dict(cell.settings) == {"sparse.k": 2}:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swept(recipe, folder, {"sparse.k": [1, 2]}).run(stop)
    (first,) = folder.glob("cells/*/result.json")
    before = first.stat().st_mtime_ns
    comparison = swept(recipe, folder, {"sparse.k": [1, 2]})
    results = comparison.run()
    assert first.stat().st_mtime_ns == before
    assert [row.settings for row in comparison.finish(results).rows] == [{"sparse.k": 1}, {"sparse.k": 2}]
    more = swept(recipe, folder, {"sparse.k": [4]})
    assert [row.settings["sparse.k"] for row in more.finish(more.run()).rows] == [1, 2, 4]
    assert first.stat().st_mtime_ns == before


def test_a_folder_of_another_sweep_is_refused(tiny: MakeRecipe, tmp_path: Path) -> None:
    recipe, folder = tiny(FEW), tmp_path / "run"
    swept(recipe, folder, {"sparse.k": [1]}).run()
    assert_refused(r"another run \(another sweep\)", swept, recipe, folder, {"training.steps": [1]})
    assert_refused(r"another run \(another sweep\)", Comparison, recipe, parse_routers("smoe"), 1, folder)
    Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "plain").run()
    assert_refused(r"another run \(another sweep\)", swept, recipe, tmp_path / "plain", {"sparse.k": [1]})


def test_a_setting_that_cannot_be_built_is_named_before_any_training(tiny: MakeRecipe, tmp_path: Path) -> None:
    comparison = swept(tiny(FEW), tmp_path / "run", {"sparse.layers": [[0], [7]]})
    assert_refused(r"^with sparse\.layers=\[7\]: router 'smoe'", comparison.run)
    assert not (tmp_path / "run").exists()


def test_a_value_that_is_no_file_name_has_a_safe_folder(tiny: MakeRecipe, tmp_path: Path) -> None:
    comparison = swept(tiny(FEW), tmp_path / "run", {"model.config.hidden_act": ["../silu", "gelu"]})
    first, second = comparison.cells
    assert re.fullmatch(r"smoe-model\.config\.hidden_act=\.\._silu-[0-9a-f]{8}-seed0", first.folder)
    assert second.folder == "smoe-model.config.hidden_act=gelu-seed0"


def result(router: str, seed: int, k: int, figure: float) -> dict[str, Any]:
    routing = {"overall": {"experts_per_token": {"mean": float(k)}}}
    score = {"figure": figure, "routing": routing}
    return {"router": router, "seed": seed, "settings": {"sparse.k": k}, "parameters": 1, "clean": score, "attacked": score}


def test_rows_are_compared_with_the_baseline_of_the_same_setting() -> None:
    results = [
        result(router, seed, k, base + offset + seed)
        for k, base in ((1, 100.0), (2, 50.0))
        for router, offset in (("smoe", 0.0), ("ac", 3.0 * k))
        for seed in (0, 1)
    ]
    rows = summarise(results, "smoe")
    assert [(row.settings["sparse.k"], row.router) for row in rows] == [(1, "smoe"), (1, "ac"), (2, "smoe"), (2, "ac")]
    assert [row.clean for row in rows] == [100.5, 103.5, 50.5, 56.5]
    assert [row.clean_difference and row.clean_difference.mean for row in rows] == [None, 3.0, None, 6.0]
    alone = summarise([one for one in results if (one["router"], one["settings"]["sparse.k"]) != ("smoe", 2)], "smoe")
    assert [row.router for row in alone] == ["smoe", "ac", "ac"]
    assert alone[2].clean_difference is None and not alone[2].more_compute  # its baseline is missing


def test_results_are_sorted_by_setting_and_keep_their_order(tmp_path: Path) -> None:
    results = [result(router, seed, k, 1.0) for seed in (0, 1) for k in (2, 1) for router in ("smoe", "ac")]
    found = [(one["settings"]["sparse.k"], one["router"], one["seed"]) for one in merge_results(tmp_path, results)]
    assert found == [(k, router, seed) for k in (2, 1) for router in ("smoe", "ac") for seed in (0, 1)]
    rows = [{"router": "ac", "settings": {"sparse.k": 1}}, {"router": "smoe", "settings": {"sparse.k": 1}}]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    again = [(one["settings"]["sparse.k"], one["router"]) for one in merge_results(tmp_path, results)[::2]]
    assert again == [(k, router) for k in (1, 2) for router in ("ac", "smoe")]


def test_the_command_prints_one_table_and_writes_one_page(
    command: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {**TEXT, **FEW, "data.source": str(text)}
    given = ["compare", "--routers=smoe,smoe[k=3]", "--seeds=1", "--no-match-compute", "--sweep", "sparse.k=1,2"]
    done = command(*given, "--set", *(f"{key}={value}" for key, value in changes.items()), columns=200)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^router +sparse\.k +weights", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^smoe\[k=3\] +2 .* 3\.00", done.stdout, flags=re.MULTILINE)
    assert "2 settings of sparse.k were trained" in done.stdout and "Fewer than 3 seeds cannot show" in done.stdout
    page = Path("comparison/report.html").read_text()
    assert "Settings side by side" in page and "smoe[k=3], k=2" in page
    refused = command(*given, "--set", "sparse.k=1")
    assert refused.returncode == 2 and refused.stderr == "holdfast: sparse.k is set and swept; remove one of the two.\n"


@pytest.mark.slow
def test_each_setting_gets_the_baseline_of_equal_compute(text: Path, tmp_path: Path) -> None:
    changes = {**TEXT, **FEW, "data.source": str(text)}
    results = holdfast.compare(
        "smoe,smooth", recipe="tiny", seeds=1, out=tmp_path / "run", changes=changes, sweep={"sparse.k": [1, 2]}
    )
    found = {(row.router, row.settings["sparse.k"]): row for row in results.rows}
    for k in (1, 2):
        used = found["smooth", k].experts_per_token
        assert used is not None and used > k
        matched = [row for (router, own), row in found.items() if own == k and router.startswith("smoe, top ")]
        assert [row.experts_per_token for row in matched] == [float(int(used) + 1)]
        against = found["smooth", k].equal_compute
        assert against is not None and against.router == matched[0].router


@pytest.mark.slow  # two processes import everything
def test_workers_train_the_cells_of_a_sweep(tiny: MakeRecipe, tmp_path: Path) -> None:
    recipe, sweep = tiny(FEW), {"sparse.k": [1, 2]}
    beside = swept(recipe, tmp_path / "beside", sweep).run(jobs=2)
    alone = swept(recipe, tmp_path / "alone", sweep).run()
    assert as_text(beside) == as_text(alone)
