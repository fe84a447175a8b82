"""Pictures compared: errors as a plain recount has them, attacks that only ever make things worse, equal conditions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.attacks import AttackedInputs
from holdfast.hub import trace
from holdfast.train import Comparison, Contender, Recipe, contenders, load_recipe, load_trained, make_task, start
from holdfast.train.picture_task import PictureTask, _attacked, error, spread

ROUTERS = "smoe,symphony+smooth"


@pytest.fixture(scope="module")
def run(digits: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "run"
    Comparison(digits(), contenders(ROUTERS), 1, folder).run()
    return folder


@pytest.fixture(scope="module")
def results(run: Path, digits: Callable[..., Recipe]) -> list[dict[str, Any]]:
    return Comparison(digits(), contenders(ROUTERS), 1, run).run()


def pictures(recipe: Recipe) -> PictureTask:
    task = make_task(recipe)
    assert isinstance(task, PictureTask)
    return task


@torch.no_grad()
def said(model: Any, task: PictureTask) -> Tensor:
    """Classes of the test pictures, one picture after the other, made ready as transformers' image processors do it."""
    from transformers.image_transforms import normalize, rescale

    images: Any = task.pictures.images("test")
    found = []
    for values in images.values.numpy():
        ready = normalize(rescale(values, 1 / images.top), mean=[0.5], std=[0.5], input_data_format="channels_first")
        found.append(int(model.eval()(pixel_values=torch.from_numpy(ready.astype(np.float32))[None]).logits.argmax()))
    return torch.tensor(found)


def test_the_clean_error_is_that_of_a_naive_recount(run: Path, results: list[dict[str, Any]]) -> None:
    for result in results:
        trained = load_trained(run / "cells" / f"{result['router']}-seed0")
        task = trained.task()
        assert isinstance(task, PictureTask)
        labels = task.pictures.images("test").labels
        wrong = said(trained.model, task) != labels
        assert result["clean"]["examples"] == len(labels) == 180
        assert result["clean"]["figure"] == pytest.approx(100 * int(wrong.sum()) / len(labels), abs=1e-9)
        assert result["clean"]["top5"] <= result["clean"]["figure"]
        some = spread(len(labels), 24)
        attacked = result["attacked"]
        assert attacked["examples"] == len(some) == 24
        assert attacked["clean_accuracy"] == pytest.approx(1 - float(wrong[some].double().mean()), abs=1e-9)


