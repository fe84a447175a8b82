"""Leave one domain out: cells, model selection and figures equal a loop that is written here."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from wording import assert_refused

import holdfast
from holdfast.cli.main import main
from holdfast.data.images import decode
from holdfast.hub.layers import moe_layers
from holdfast.metrics.paired import paired
from holdfast.routing.scores import Cosine
from holdfast.train import Comparison, Recipe, build_model, load_recipe, make_task, parse_routers
from holdfast.train.building import put_router
from holdfast.train.image_task import DomainTask, ImageTask
from holdfast.train.results import Results
from holdfast.train.run_folder import read_with_checksum
from holdfast.train.saved_model import load_model_and_task
from holdfast.train.search import search
from holdfast.train.summary import summarise_domains
from holdfast.train.training import SingleRun

DOMAINS = {"art_painting": 20, "cartoon": 15, "photo": 25, "sketch": 30}  # the layout of PACS, with fewer images
CLASSES = ("dog", "elephant", "horse")
SMALL: dict[str, Any] = {
    "model.config.hidden_size": 16,
    "model.config.intermediate_size": 16,
    "model.config.num_attention_heads": 2,
    "sparse.experts": 4,
    "data.size": 16,
    "training.steps": 12,
    "training.save_every": 3,
    "training.batch": 6,
    "training.warmup": 2,
    "training.learning_rate": 0.02,
    "attack.examples": 3,
    "attack.steps": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write noise as DOMAIN/CLASS/number.png; its colour depends on the class, its brightness on the domain."""
    from PIL import Image

    folder, source = tmp_path_factory.mktemp("domains") / "PACS", np.random.default_rng(0)
    for place, (domain, count) in enumerate(DOMAINS.items()):
        for number in range(count):
            channel = number % len(CLASSES)
            pixels = source.integers(0, 130, (18, 20, 3)) + 25 * place
            pixels[:, :, channel] += 30
            where = folder / domain / CLASSES[channel]
            where.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(where / f"pic_{number:03}.png")
    return folder


def small(folder: Path, **changes: Any) -> Recipe:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe("gmoe-tiny", {**SMALL, "data.source": str(folder), **named})


def options(folder: Path) -> list[str]:
    """Return the same changes as a user writes them after --set."""
    return [f"{key}={json.dumps(value)}" for key, value in {**SMALL, "data.source": str(folder)}.items()]


def domain_task(recipe: Recipe) -> DomainTask:
    task = make_task(recipe)
    assert isinstance(task, DomainTask)
    return task


