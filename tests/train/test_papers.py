"""The presets of the papers: each resolves, is built, rehearses, and has the figures that its paper prints."""

import html
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from tiers import quick_or_slow

import holdfast
from holdfast.planning.meta_model import Change, Choice, sparsify_on_meta
from holdfast.planning.planning import Workload
from holdfast.report.published import our_figure
from holdfast.train import Recipe, RouterChoice, load_recipe
from holdfast.train.building import build_model
from holdfast.train.papers import Column, find_preset, find_presets, load_papers, resolve
from holdfast.train.papers.cost import RATE, gpu_hours
from holdfast.train.recipe import change_recipe, parse_router
from holdfast.train.saved_model import make_task
from holdfast.train.start import HEADS
from holdfast.train.training import train

TEXTS = Path(__file__).parents[3] / "shared" / "papers"
FILES = {"symphony": "000", "mutual": "001", "acmoe": "002", "smoothing": "003"}
PRESETS = {f"{name}:{key}": preset for name, paper in load_papers().items() for key, preset in paper.presets.items()}
TRAINED = [name for name, preset in PRESETS.items() if preset.recipe is not None]
STARTED = [name for name in TRAINED if PRESETS[name].start is not None]
CHECKPOINTS = {"bert-large": ("bert", 24), "Phi-3": ("phi3", 32), "deit": ("vit", 12)}  # family, layers


def build_on_meta(recipe: Recipe, choice: RouterChoice) -> None:
    """Build the recipe's model with the router as the preflight of a comparison does, but without its data."""
    family, entries = recipe.model.family, recipe.model.config
    if recipe.model.checkpoint is not None:  # of its family, with its number of layers
        family, layers = next(value for key, value in CHECKPOINTS.items() if key in str(recipe.model.checkpoint))
        entries = {"num_hidden_layers": layers, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **entries)
    kind = getattr(transformers, HEADS["images" if recipe.task == "domains" else recipe.task])
    sparse = recipe.sparse
    change = Change(
        sparse.experts, sparse.k, sparse.layers, sparse.hidden, copied=sparse.init == "copy", shared=sparse.shared
    )
    with torch.device("meta"):
        sparsify_on_meta(kind.from_config(config), Choice(choice.name, choice.router, choice.options, choice.k), change)


@pytest.mark.parametrize("name", quick_or_slow([name for name in TRAINED if name not in STARTED], TRAINED[::12]))
def test_every_router_of_a_preset_can_be_built_with_its_recipe(name: str) -> None:
    recipe, routers, record = resolve(name, {})
    assert record.deviations and len({choice.name for choice in routers}) == len(routers)
    for choice in routers:
        build_on_meta(recipe, choice)


def test_a_preset_that_starts_from_cells_has_the_routers_of_their_preset() -> None:
    for name in STARTED:
        before = PRESETS[f"{name.partition(':')[0]}:{PRESETS[name].start}"]
        assert set(PRESETS[name].routers) <= set(before.routers)
        with pytest.raises(ValueError, match="give its folder with --from"):
            resolve(name, {})


@pytest.mark.parametrize("paper", FILES)
def test_every_published_figure_is_in_the_text_of_the_paper(paper: str) -> None:
    if not TEXTS.is_dir():
        pytest.skip("there is no ../shared/papers")
    (file,) = TEXTS.glob(f"{FILES[paper]}*.txt")
    printed = set(re.findall(r"\d+(?:\.\d+)?", file.read_text(encoding="utf-8").replace(",", "")))
    for name, preset in load_papers()[paper].presets.items():
        for row in preset.published.rows:
            for key in set(row) - {"name", "router"}:
                for number in re.findall(r"\d+(?:\.\d+)?", str(row[key]).replace(",", "")):
                    assert number in printed, (name, row["name"], key, row[key])


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
    with pytest.raises(ValueError, match="choose one: acmoe:table1-switch"):
        find_preset("acmoe:table1")
    with pytest.raises(ValueError, match="did you mean 'acmoe'"):
        find_presets("acmo")
    with pytest.raises(ValueError, match="has a command of its own; run: holdfast plan"):
        find_preset("acmoe:table7-switch")
    with pytest.raises(ValueError, match="only the experiment of a paper has a rehearsal"):
        holdfast.compare("smoe", rehearse=True)
    with pytest.raises(ValueError, match="has its own recipe and routers"):
        holdfast.compare("smoe", paper="acmoe:table9")


def test_a_change_of_an_exact_preset_is_a_deviation() -> None:
    recipe, _, record = resolve("acmoe:table9", {"training.steps": 3000}, seeds=2)
    assert recipe.training.warmup == 150
    assert record.deviations[:3] == [
        "training.steps is 3000 instead of 80000.",
        "training.warmup is 150 instead of 4000.",
        "2 seeds were trained instead of 5.",
    ]


def test_every_preset_can_be_shortened_and_says_so() -> None:
    for name in TRAINED:
        start = {"model.checkpoint": "cells"} if name in STARTED else {}
        recipe, _, record = resolve(name, {"training.steps": 3000, **start})
        recipe.training.rate_factor(3000)  # raises if the warm-up is as long as the run
        assert recipe.training.warmup < 3000 and recipe.training.epochs is None
        assert re.fullmatch(r"training.steps is 3000 instead of \d+( epochs)?\.", record.deviations[0])
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
    }.items():
        assert our_figure(Row(), Column(heading="", ours=ours)) == shown  # type: ignore[arg-type]


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


def test_hours_are_those_of_the_plan() -> None:
    preset = find_preset("acmoe:table9")
    tokens = 80_000 * 48 * 512
    sizes = load_recipe("switch-medium").model.config | {"vocab_size": 267_735}
    workload = Workload(sequence=512)
    planned = holdfast.plan("gpt2", ["smoe"], experts=16, k=2, hidden=352, sizes=sizes, workload=workload)
    flops = planned.columns[0].training.total * tokens
    assert gpu_hours(preset) == pytest.approx(flops * len(preset.routers) * preset.seeds / RATE / 3600)
    assert gpu_hours(find_preset("acmoe:table4-top2")) is None  # plan does not support Swin


def test_names_of_routers_are_read_once() -> None:
    for name in TRAINED:
        for router in PRESETS[name].routers:
            assert parse_router(router).name == router
