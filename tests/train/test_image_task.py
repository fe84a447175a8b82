"""Comparisons on images: errors equal a naive recount, attacks never reduce the error, conditions are equal."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train.conftest import MakeRecipe
from wording import assert_refused

from holdfast.attacks import AttackedInputs
from holdfast.hub import trace
from holdfast.train import Comparison, Recipe, build_model, load_trained, make_task, parse_routers
from holdfast.train.image_attacks import attacked
from holdfast.train.image_task import ImageTask, image_batches
from holdfast.train.task import evenly_spaced

ROUTERS = "smoe,symphony+smooth"


@pytest.fixture(scope="module")
def run(digits: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "run"
    Comparison(digits(), parse_routers(ROUTERS), 1, folder).run()
    return folder


@pytest.fixture(scope="module")
def results(run: Path, digits: MakeRecipe) -> list[dict[str, Any]]:
    return Comparison(digits(), parse_routers(ROUTERS), 1, run).run()


def image_task(recipe: Recipe) -> ImageTask:
    task = make_task(recipe)
    assert isinstance(task, ImageTask)
    return task


@torch.no_grad()
def said(model: Any, task: ImageTask, numbers: Sequence[int]) -> Tensor:
    """Return the predicted classes of these test images, one by one, normalised as by transformers' image processors."""
    from transformers.image_transforms import normalize, rescale

    images: Any = task.image_set.images("test")
    found = []
    for values in images.values[list(numbers)].numpy():
        ready = normalize(rescale(values, 1 / images.top), mean=[0.5], std=[0.5], input_data_format="channels_first")
        found.append(int(model.eval()(pixel_values=torch.from_numpy(ready.astype(np.float32))[None]).logits.argmax()))
    return torch.tensor(found)


def test_the_clean_error_is_that_of_a_naive_recount(run: Path, results: list[dict[str, Any]]) -> None:
    for result in results[1:]:  # one model: 180 forwards of one image each
        trained = load_trained(run / "cells" / f"{result['router']}-seed0")
        task = trained.task()
        assert isinstance(task, ImageTask)
        labels = task.image_set.images("test").labels
        wrong = said(trained.model, task, range(len(labels))) != labels
        assert result["clean"]["examples"] == len(labels) == 180
        assert result["clean"]["figure"] == pytest.approx(100 * int(wrong.sum()) / len(labels), abs=1e-9)
        assert result["clean"]["top5"] <= result["clean"]["figure"]
        some = evenly_spaced(len(labels), 24)
        attacked = result["attacked"]
        assert attacked["examples"] == len(some) == 24
        assert attacked["clean_accuracy"] == pytest.approx(1 - float(wrong[some].double().mean()), abs=1e-9)