def images(paths: list[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels as the model reads them, and the labels."""
    pixels = torch.stack([torch.from_numpy(decode(path, 16)) for path in paths]).permute(0, 3, 1, 2).float() / 255
    return (pixels - 0.5) / 0.5, torch.tensor([CLASSES.index(path.parent.name) for path in paths])


@torch.no_grad()
def accuracy(model: Any, paths: list[Path]) -> float:
    """Return the share of correct predictions in percent, image by image."""
    model.eval()
    pixels, labels = images(paths)
    correct = sum(
        int(model(pixel_values=one[None]).logits.argmax()) == int(label) for one, label in zip(pixels, labels, strict=True)
    )
    return 100 * correct / len(paths)


def accuracy_of_loop(folder: Path, router: str, held_out: str, seed: int) -> tuple[float, int]:
    """Train on the other domains, select on their validation images, and return the accuracy on the held-out domain.

    The split, the order of the images and the initial weights are Holdfast's; the protocol is written out here.
    """
    recipe = small(folder, data__held_out=held_out)
    task = domain_task(recipe).for_seed(seed)
    files = {name: [path for each in CLASSES for path in sorted((folder / name / each).iterdir())] for name in DOMAINS}
    names = [name for name in DOMAINS if name != held_out]
    splits = {name: task.domain_set.split(name, seed) for name in names}
    train = [files[name][number] for name in names for number in splits[name][0].tolist()]
    valid = [files[name][number] for name in names for number in splits[name][1].tolist()]
    assert not {*train} & {*valid} and {*train, *valid} == {path for name in names for path in files[name]}
    order = task.domain_set.order(held_out, 6, seed, split_seed=seed)
    model = build_model(task, router, {}, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    best, weights, step_of_best = -1.0, {}, 0
    for step in range(12):
        model.train()
        rate = 0.02 * (step / 2 if step < 2 else 0.5 * (1 + np.cos(np.pi * (step - 2) / 10)))
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        numbers = order.at(range(step * order.size, (step + 1) * order.size)).tolist()
        pixels, labels = images([train[number] for number in numbers])
        model(pixel_values=pixels, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 3 == 0 and (found := accuracy(model, valid)) > best:
            best, step_of_best = found, step + 1
            weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    return accuracy(model, files[held_out]), step_of_best


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "run"
    holdfast.compare("smoe,xmoe", recipe="gmoe-tiny", seeds=2, out=out, changes={**SMALL, "data.source": str(folder)})
    return out


@pytest.mark.slow
def test_the_figures_of_four_held_out_domains_equal_a_loop(run: Path, folder: Path) -> None:
    results = Results.load(run)
    assert sorted(path.name for path in (run / "cells").iterdir()) == sorted(
        f"{router}-data.held_out={domain}-seed{seed}" for router in ("smoe", "xmoe") for domain in DOMAINS for seed in (0, 1)
    )
    found = {
        router: [{domain: accuracy_of_loop(folder, router, domain, seed)[0] for domain in DOMAINS} for seed in (0, 1)]
        for router in ("smoe", "xmoe")
    }
    assert len({value for seeds in found.values() for one in seeds for value in one.values()}) > 4  # not all the same
    for cell in results.cells:
        expected = found[cell.router][cell.seed][cell.settings["data.held_out"]]
        assert cell.clean.figure == pytest.approx(100 - expected, abs=1e-9)
    for row in results.domains:
        seeds = found[row.router]
        assert row.seeds == [0, 1] and list(row.accuracy) == list(DOMAINS)
        for domain in DOMAINS:
            assert row.accuracy[domain].mean == pytest.approx(statistics.fmean(one[domain] for one in seeds))
        for level, over in ((row.mean, statistics.fmean), (row.worst, min)):
            values = [over(one.values()) for one in seeds]
            assert level.mean == pytest.approx(statistics.fmean(values)) and level.over == "these models only"
            assert level.low is not None and level.high is not None and 0 <= level.low < level.high <= 100
    smoe, xmoe = results.domains
    assert smoe.mean_difference is None and xmoe.mean_difference is not None and xmoe.worst_difference is not None
    for difference, over in ((xmoe.mean_difference, statistics.fmean), (xmoe.worst_difference, min)):
        before, after = ([over(one.values()) for one in found[router]] for router in ("smoe", "xmoe"))
        assert difference.mean == pytest.approx(paired(before, after).mean) and difference.kind == "unknown"


@pytest.mark.slow
def test_the_checkpoint_is_selected_on_validation_images_of_the_training_domains(run: Path, folder: Path) -> None:
    chosen = set()
    for domain in DOMAINS:
        place = run / "cells" / f"xmoe-data.held_out={domain}-seed1" / "training"
        lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
        figures = {line["step"]: line["eval_figure"] for line in lines if "eval_figure" in line}
        assert list(figures) == [3, 6, 9, 12]
        best = min(figures, key=lambda step: (figures[step], step))
        assert best == accuracy_of_loop(folder, "xmoe", domain, 1)[1]
        assert (place / f"checkpoint-{best}").exists()
        chosen.add(best)
    assert chosen != {12}  # the last checkpoint is not the best one everywhere, so selection matters


@pytest.mark.slow
def test_the_page_and_the_table_have_the_held_out_domains(run: Path, folder: Path, command: Command) -> None:
    page = (run / "report.html").read_text()
    assert "<h2>Held-out domains</h2>" in page and "worst, difference" in page
    assert "4 domains, art_painting, cartoon, photo and sketch, were held out in turn" in page
    given = ["--recipe", "gmoe-tiny", "--routers", "smoe,xmoe", "--seeds", "2", "--out", str(run)]
    again = command("compare", *given, "--set", *options(folder))
    assert again.returncode == 0, again.stderr
    assert "Held-out domains" in again.stdout and "Fewer than 3 seeds cannot show" in again.stdout


@pytest.mark.slow
def test_train_holds_one_domain_out_and_evaluate_scores_it(run: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "trained"
    given = ["--router", "xmoe", "--seed", "1", "--out", str(out), "--set", *options(folder), "data.held_out=photo"]
    assert main(["train", "gmoe-tiny", *given]) == 0
    cell = json.loads((run / "cells" / "xmoe-data.held_out=photo-seed1" / "result.json").read_text())
    model, task = load_model_and_task(str(out), source=str(folder))
    assert task.score(model)["clean"]["figure"] == cell["clean"]["figure"]  # the same run as the cell
    assert task.score(model)["clean"]["examples"] == DOMAINS["photo"]


@pytest.mark.slow
def test_a_model_of_domains_is_scored_on_shifted_test_sets(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another domain as a shifted test set; the clean images are those of the held-out domain."""
    cell = run / "cells" / "xmoe-data.held_out=photo-seed1"
    given = ["evaluate", str(cell), "--source", str(folder), "--shift", str(folder / "sketch"), "corruptions"]
    assert main([*given, "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["shifts"]
    model, task = load_model_and_task(str(cell), source=str(folder))
    assert found["clean"]["figure"] == pytest.approx(task.score(model)["clean"]["figure"])
    paths = sorted((folder / "sketch").glob("*/*.png"))
    assert found["sketch"]["figure"] == pytest.approx(100 - accuracy(model, paths))
    assert found["sketch"]["examples"] == DOMAINS["sketch"] and found["corruptions"]["examples"] == DOMAINS["photo"]


def test_one_run_needs_a_held_out_domain(folder: Path, tmp_path: Path) -> None:
    (choice,) = parse_routers("xmoe")
    sentence = "data.held_out is missing; for one run, set it to one of art_painting, cartoon, photo, sketch"
    assert_refused(sentence, lambda: SingleRun(small(folder), choice, 0, tmp_path / "run"))


def test_the_held_out_domain_is_an_axis_and_may_be_swept_in_part(folder: Path, tmp_path: Path) -> None:
    from holdfast.train.cells import settings_of

    recipe = small(folder)
    every = Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run")
    assert [dict(cell.settings) for cell in every.cells] == [{"data.held_out": name} for name in DOMAINS]
    swept = settings_of(recipe, {"sparse.k": [1, 2]})
    both = Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run", settings=swept)
    assert len(both.cells) == 8 and dict(both.cells[1].settings) == {"sparse.k": 1, "data.held_out": "cartoon"}
    some = settings_of(recipe, {"data.held_out": ["photo", "sketch"]})
    assert len(Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run", settings=some).cells) == 2
    one = Comparison(small(folder, data__held_out="photo"), parse_routers("smoe"), 1, tmp_path / "run")
    assert [dict(cell.settings) for cell in one.cells] == [{}]
    # All share the domains, which are read once, and each seed has a split of its own.
    tasks: list[Any] = [every.task_of_cell(cell) for cell in every.cells]
    assert {id(task.domain_set) for task in tasks} == {id(tasks[0].domain_set)}
    assert tasks[0].for_seed(1).examples(0).hash(0) != tasks[0].for_seed(2).examples(0).hash(0)
    assert {task.describe()["data"]["checksum"] for task in tasks} == {every.task.describe()["data"]["checksum"]}
    assert [task.describe() for task in tasks] == [every.task.describe()] * 4


def test_validation_is_on_all_held_back_images_of_the_training_domains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageTask, "validation_images", 2)
    task = domain_task(small(folder, data__held_out="photo"))
    held: Any = task.validation()
    assert len(held) == sum(DOMAINS[name] // 5 for name in DOMAINS if name != "photo")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data__held_out": "phto"}, "data.held_out: unknown domain 'phto': did you mean 'photo'?"),
        ({"data__held_out": "photo", "training__batch": 8}, "of the 3 training domains: use a multiple of 3"),
        ({"training__batch": 8}, "with data.held_out=art_painting: training.batch is 8; a batch has as many images of each"),
        ({"task": "images", "data__held_out": "photo"}, "data.held_out is for images of several domains"),
    ],
)
def test_a_wrong_recipe_is_one_sentence_before_training(
    changes: dict[str, Any], sentence: str, folder: Path, tmp_path: Path
) -> None:
    routers = parse_routers("smoe")
    assert_refused(re.escape(sentence), lambda: Comparison(small(folder, **changes), routers, 1, tmp_path / "run").run())
    assert not (tmp_path / "run").exists()


def test_an_unreadable_image_is_one_sentence_before_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "sketch" / "dog" / "zz.jpg").write_bytes(b"GIF89a")
    given, out = options(broken), tmp_path / "run"
    assert main(["compare", "--recipe", "gmoe-tiny", "--routers", "smoe", "--out", str(out), "--set", *given]) != 0
    told = capsys.readouterr().err
    assert "sketch/dog/zz.jpg is not an image that can be read" in told and "Traceback" not in told
    assert not out.exists()
    assert main(["train", "gmoe-tiny", "--out", str(out), "--set", *given, "data.held_out=photo"]) != 0
    assert "sketch/dog/zz.jpg is not an image" in capsys.readouterr().err and not out.exists()


def result(router: str, domain: str, seed: int, error: float, **settings: Any) -> dict[str, Any]:
    return {"router": router, "seed": seed, "clean": {"figure": error}, "settings": {**settings, "data.held_out": domain}}


def test_only_seeds_with_every_domain_are_summarised() -> None:
    results = [result("smoe", domain, seed, 10.0 + seed) for seed in (0, 1, 2) for domain in ("a", "b")]
    results += [result("ac", domain, seed, 20.0 - seed) for seed in (1, 2, 3) for domain in ("a", "b")][:-1]
    smoe, ac = summarise_domains(results, "smoe")
    assert (smoe.seeds, ac.seeds) == ([0, 1, 2], [1, 2])
    assert smoe.mean_difference is None and ac.mean_difference is not None
    assert ac.mean_difference.mean == pytest.approx(statistics.fmean([89 - 81, 88 - 82]) * -1)
    assert summarise_domains([one for one in results if one["settings"]["data.held_out"] == "a"], "smoe") == []
    assert summarise_domains([{**one, "settings": {}} for one in results], "smoe") == []


def test_the_worst_domain_is_that_of_each_seed() -> None:
    results = [result("smoe", "a", 0, 30.0), result("smoe", "b", 0, 10.0), result("smoe", "a", 1, 20.0)]
    results += [result("smoe", "b", 1, 40.0)]
    (row,) = summarise_domains(results, "smoe")
    assert row.worst.mean == pytest.approx((70 + 60) / 2)  # not the worst of the means, 75
    assert row.mean.mean == pytest.approx((80 + 70) / 2)


def test_settings_of_a_sweep_are_summarised_apart() -> None:
    results = [
        result(router, domain, seed, 10.0 + seed + k, **{"sparse.k": k})
        for k in (1, 2)
        for seed in (0, 1)
        for domain in ("a", "b")
        for router in ("smoe", "ac")
    ]
    rows = summarise_domains(results, "smoe")
    assert [(row.settings, row.router) for row in rows] == [
        ({"sparse.k": k}, router) for k in (1, 2) for router in ("smoe", "ac")
    ]
    assert [row.mean.mean for row in rows] == pytest.approx([88.5, 88.5, 87.5, 87.5])


def test_the_recipe_of_gmoe_has_cosine_scores_in_blocks_8_and_10(folder: Path) -> None:
    recipe = load_recipe("gmoe", {"data.source": str(folder), "data.held_out": "photo"})
    task = domain_task(recipe)
    (choice,) = parse_routers("xmoe[width=256,temperature=0.5]")
    with torch.device("meta"):
        model = task.initial_model()
        assert put_router(model, recipe, choice)
    layers = moe_layers(model)
    assert [layer.name for layer in layers] == ["vit.layers.8.mlp", "vit.layers.10.mlp"]
    for layer in layers:
        assert layer.router is not None and isinstance(layer.router.score, Cosine)
        assert layer.router.score.embeddings.shape == (6, 256)
        assert layer.experts.down_proj.shape == (6, 384, 1536)
    assert (model.config.image_size, model.config.num_labels) == (224, 3)


@pytest.mark.slow
@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_gmoe_trains_from_a_checkpoint_and_from_nothing(from_checkpoint: bool, folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"data.source": str(folder), "data.held_out": "sketch", "training.steps": 60}
    dense = domain_task(load_recipe("gmoe-tiny", changes)).initial_model()
    if from_checkpoint:
        dense.save_pretrained(tmp_path / "dense")
        changes |= {"model.checkpoint": str(tmp_path / "dense"), "sparse.hidden": None}
    recipe = load_recipe("gmoe-tiny", changes)
    (choice,) = parse_routers("xmoe")
    task = domain_task(recipe)
    model = build_model(task, choice.router, choice.options, seed=0)
    with torch.no_grad():
        start, before = model.eval()(**task.probe()).logits, dense.eval()(**task.probe()).logits
    # Copies of the feed-forward networks compute what the dense model computes, whichever experts are selected.
    assert torch.allclose(start, before, atol=1e-5) == from_checkpoint
    log = SingleRun(recipe, choice, 0, tmp_path / "run").run()
    losses = [line["loss"] for line in log if "loss" in line]
    assert statistics.fmean(losses[-10:]) < 0.8 * statistics.fmean(losses[:5])
    assert min(line["eval_figure"] for line in log if "eval_figure" in line) < 100 * 2 / 3  # better than one class


@pytest.mark.slow
def test_a_search_takes_the_mean_of_the_held_out_domains(folder: Path, tmp_path: Path) -> None:
    changes = {**SMALL, "data.source": str(folder), "training.steps": 2, "training.warmup": 0}
    found = search("smoe", sweep={"sparse.k": [1, 2]}, rungs=1, changes=changes, recipe="gmoe-tiny", out=tmp_path / "out")
    assert len(list((tmp_path / "out" / "rung-1" / "cells").iterdir())) == 2 * len(DOMAINS)
    for one in found.candidates:
        cells = [read_with_checksum(path) for path in (tmp_path / "out").glob("rung-1/cells/*/result.json")]
        own = [cell for cell in cells if cell["settings"]["sparse.k"] == one.settings["sparse.k"]]
        assert len(own) == len(DOMAINS)
        assert one.figure == pytest.approx(np.mean([cell["clean"]["figure"] for cell in own]))
        assert one.loss == pytest.approx(np.mean([cell["log"][-1]["eval_loss"] for cell in own]))
