"""The presets of the papers: each resolves, is built, rehearses, and has the figures that its paper prints."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from paper_hours import gpu_hours, training_flops
from tiers import quick_or_slow
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.attacks import CORRUPTIONS
from holdfast.comparing import RECIPE, ROUTERS, choose
from holdfast.data import Document
from holdfast.planning.planning import Workload
from holdfast.report.comparison_tables import our_figure, published_table
from holdfast.report.curves import curves
from holdfast.report.plots import plots
from holdfast.stored import without_nan
from holdfast.train import Recipe, RouterChoice, load_recipe, papers
from holdfast.train.building import build_model, put_router
from holdfast.train.papers import RATE, Column, PaperRun, Published, find_preset, find_presets, load_papers, resolve
from holdfast.train.recipe import change_recipe, parse_routers
from holdfast.train.saved_model import make_task
from holdfast.train.start import HEADS
from holdfast.train.task import Measure
from holdfast.train.training import train

TEXTS = Path(__file__).parents[3] / "shared" / "papers"
FILES = {"symphony": "000", "mutual": "001", "acmoe": "002", "smoothing": "003"}
PRESETS = {f"{name}:{key}": preset for name, paper in load_papers().items() for key, preset in paper.presets.items()}
TRAINED = [name for name, preset in PRESETS.items() if preset.recipe is not None]
STARTED = [name for name in TRAINED if PRESETS[name].start is not None]
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {  # family and config
    "bert-large": ("bert", {"num_hidden_layers": 24}),
    "Phi-3": ("phi3", {"num_hidden_layers": 32, "pad_token_id": 0}),
    "deit": ("vit", {"num_hidden_layers": 12}),
    "dense-llava": ("llava", load_recipe("llava").model.config),
}


def build_on_meta(recipe: Recipe, choice: RouterChoice) -> None:
    """Build the recipe's model with the router as the preflight of a comparison does, but without its data."""
    family, entries = recipe.model.family, recipe.model.config
    if recipe.model.checkpoint is not None:  # of its family, with its layers
        family, entries = next(value for key, value in CHECKPOINTS.items() if key in str(recipe.model.checkpoint))
    config = transformers.AutoConfig.for_model(family, **entries)
    kind = getattr(transformers, HEADS["images" if recipe.task == "domains" else recipe.task])
    with torch.device("meta"):
        put_router(kind.from_config(config), recipe, choice)


@pytest.mark.parametrize("name", quick_or_slow([name for name in TRAINED if name not in STARTED], TRAINED[::12]))
def test_every_router_of_a_preset_can_be_built_with_its_recipe(name: str) -> None:
    recipe, routers, record = resolve(name, {})
    assert record.deviations and len({choice.name for choice in routers}) == len(routers)
    for choice in routers:
        build_on_meta(recipe, choice)


@pytest.mark.parametrize("name", quick_or_slow(STARTED, STARTED[::6]))
def test_every_router_of_a_preset_that_starts_from_cells_can_be_built_as_their_preset_leaves_it(name: str) -> None:
    recipe, routers, _ = resolve(name, {"model.checkpoint": "cells"})
    before, pretrained, _ = resolve(f"{name.partition(':')[0]}:{PRESETS[name].start}", {})
    assert {choice.name for choice in routers} <= {choice.name for choice in pretrained}
    assert recipe.data.tokens in (None, before.data.tokens) and recipe.data.length <= before.data.length
    config = {**before.model.config, "pad_token_id": 0, **recipe.model.config}
    for choice in routers:
        build_on_meta(replace(recipe, model=replace(before.model, config=config), sparse=before.sparse), choice)


def test_every_preset_is_complete() -> None:
    for name, preset in PRESETS.items():
        assert preset.recipe is None or preset.command is None, name
        assert preset.recipe or preset.command or (preset.needs and preset.published.rows), name
        if preset.recipe is not None:
            assert preset.routers and preset.rehearsal, name
            assert {row.get("router", preset.routers[0]) for row in preset.published.rows} <= set(preset.routers), name
        assert all(" " in sentence for sentence in (*preset.deviations, *preset.needs)), name  # not a name of one