def test_an_attack_only_ever_makes_things_worse(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name in ("FGSM", "PGD", "SPSA"):
            trial = result["trials"][name]
            assert trial["figure"] >= 100 * (1 - trial["clean_accuracy"]) - 1e-9
            assert 0 < trial["realised"] <= 0.1 + 1e-6
        assert result["trials"]["PGD"]["figure"] > 100 * (1 - result["trials"]["PGD"]["clean_accuracy"])
        assert result["attacked"] == {**result["trials"]["PGD"], "routing": result["attacked"]["routing"]}
        errors = result["trials"]["corruptions"]["each"].values()
        assert result["trials"]["corruptions"]["figure"] == pytest.approx(sum(errors) / len(errors)) and len(errors) > 10


def test_a_budget_of_0_is_no_attack(digits: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = digits({"attack.budget": 0.0, "attack.examples": 999, "training.steps": 2, "attack.steps": 1})
    (result,) = Comparison(recipe, contenders("symphony+smooth"), 1, tmp_path / "run").run()
    for name in ("FGSM", "PGD", "SPSA"):
        assert result["trials"][name]["figure"] == result["clean"]["figure"], name
        assert result["trials"][name]["realised"] == 0
    assert 0 < result["clean"]["figure"] < 100


@pytest.mark.parametrize("count", [7, 180])
def test_an_attack_that_breaks_nothing_has_the_clean_error_to_the_last_digit(count: int) -> None:
    for right in range(count + 1):
        wrong = torch.arange(count) >= right
        nothing = {"budget": 0.0, "norm": "linf", "bounds": None, "steps": 1, "restarts": 1, "seed": None}
        inputs = {"inputs": torch.zeros(count, 1), "distances": torch.zeros(count)}
        result = AttackedInputs(attack="none", success=wrong, already_wrong=wrong, **inputs, **nothing)  # type: ignore[arg-type]
        assert _attacked(result)["figure"] == error(right, count)


def test_a_comparison_of_pictures_gives_the_same_numbers_every_time(
    digits: Callable[..., Recipe], results: list[dict[str, Any]], tmp_path: Path
) -> None:
    again = Comparison(digits(), contenders(ROUTERS), 1, tmp_path / "again").run()
    assert json.dumps(again, sort_keys=True) == json.dumps(results, sort_keys=True)


def test_every_test_picture_is_scored_once(digits: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    task = pictures(digits({"attack.examples": 10}))
    images: Any = task.pictures.images("test")
    fetch, fetched = images.pixels, list[list[int]]()

    def noting(numbers: range) -> Tensor:
        fetched.append(list(numbers))
        found: Tensor = fetch(numbers)
        return found

    monkeypatch.setattr(images, "pixels", noting)
    found = task._clean(start(task, "smoe", {}, seed=0).eval(), images)
    assert sorted(number for numbers in fetched for number in numbers) == list(range(180))
    assert len(fetched) > 1
    tokens = {layer["tokens"] for layer in found["routing"]["layers"]}
    assert tokens == {180 * 17}  # a class token and 16 patches


def test_the_view_has_a_grid_of_experts_over_each_picture(run: Path, results: list[dict[str, Any]]) -> None:
    for result in results:
        trained = load_trained(run / "cells" / f"{result['router']}-seed0")
        task = trained.task()
        assert isinstance(task, PictureTask)
        images = task.pictures.images("test")
        numbers, view = spread(len(images), 8), result["view"]
        assert view["kind"] == "pictures" and len(view["pictures"]) == len(numbers) == 8
        classes = said(trained.model, task)
        for number, shown in zip(numbers, view["pictures"], strict=True):
            assert shown["label"] == str(int(images.labels[number])) and shown["said"] == str(int(classes[number]))
            assert shown["grid"] == [4, 4] and [len(layer) for layer in shown["experts"]] == [16, 16]
            pixels = images.pixels([number])
            torch.testing.assert_close(torch.tensor(shown["pixels"]), pixels[0, 0], atol=6e-4, rtol=0)
            with torch.no_grad(), trace(trained.model.eval()) as routes:
                trained.model(pixel_values=pixels * 2 - 1)
            assert shown["experts"] == [routing.experts[1:, 0].tolist() for routing in routes]  # row by row


def test_a_router_of_strength_0_reproduces_the_baselines_curve_on_pictures_too(
    digits: Callable[..., Recipe], tmp_path: Path
) -> None:
    silent = [
        Contender("similarity, silent", "similarity", {"strength": 0.0}),
        Contender("attention, silent", "attention", {"strength": 0.0}),
        Contender("ac, skipped", "ac", {"skip": 9}),
        Contender("smooth, no budget", "smooth", {"budget": 0.0}),
        Contender("similarity", "similarity"),
    ]
    few = digits({"attack.examples": 4, "attack.steps": 1, "training.steps": 4})
    plain, *others, loud = Comparison(few, [Contender("smoe", "smoe"), *silent], 1, tmp_path / "run").run()
    for result in others:
        assert result["log"] == plain["log"], result["router"]
        assert result["clean"]["figure"] == plain["clean"]["figure"]
    assert loud["log"] != plain["log"]
    assert len({(result["first_batch"], result["last_batch"]) for result in (plain, *others, loud)}) == 1
    assert plain["first_batch"] != plain["last_batch"]


def test_what_routers_have_in_common_starts_equal_and_seeds_see_orders_of_their_own(digits: Callable[..., Recipe]) -> None:
    task = pictures(digits())
    plain = dict(start(task, "smoe", {}, seed=3).named_parameters())
    for name in ("ac", "symphony+smooth", "similarity"):
        for key, parameter in start(task, name, {}, seed=3).named_parameters():
            twin = plain.get(key.replace(".score.base.", ".score."))
            assert twin is None or torch.equal(parameter, twin), (name, key)
    assert task.examples(0).hash(0) != task.examples(1).hash(0)
    assert task.examples(0).hash(5) == pictures(digits()).examples(0).hash(5)


def test_a_few_pictures_of_many_are_of_every_class() -> None:
    """Folders are sorted by class: the first pictures would all be of one."""
    classes = [number // 50 for number in range(1000)]
    assert {classes[number] for number in spread(1000, 40)} == set(range(20))
    for count, wanted in ((7, 3), (7, 7), (7, 9), (1, 5)):
        numbers = spread(count, wanted)
        assert len(set(numbers)) == len(numbers) == min(count, wanted) and set(numbers) <= set(range(count))
        assert numbers == sorted(numbers)


def test_held_out_pictures_are_not_test_pictures(digits: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.picture_task.CHOSEN_BY", 30)
    task = pictures(digits())
    held: Any = task.validation()
    batch = held.__getitems__(list(range(len(held))))
    valid = task.pictures.images("valid")
    assert len(held) == 30 < len(valid)
    torch.testing.assert_close(batch["pixel_values"] / 2 + 0.5, valid.pixels(spread(len(valid), 30)))
    assert torch.equal(batch["labels"], valid.labels[spread(len(valid), 30)])


def test_a_model_of_other_classes_is_not_tried_on_these(run: Path) -> None:
    trained = load_trained(run / "cells" / "smoe-seed0")
    trained.record.state["classes"] = ["cat", "dog"]
    with pytest.raises(ValueError, match=r"classes.*digits"):
        trained.task()


def test_pictures_that_are_no_squares_get_one_sentence(
    digits: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = pictures(digits())
    monkeypatch.setattr(task.pictures.images("train"), "shape", (1, 8, 9))
    with pytest.raises(ValueError, match="8 x 9"):
        task.dense()


def test_pictures_of_too_many_patches_are_refused_before_training(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(12):
        path = tmp_path / "pictures" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    source = {"data.source": str(tmp_path / "pictures")}
    with pytest.raises(ValueError, match=r"12,544 patches.*data\.size.*128"):
        make_task(load_recipe("vmoe-tiny", source)).dense()
    make_task(load_recipe("vmoe-tiny", {**source, "data.size": 8})).dense()