def test_an_attack_never_reduces_the_error(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name in ("FGSM", "PGD", "SPSA"):
            trial = result["trials"][name]
            assert trial["figure"] >= 100 * (1 - trial["clean_accuracy"]) - 1e-9
            assert 0 < trial["realised"] <= 0.1 + 1e-6
        assert result["trials"]["PGD"]["figure"] > 100 * (1 - result["trials"]["PGD"]["clean_accuracy"])
        assert result["attacked"] == {**result["trials"]["PGD"], "routing": result["attacked"]["routing"]}
        errors = result["trials"]["corruptions"]["each"].values()
        assert result["trials"]["corruptions"]["figure"] == pytest.approx(sum(errors) / len(errors)) and len(errors) > 10


@pytest.mark.slow
def test_a_budget_of_0_is_no_attack(digits: MakeRecipe, tmp_path: Path) -> None:
    recipe = digits({"attack.budget": 0.0, "attack.examples": 999, "training.steps": 2, "attack.steps": 1})
    (result,) = Comparison(recipe, parse_routers("symphony+smooth"), 1, tmp_path / "run").run()
    for name in ("FGSM", "PGD", "SPSA"):
        assert result["trials"][name]["figure"] == result["clean"]["figure"], name
        assert result["trials"][name]["realised"] == 0
    assert 0 < result["clean"]["figure"] < 100


@pytest.mark.parametrize("count", [7, 180])
def test_an_attack_without_effect_has_exactly_the_clean_error(count: int) -> None:
    for right in range(count + 1):
        wrong = torch.arange(count) >= right
        nothing = {"budget": 0.0, "norm": "linf", "bounds": None, "steps": 1, "restarts": 1, "seed": None}
        inputs = {"inputs": torch.zeros(count, 1), "distances": torch.zeros(count)}
        result = AttackedInputs(attack="none", success=wrong, already_wrong=wrong, **inputs, **nothing)  # type: ignore[arg-type]
        assert attacked(result)["figure"] == 100 * (1 - right / count)


def test_every_test_image_is_scored_once(digits: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    task = image_task(digits({"attack.examples": 10}))
    images: Any = task.image_set.images("test")
    fetch, fetched = images.pixels, list[list[int]]()

    def noting(numbers: range) -> Tensor:
        fetched.append(list(numbers))
        found: Tensor = fetch(numbers)
        return found

    monkeypatch.setattr(images, "pixels", noting)
    model = build_model(task, "smoe", {}, seed=0).eval()
    found = task._measured(model, image_batches(images, range(len(images)), 64))
    assert sorted(number for numbers in fetched for number in numbers) == list(range(180))
    assert len(fetched) > 1
    tokens = {layer["tokens"] for layer in found["routing"]["layers"]}
    assert tokens == {180 * 17}  # a class token and 16 patches


def test_the_view_has_a_grid_of_experts_for_each_image(run: Path, results: list[dict[str, Any]]) -> None:
    for result in results:
        trained = load_trained(run / "cells" / f"{result['router']}-seed0")
        task = trained.task()
        assert isinstance(task, ImageTask)
        images = task.image_set.images("test")
        numbers, view = evenly_spaced(len(images), 8), result["view"]
        layers = view["routes"]["layers"]
        assert len(view["examples"]) == len(numbers) == 8
        classes = said(trained.model, task, numbers)
        for place, (number, example, found) in enumerate(zip(numbers, view["examples"], classes, strict=True)):
            shown, patches = example["picture"], slice(16 * place, 16 * place + 16)
            assert shown["label"] == str(int(images.labels[number])) and shown["said"] == str(int(found))
            assert shown["grid"] == [4, 4] and [len(layer["experts"]) for layer in layers] == [128, 128]
            pixels = images.pixels([number])
            grey = torch.tensor(list(base64.b64decode(shown["pixels"]))).view(-1, shown["width"]) / 255
            torch.testing.assert_close(grey, pixels[0, 0], atol=2e-3, rtol=0)
            with torch.no_grad(), trace(trained.model.eval()) as routes:
                trained.model(pixel_values=pixels * 2 - 1)
            for layer, routing in zip(layers, routes, strict=True):  # row by row
                used = zip(routing.experts[1:].tolist(), routing.used[1:].sum(-1).tolist(), strict=True)
                assert layer["experts"][patches] == [experts[:count] for experts, count in used]
                weights = [weight / 1000 for selected in layer["weights"][patches] for weight in selected]
                assert weights == pytest.approx(routing.weights[1:][routing.used[1:]].tolist(), abs=6e-4)


def test_evenly_spaced_images_are_of_every_class() -> None:
    """Folders are sorted by class: the first images would all be of one."""
    classes = [number // 50 for number in range(1000)]
    assert {classes[number] for number in evenly_spaced(1000, 40)} == set(range(20))
    for count, wanted in ((7, 3), (7, 7), (7, 9), (1, 5)):
        numbers = evenly_spaced(count, wanted)
        assert len(set(numbers)) == len(numbers) == min(count, wanted) and set(numbers) <= set(range(count))
        assert numbers == sorted(numbers)


def test_held_out_images_are_not_test_images(digits: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageTask, "validation_images", 30)
    task = image_task(digits())
    held: Any = task.validation()
    batch = held.__getitems__(list(range(len(held))))
    valid = task.image_set.images("valid")
    assert len(held) == 30 < len(valid)
    torch.testing.assert_close(batch["pixel_values"] / 2 + 0.5, valid.pixels(evenly_spaced(len(valid), 30)))
    assert torch.equal(batch["labels"], valid.labels[evenly_spaced(len(valid), 30)])


def test_a_model_of_other_classes_is_not_evaluated_on_these(run: Path) -> None:
    trained = load_trained(run / "cells" / "smoe-seed0")
    trained.record.state["classes"] = ["cat", "dog"]
    assert_refused(r"classes.*digits", trained.task)


def test_images_that_are_not_square_raise_an_error(digits: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    task = image_task(digits())
    monkeypatch.setattr(task.image_set.images("train"), "shape", (1, 8, 9))
    assert_refused("8 x 9", task.initial_model)