def test_a_preset_that_starts_from_cells_has_the_routers_of_their_preset() -> None:
    for name in STARTED:
        before = PRESETS[f"{name.partition(':')[0]}:{PRESETS[name].start}"]
        assert set(PRESETS[name].routers) <= set(before.routers)
        assert_refused("give its folder with --from", resolve, name, {})


def pieces(figures: list[str], lines: list[list[str]]) -> int:
    """Return in how many pieces, each of them in order in one of the lines, the figures stand; -1: one is nowhere."""
    count = 0
    while figures:
        longest = max(reach(figures, line) for line in lines)
        if not longest:
            return -1
        figures, count = figures[longest:], count + 1
    return count


def reach(figures: list[str], line: list[str]) -> int:
    """Return how many of the figures, from the first on, stand in order in the line."""
    found, start = 0, 0
    while found < len(figures) and figures[found] in line[start:]:
        start, found = line.index(figures[found], start) + 1, found + 1
    return found


IN_PIECES = {"symphony:table11": 5, "symphony:table12": 5, "acmoe:table4-top2": 3}  # rows with figures of several tables
TURNED = {"symphony:table8", "symphony:table10"}  # the paper prints our columns as rows


@pytest.mark.parametrize("paper", FILES)
def test_every_published_row_is_a_row_of_a_table_in_the_text_of_the_paper(paper: str) -> None:
    if not TEXTS.is_dir():
        pytest.skip("there is no ../shared/papers")
    (file,) = TEXTS.glob(f"{FILES[paper]}*.txt")
    number, lines = re.compile(r"\d+(?:\.\d+)?"), file.read_text(encoding="utf-8").replace(",", "").splitlines()
    printed = [number.findall(line) for line in lines]
    for key, preset in load_papers()[paper].presets.items():
        name, columns = f"{paper}:{key}", preset.published.columns
        rows = [[str(row.get(column, "")).replace(",", "") for column in columns] for row in preset.published.rows]
        for row in list(zip(*rows, strict=True)) if name in TURNED else rows:
            found = pieces(number.findall(" ".join(dict.fromkeys(row))), printed)
            assert 0 <= found <= IN_PIECES.get(name, 2), (name, row, found)


def two_steps(recipe: Recipe, choice: RouterChoice, folder: Path) -> None:
    task = make_task(change_recipe(recipe, {"training.steps": 2, "training.warmup": 0}))
    model = build_model(task, choice.router, choice.options, seed=0, k=choice.k)
    log = train(model, task, folder, seed=0, k=choice.k or recipe.sparse.k or 2)
    assert len(log) == 2 and all(torch.isfinite(torch.tensor(entry["loss"])) for entry in log)


@pytest.mark.parametrize("name", quick_or_slow([name for name in TRAINED if name not in STARTED], []))
def test_every_router_of_a_rehearsal_trains_for_two_steps(name: str, tmp_path: Path) -> None:
    recipe, routers, record = resolve(name, {}, rehearse=True)
    assert "rehearsal" in record.deviations[0]
    for number, choice in enumerate(routers):
        two_steps(recipe, choice, tmp_path / str(number))


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of comparisons by the preset that they rehearse, to which a test adds."""
    return {"folder": tmp_path_factory.mktemp("cells")}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_a_preset_that_starts_from_cells_rehearses(name: str, cells: dict[str, Path], tmp_path: Path) -> None:
    before, changes = f"{name.partition(':')[0]}:{PRESETS[name].start}", {"training.steps": 2, "training.warmup": 0}
    if before not in cells:
        cells[before] = cells["folder"] / before.replace(":", "-")
        holdfast.compare(paper=before, rehearse=True, seeds=1, out=cells[before], changes=changes)
    results = holdfast.compare(
        paper=name, rehearse=True, seeds=1, start=cells[before], out=tmp_path / "out", changes=changes
    )
    assert [row.router for row in results.rows] == PRESETS[name].routers
    assert results.paper is not None and results.paper.name == name
    assert any("starts from: This is a rehearsal" in sentence for sentence in results.paper.deviations)


def test_what_the_cells_do_otherwise_is_a_deviation_of_a_run_that_starts_from_them(tmp_path: Path) -> None:
    def deviations(first: str | None, **changes: Any) -> list[str]:
        record = None if first is None else resolve(first, changes)[2]
        (tmp_path / "results.json").write_text(json.dumps(without_nan({"paper": record})))
        return resolve("acmoe:table1-switch-sst2", {"model.checkpoint": str(tmp_path)})[2].deviations

    usual = PRESETS["acmoe:table1-switch-sst2"].deviations
    assert deviations("acmoe:table1-switch") == usual
    found = deviations("acmoe:table1-switch", **{"training.steps": 3000})
    assert found[0] == "In the run that it starts from: training.steps is 3000 instead of 80000."
    assert found[-len(usual) :] == usual
    other = "The cells that it starts from are those of acmoe:table1-glam, not of acmoe:table1-switch."
    assert deviations("acmoe:table1-glam") == [other, *usual]
    unknown = "The cells that it starts from are not known to be those of acmoe:table1-switch."
    assert deviations(None) == [unknown, *usual]
    (tmp_path / "results.json").unlink()
    assert resolve("acmoe:table1-switch-sst2", {"model.checkpoint": str(tmp_path)})[2].deviations == [unknown, *usual]


@pytest.mark.slow
def test_a_router_that_is_added_later_keeps_the_published_figures(tmp_path: Path) -> None:
    changes = {"training.steps": 2, "training.warmup": 0}
    ran = holdfast.compare(paper="acmoe:table9", rehearse=True, seeds=1, out=tmp_path, changes=changes)
    assert ran.paper is not None
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "34.42" in page and all(sentence in page for sentence in (*ran.paper.deviations, *ran.paper.needs))
    recipe = find_preset("acmoe:table9").rehearsal
    assert recipe is not None
    added = holdfast.compare("smoe", recipe=recipe.recipe, seeds=1, out=tmp_path, changes=recipe.set | changes)
    assert added.paper == ran.paper and len(added.rows) == len(ran.rows) + 1


@pytest.mark.slow
def test_each_router_and_seed_starts_from_its_own_cell(tmp_path: Path) -> None:
    """`compare --from` gives what a loop gives that names the cells by hand, to the bit."""
    changes: dict[str, Any] = {"training.steps": 2, "training.warmup": 0}
    first = holdfast.compare("smoe,symphony", recipe="tiny", seeds=2, out=tmp_path / "first", changes=changes)
    assert len(first.rows) == 2
    changes |= {"sparse.experts": None, "sparse.hidden": None, "data.tokens": None, "data.vocabulary": None}
    folder = tmp_path / "second"
    holdfast.compare("smoe,symphony", recipe="labels-tiny", seeds=2, start=tmp_path / "first", out=folder, changes=changes)
    for router in ("smoe", "symphony"):
        for seed in (0, 1):
            cell = tmp_path / "first" / "cells" / f"{router}-seed{seed}"
            recipe = load_recipe("labels-tiny", changes | {"model.checkpoint": str(cell)})
            task = make_task(recipe)
            model = build_model(task, router, {}, seed=seed)
            log = train(model, task, tmp_path / f"by-hand-{router}-{seed}", seed=seed, k=2)
            stored = holdfast.load(folder / "cells" / f"{router}-seed{seed}" / "model")
            for (name, ours), theirs in zip(stored.state_dict().items(), model.state_dict().values(), strict=True):
                assert torch.equal(ours, theirs), (router, seed, name)
            assert len(log) == 2
    swept = holdfast.compare(
        "smoe",
        recipe="labels-tiny",
        seeds=1,
        start=tmp_path / "first",
        out=tmp_path / "swept",
        changes=changes,
        sweep={"training.learning_rate": [1e-3, 1e-4]},
        jobs=2,
    )
    assert len(swept.rows) == 2
    with pytest.raises(ValueError, match="has no trained cell of smooth with seed 0"):
        holdfast.compare(
            "smooth", recipe="labels-tiny", seeds=1, start=tmp_path / "first", out=tmp_path / "x", changes=changes
        )


def test_names_and_mistakes() -> None:
    assert list(find_presets("acmoe:table1-switch")) == ["acmoe:table1-switch"]
    assert len(find_presets("acmoe:table1")) > 3 and len(find_presets("mutual")) == len(load_papers()["mutual"].presets)
    assert_refused("choose one: acmoe:table1-switch", find_preset, "acmoe:table1")
    assert_refused("did you mean 'acmoe'", find_presets, "acmo")
    assert_refused("did you mean 'table1'", find_presets, "acmoe:tabel1")
    assert_refused("has a command of its own; run: holdfast plan", find_preset, "acmoe:table7-switch")
    recipe, _, _ = resolve("acmoe:table4-top2", {"training.steps": 2}, rehearse=True)
    assert recipe.training.warmup == 0  # as long as the rehearsal's would not end
    assert_refused("only the experiment of a paper has a rehearsal", holdfast.compare, "smoe", rehearse=True)
    assert_refused("has its own recipe and routers", holdfast.compare, "smoe", paper="acmoe:table9")


def test_a_preset_without_a_recipe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = load_papers()["smoothing"]
    bare = replace(paper.presets["table5"], recipe=None, needs=["A task with images and text."])
    monkeypatch.setattr(papers, "load_papers", lambda: {"smoothing": replace(paper, presets={"table5": bare})})
    assert_refused("cannot be run here, it has only the published figures. Missing: A task", find_preset, "smoothing:table5")


def test_a_change_of_an_exact_preset_is_a_deviation() -> None:
    recipe, _, record = resolve("acmoe:table9", {"training.steps": 3000}, seeds=2)
    assert recipe.training.warmup == 150
    assert record.deviations[:3] == [
        "training.steps is 3000 instead of 80000.",
        "training.warmup is 150 instead of 4000.",
        "2 seeds were trained instead of 5.",
    ]


def test_a_shorter_run_validates_and_takes_snapshots_earlier() -> None:
    recipe, _, record = resolve("symphony:table1-switch", {"training.steps": 3000})
    assert recipe.training.snapshot_steps(3000) == [0, 750, 1500, 2250, 2812, 3000]
    assert "training.snapshots is [0, 750, 1500, 2250, 2812, 3000] instead of" in " ".join(record.deviations)
    assert resolve("acmoe:table1-glam", {"training.steps": 3000})[0].training.validate_every == 25
    longer = {"training.steps": 100_000, "training.snapshots": 4}
    assert resolve("symphony:table1-switch", longer)[0].training.snapshots == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("smoothing:table1", {"strip width", "experts per token", "experts within 0.001 of the boundary"}),
        ("mutual:table1-top2", {"fluctuation", "entropy relative to smoe[bias=true]"}),
        ("acmoe:table1-glam", {"validation"}),
    ],
)
def test_the_page_of_a_preset_has_the_curves_of_its_figures(name: str, drawn: set[str], tmp_path: Path) -> None:
    changes = {"training.steps": 6, "training.warmup": 0, "training.validate_every": 2, "data.test_bytes": 4000}
    results = holdfast.compare(paper=name, rehearse=True, seeds=1, out=tmp_path, changes=changes, match_compute=False)
    points = {measure["name"]: len(measure["panels"][0]["data"][0]["x"]) for measure in curves(results)}
    points |= {plot.name: len(plot.data[0]["x"]) for plot in plots(results) if plot.name.startswith("validation")}
    assert drawn <= set(points) and all(points[one] >= 3 for one in drawn)


def test_every_preset_can_be_shortened_and_says_so() -> None:
    for name in TRAINED:
        start = {"model.checkpoint": "cells"} if name in STARTED else {}
        recipe, _, record = resolve(name, {"training.steps": 3000, **start})
        recipe.training.rate_factor(3000)  # raises if the warm-up is as long as the run
        assert recipe.training.warmup < 3000 and recipe.training.epochs is None
        assert re.fullmatch(r"training.steps is 3000 instead of [\d.]+( epochs)?\.", record.deviations[0])
        assert not any("MiniLM" in sentence for sentence in record.deviations[:3])


def test_our_figure_is_the_one_that_the_column_names() -> None:
    class Row:
        parameters, clean, attacked, clean_bits_per_byte = 216_300_000, 30.0, None, 1.53
        shifts: ClassVar[dict[str, Any]] = {}
        scores: ClassVar[dict[str, Any]] = {}

    for ours, shown in {
        "parameters": "216 M",
        "clean": "30.00",
        "100 - clean": "70.00",
        "100 * clean": "3,000.00",
        "attacked": "",
        "bits": "1.53",
        "shift:imagenet-a": "",
        "attack:pgd": "",
        "100 - cell:clean.top5": "92.50",
        "cell:clean.top1": "",
    }.items():
        assert our_figure(Row(), Column(heading="", ours=ours), {"cell:clean.top5": 7.5}) == shown  # type: ignore[arg-type]


def test_columns_name_numbers_that_cells_have() -> None:
    ours = {column.ours for preset in PRESETS.values() for column in preset.published.columns.values() if column.ours}
    attacks = {name.partition(":")[2] for name in ours if name.partition(":")[0].endswith("attack")}
    paths = {tuple(name.partition("cell:")[2].split(".")) for name in ours if "cell:" in name}
    assert {path[1] for path in paths if path[0] == "trials"} | attacks <= {"PGD", "FGSM", "SPSA", "corruptions"}
    of_tests = {path for path in paths if path[0] in ("clean", "trials")}
    assert {path[-1] for path in of_tests if path[1] != "routing"} == {"top5"}
    of_sets = {name.partition("shift:")[2] for name in ours if " " in name.partition("shift:")[2]}
    tests = {one for name in TRAINED for one in PRESETS[name].set.get("data.tests", [])}
    assert of_sets and of_sets <= {f"{one.partition('=')[0]} {Path(one.partition('=')[2]).stem}" for one in tests}
    of_files = {path[3] for path in paths if path[:3] == ("shifts", "imagenet-c", "errors")}
    assert of_files == set(CORRUPTIONS)


def test_the_search_of_a_paper_is_swept_unless_the_user_fixes_it() -> None:
    routers = parse_routers(ROUTERS)

    def settings(**how: Any) -> list[dict[str, Any]]:
        how = {"changes": {}, "rehearse": False, "sweep": None, **how}
        return [
            one.values for one in choose(RECIPE, routers, None, paper="smoothing:table2-rte", start=None, **how).settings
        ]

    rates = [{"training.learning_rate": rate} for rate in (2e-5, 3e-5, 5e-5)]
    assert settings() == rates
    assert settings(rehearse=True) == settings(changes={"training.learning_rate": 1e-4}) == []
    assert settings(sweep={"sparse.k": [1, 2]}) == [{"sparse.k": 1}, {"sparse.k": 2}]


def test_the_table_has_the_best_setting_of_a_search() -> None:
    class Row:
        parameters, shifts, scores, clean_bits_per_byte, attacked = 1, dict[str, Any](), dict[str, Any](), None, None

        def __init__(self, router: str, clean: float | None) -> None:
            self.router, self.clean = router, clean

    class Found:
        domains, swept = list[Any](), ["training.learning_rate"]
        rows: ClassVar[list[Row]] = [
            Row("smoe", 30.0),
            Row("smooth", 28.0),
            Row("smoe", 26.0),
            Row("smooth", 29.0),
            Row("smooth", None),
        ]
        columns: ClassVar[dict[str, Column]] = {"a": Column(heading="RTE", ours="100 - clean")}
        published = Published(columns=columns, rows=[{"name": "SMoE", "router": "smoe", "a": 70.1}])
        paper = PaperRun(name="", title="", covers=[], published=published, deviations=[], needs=[], sweep=swept)
        run = SimpleNamespace(measure=Measure("error, %", "", "", better="lower"))

    table = published_table(Found.published, Found())  # type: ignore[arg-type]
    assert [row[-2:] for row in table.rows] == [["70.1", "74.00"], ["", "72.00"]]
    Found.run.measure = Measure("F1", "", "", better="higher")
    assert [row[-1] for row in published_table(Found.published, Found()).rows] == ["70.00", "71.00"]  # type: ignore[arg-type]
    Found.swept = ["sparse.k"]  # not the paper's
    assert [row[-1] for row in published_table(Found.published, Found()).rows] == [""]  # type: ignore[arg-type]


def test_a_column_may_name_a_number_of_the_cells() -> None:
    names = ("cell:clean.top5", "cell:errors.-1.fog", "cell:trials.pgd.top5", "lowest:clean.top5", "highest:clean.top5")
    columns = {name: Column(heading=name, ours=f"100 - {name}") for name in names}
    run = PaperRun(name="", title="", covers=[], published=Published(columns=columns), deviations=[], needs=[])
    errors = [{"fog": 10.0}, {"fog": 60.0}]
    cells: list[dict[str, Any]] = [
        {"router": "smoe", "clean": {"top5": 8.0}, "errors": errors, "trials": {"pgd": {"top5": 20.0}}},
        {"router": "smoe", "clean": {"top5": 9.0}, "errors": errors, "trials": {}},
        {"router": "ac", "clean": {"top5": 7.0}, "errors": []},
    ]
    assert run.with_cells(cells).of_cells == {
        "smoe": dict(zip(names, (8.5, 60.0, None, 8.0, 9.0), strict=True)),  # one seed has no such number
        "ac": dict(zip(names, (7.0, None, None, 7.0, 7.0), strict=True)),
    }


@pytest.fixture(scope="module")
def scored() -> tuple[Any, Any, dict[str, Any]]:
    """Return an untrained model, its task, and its scores, also on the validation text."""
    texts = {"data.test_bytes": 4000, "data.score_validation": True}
    task: Any = make_task(change_recipe(load_recipe("tiny"), texts))
    model = build_model(task, "smoe", {}, seed=0).eval()
    return model, task, task.score(model)


def test_the_validation_text_is_scored_as_a_naive_loop_does(scored: tuple[Any, Any, dict[str, Any]]) -> None:
    model, task, found = scored
    documents = list[Document]()
    while (left := 4000 - sum(len(document.data) for document in documents)) > 0:
        data = list(task.corpus.documents("valid"))[len(documents)].data
        documents.append(Document("", data[: data.rfind(b"\n", 0, left) + 1] if len(data) > left else data))
        if len(data) > left:
            break
    tokens = task.tokenizer.stream(documents).long()
    losses = list[Tensor]()
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, task.recipe.data.length):
            block = tokens[start : start + task.recipe.data.length + 1]
            logits = model(input_ids=block[None, :-1]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, block[1:], reduction="none"))
    assert found["validation"]["clean"] == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
    assert found["validation"]["attacked"] not in (found["validation"]["clean"], found["attacked"]["figure"])


def test_columns_of_load_and_instability_have_our_numbers(scored: tuple[Any, Any, dict[str, Any]]) -> None:
    found = scored[2]
    published = PRESETS["acmoe:table1-switch"].published
    run = PaperRun(name="", title="", covers=[], published=published, deviations=[], needs=[])
    layers = found["clean"]["routing"]["layers"]
    spread = torch.tensor([layer["load"]["std"] for layer in layers], dtype=torch.float64)
    assert run.with_cells([{"router": "smoe", **found}]).of_cells["smoe"] == pytest.approx(
        {
            "cell:clean.routing.overall.load.std": float(spread.mean()),
            "cell:clean.routing.overall.load.std_over_layers": float(spread.std(correction=0)),
            "cell:clean.routing.layers.-1.instability": layers[-1]["instability"],
        }
    )


def test_the_command_lists_presets_and_prints_one(capsys: Any) -> None:
    from holdfast.cli.main import main

    assert main(["papers", "symphony:table1"]) == 0
    shown = capsys.readouterr().out
    assert "symphony:table1-glam" in shown and "wikitext-103" in shown and "GPU hours" in shown
    assert main(["papers", "acmoe:table1-enwik8-sst2"]) == 0
    shown = capsys.readouterr().out
    assert "--from FOLDER" in shown and "MiniLM" not in shown and "Deviations:" in shown
    assert main(["papers", "acmoe:table2"]) == 0  # its figures come from the comparisons of Table 1
    assert "acmoe:table1-switch" in capsys.readouterr().out


def test_flops_of_images_are_counted_as_the_plan_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("vmoe")
    planned = training_flops(recipe)

    def refuse(*given: Any, **options: Any) -> None:
        raise ValueError("not known")

    monkeypatch.setattr("paper_hours.plan", refuse)
    assert training_flops(recipe) == pytest.approx(planned, rel=0.01)
    assert 200 < (gpu_hours("acmoe:table4-top2") or 0) < 400  # Swin, which the plan does not know


def test_hours_are_those_of_the_plan() -> None:
    preset = find_preset("acmoe:table9")
    tokens = 80_000 * 48 * 512
    sizes = load_recipe("switch-medium").model.config | {"vocab_size": 267_735}
    workload = Workload(sequence=512)
    planned = holdfast.plan("gpt2", ["smoe"], experts=16, k=2, hidden=352, sizes=sizes, workload=workload)
    flops = planned.columns[0].training.total * tokens
    assert gpu_hours("acmoe:table9") == pytest.approx(flops * len(preset.routers) * preset.seeds / RATE / 3600)


@pytest.mark.slow
def test_every_preset_has_its_hours() -> None:
    for name in TRAINED:
        hours = gpu_hours(name)
        assert hours is not None and PRESETS[name].hours == pytest.approx(hours, rel=1e-3), "run benchmarks/paper_hours.py"
    # BERT-large has 24 x 12.6 million weights in its layers, 8.4 million in the second expert, and the plan counts a head
    # over 28,996 words; each costs 6 FLOPs a token.
    flops = 6 * (24 * 12.6e6 + 8.4e6 + 28_996 * 1024) * 128 * 2_490 * 10 * find_preset("smoothing:table2-rte").cells
    assert gpu_hours("smoothing:table2-rte") == pytest.approx(flops / RATE / 3600, rel=0.05)


def test_hours_of_a_vision_language_model_are_those_of_its_weights_and_attention() -> None:
    """Six FLOPs for each weight and token; attention has 12 for each width and pair of tokens, half of them if causal."""
    patches, layers = 256, {"tower": 27, "sparse": 26, "language": 32}
    tokens = 2048 + patches
    language = layers["language"] * (4 * 3072**2 + 3 * 3072 * 8192) + 3072 * 32_064
    network, connector = 2 * 1152 * 4304, 1152 * 3072 + 3072**2
    tower = layers["tower"] * (4 * 1152**2 + network) + layers["sparse"] * network + 3 * 14 * 14 * 1152
    weights = 6 * (language * tokens + (tower + 2 * connector) * patches)
    attention = 6 * tokens**2 * 3072 * layers["language"] + 12 * patches**2 * 1152 * layers["tower"]
    recipe = load_recipe("llava", {"data.source": "LLaVA-665K/", "training.batch": 40})
    steps = recipe.training.step_count(598_768)
    assert training_flops(recipe) == pytest.approx(40 * steps * (weights + attention), rel=0.01)
    preset = find_preset("symphony:table10")  # half an epoch, with the sizes of the recipe
    assert gpu_hours("symphony:table10") == pytest.approx(
        40 * 7485 * (weights + attention) * preset.cells / RATE / 3600, rel=0.01
    )


def test_a_model_is_trained_for_every_domain_that_is_held_out() -> None:
    domains = {"PACS/": 4, "VLCS/": 4, "OfficeHome/": 4, "TerraIncognita/": 4, "DomainNet/": 6}
    for name in TRAINED:
        preset = PRESETS[name]
        recipe = load_recipe(str(preset.recipe), preset.set)
        assert preset.domains == domains.get(recipe.data.source, 1) and (preset.domains > 1) == (recipe.task == "domains")
        assert preset.cells % (len(preset.routers) * preset.seeds * preset.domains) == 0
