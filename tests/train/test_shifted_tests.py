"""Shifted test sets: folders laid out as ImageNet-A, -R, -O and -C, a thousand-class head, numbers recounted by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from PIL import Image
from train.conftest import MakeRecipe
from wording import assert_refused

from holdfast.attacks import CORRUPTIONS, corrupt
from holdfast.data.images import ArrayImages
from holdfast.metrics.tasks import ALEXNET_ERRORS
from holdfast.train import Comparison, make_task, parse_routers
from holdfast.train.image_attacks import Classifier, error_of, wrong_of
from holdfast.train.image_task import ImageTask
from holdfast.train.shifted_tests import ShiftedTests, recognise_all
from holdfast.train.task import evenly_spaced
from holdfast_command import main

IDS = [f"n{10_000_000 + 13 * number:08}" for number in range(1000)]  # sorted, as the outputs of ImageNet's models are
SOME = [IDS[number] for number in (7, 123, 124, 500, 999)]
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**small, image_size=8, patch_size=4, id2label=dict(enumerate(IDS)))
    found = ViTForImageClassification(config).eval()
    torch.nn.init.normal_(found.classifier.weight, std=3.0)  # so that images get different answers
    torch.nn.init.normal_(found.classifier.bias, std=1.0)
    return found


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    model.save_pretrained(folder)
    return folder


def write(place: Path, classes: list[str], each: int) -> None:
    """Write random 8 x 8 images of very different brightness."""
    for name in classes:
        (place / name).mkdir(parents=True)
        for number in range(each):
            low, high = sorted(RANDOM.integers(0, 256, 2))
            values = RANDOM.integers(low, high + 1, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(values).save(place / name / f"{number}.png")


@torch.no_grad()
def logits_of(model: Any, path: Path) -> list[float]:
    values = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1).float() / 255
    return [float(value) for value in model(pixel_values=(values[None] - 0.5) / 0.5).logits[0]]


def error_by_hand(model: Any, place: Path, classes: list[str]) -> float:
    """Return the error in per cent if the answer is one of `classes`, image by image."""
    numbers = [IDS.index(name) for name in classes]
    wrong = [
        max(numbers, key=logits_of(model, path).__getitem__) != IDS.index(path.parent.name) for path in place.glob("*/*.png")
    ]
    return 100 * sum(wrong) / len(wrong)


def confidence_by_hand(model: Any, path: Path, classes: list[str]) -> float:
    values = np.exp([logits_of(model, path)[IDS.index(name)] for name in classes])
    return float(values.max() / values.sum())


def evaluated(command: Command, out: Path, *arguments: str) -> dict[str, Any]:
    done = command("evaluate", *arguments, "--out", str(out), "--force", columns=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())["shifts"]
    return found


def move_some_to_their_prediction(model: Any, place: Path) -> None:
    """Put every second image into the folder of its largest logit among the folder's classes, so that some are right."""
    numbers = [IDS.index(name) for name in SOME]
    for count, path in enumerate(sorted(place.glob("*/*.png"))):
        if count % 2 == 0:
            found = max(numbers, key=logits_of(model, path).__getitem__)
            path.rename(place / IDS[found] / f"moved{count}.png")


def test_a_subset_of_classes_is_scored_on_its_own_logits(model: Any, saved: Path, tmp_path: Path, command: Command) -> None:
    for name in ("imagenet-a", "imagenet-r"):
        write(tmp_path / name, SOME, 4)
        move_some_to_their_prediction(model, tmp_path / name)
    folders = [tmp_path / "imagenet-a", tmp_path / "imagenet-r"]
    found = evaluated(command, tmp_path / "out.json", str(saved), "--shift", *map(str, folders))
    for folder in folders:
        error = error_by_hand(model, folder, SOME)
        assert found[folder.name]["figure"] == pytest.approx(error) and 0 < error < 100
        assert found[folder.name]["accuracy"] == pytest.approx(1 - error / 100)
        assert found[folder.name]["examples"] == 20 and found[folder.name]["classes"] == 5
        assert error_by_hand(model, folder, IDS) > error  # without the mask, other classes win


def test_outliers_are_told_from_test_images_of_the_same_classes(
    model: Any, saved: Path, tmp_path: Path, command: Command
) -> None:
    from sklearn.metrics import average_precision_score

    write(tmp_path / "imagenet-o", SOME, 3)
    write(tmp_path / "val", [*SOME, *IDS[600:605]], 3)
    given = [str(saved), "--source", str(tmp_path / "val"), "--shift", str(tmp_path / "imagenet-o")]
    found = evaluated(command, tmp_path / "out.json", *given)
    scores, is_outlier = [], []
    for place in ("imagenet-o", "val"):
        for path in (path for name in SOME for path in (tmp_path / place / name).glob("*.png")):
            scores.append(-confidence_by_hand(model, path, SOME))
            is_outlier.append(place == "imagenet-o")
    assert found["imagenet-o"]["figure"] == pytest.approx(100 * average_precision_score(is_outlier, scores))
    assert (found["imagenet-o"]["examples"], found["imagenet-o"]["in_distribution"]) == (15, 15)
    assert found["clean"]["examples"] == 30


def test_imagenet_o_without_a_class_of_the_model_is_told_from_all_classes_if_it_is_declared(tmp_path: Path) -> None:
    """A model of a few classes has none of ImageNet-O's; the error names what to write, and that works."""
    from sklearn.metrics import average_precision_score

    write(tmp_path / "imagenet-o", ["n01440764", "n01443537"], 4)
    values = torch.randint(256, (12, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    clean = ArrayImages(values, torch.arange(12) % 5)
    place = tmp_path / "imagenet-o"
    with pytest.raises(ValueError, match=f"no class in common with the model; .* write outliers={place}.$"):
        ShiftedTests(recognise_all([str(place)]), SOME, (3, 8, 8), clean=clean)
    # Small enough that no confidence is rounded to 1: tied confidences would be sorted by the rounding of the batch.
    weights = 0.05 * torch.randn(192, 5, generator=torch.Generator().manual_seed(1))

    def classify(pixels: torch.Tensor) -> torch.Tensor:
        return pixels.flatten(1) @ weights

    tests = ShiftedTests(recognise_all([f"outliers={place}"]), SOME, (3, 8, 8), clean=clean)
    found = tests.score(classify, torch.device("cpu"))["imagenet-o"]
    outliers = [torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in sorted(place.glob("*/*.png"))]
    images = torch.cat([values, torch.stack(outliers)]).float() / 255
    confidence = classify(images).softmax(-1).amax(-1)
    expected = average_precision_score([0] * 12 + [1] * 8, (-confidence).tolist())
    assert found["figure"] == pytest.approx(100 * expected)
    assert (found["examples"], found["in_distribution"], found["classes"]) == (8, 12, 5)


def test_all_corruptions_of_imagenet_c_give_mce(model: Any, saved: Path, tmp_path: Path, command: Command) -> None:
    classes, folder = SOME[:3], tmp_path / "c"
    groups = {"noise": 0, "blur": 1}  # the published archives have a folder for each group
    for number, corruption in enumerate(ALEXNET_ERRORS):
        for severity in range(1, 6):
            place = folder / [*groups][number % 2] / corruption / str(severity)
            write(place, classes, 1)
    write(tmp_path / "val", classes, 3)
    given = [str(saved), "--source", str(tmp_path / "val"), "--shift", str(folder)]
    found = evaluated(command, tmp_path / "out.json", *given)["c"]
    clean, ratios, relative = error_by_hand(model, tmp_path / "val", classes), [], []
    for corruption, of_alexnet in ALEXNET_ERRORS.items():
        errors = [error_by_hand(model, place, classes) for place in folder.glob(f"*/{corruption}/*")]
        assert len(errors) == 5 and sorted(found["errors"][corruption].values()) == pytest.approx(sorted(errors))
        ratios.append(sum(errors) / 5 / of_alexnet)
        relative.append((sum(errors) / 5 - clean) / (of_alexnet - 43.5))
    assert found["measure"] == "mCE, %" and found["figure"] == pytest.approx(100 * sum(ratios) / 15)
    assert found["relative_mce"] == pytest.approx(100 * sum(relative) / 15)
    assert found["clean"] == pytest.approx(clean)
    assert "cannot be compared" in found["note"]


def test_classes_with_names_are_found_through_a_class_index(
    model: Any, tmp_path: Path, command: Command, saved: Path
) -> None:
    """Two classes have one name, as the two cranes of ImageNet; their place tells them apart."""
    import copy

    names = ["crane" if number in (123, 500) else f"thing {number}, other word" for number in range(1000)]
    named = copy.deepcopy(model)
    named.config.id2label = dict(enumerate(names))
    named.save_pretrained(tmp_path / "named")
    index = tmp_path / "index.txt"
    index.write_text("".join(f"{one} {name}\n" for one, name in zip(IDS, names, strict=True)))
    write(tmp_path / "imagenet-a", SOME, 2)
    move_some_to_their_prediction(model, tmp_path / "imagenet-a")
    shift = ["--shift", str(tmp_path / "imagenet-a")]
    with_ids = evaluated(command, tmp_path / "a.json", str(saved), *shift)
    with_names = evaluated(command, tmp_path / "b.json", str(tmp_path / "named"), *shift, "--class-index", str(index))
    assert with_names == with_ids
    refused = command("evaluate", str(tmp_path / "named"), *shift)
    assert refused.returncode != 0 and "--class-index" in refused.stderr and "Traceback" not in refused.stderr


@pytest.fixture
def sparse_with_names(model: Any, tmp_path: Path) -> tuple[str, list[str], str]:
    """Return an MoE with class names, --source with images in folders that are named by id, and the class index."""
    import copy

    import holdfast

    names = [f"thing {number}" for number in range(1000)]
    named = copy.deepcopy(model)
    named.config.id2label = dict(enumerate(names))
    holdfast.save(holdfast.sparsify(named, experts=3, k=1), tmp_path / "sparse")
    (tmp_path / "index.txt").write_text("".join(f"{one} {name}\n" for one, name in zip(IDS, names, strict=True)))
    write(tmp_path / "some", SOME, 2)
    return str(tmp_path / "sparse"), ["--source", str(tmp_path / "some")], str(tmp_path / "index.txt")


@pytest.mark.parametrize(
    "options",
    [
        ["attack", "fgsm", "--budget", "0.01"],
        pytest.param(["audit"], marks=pytest.mark.slow),
        ["certify"],
        pytest.param(["geometry"], marks=pytest.mark.slow),
    ],
    ids=lambda options: options[0],
)
def test_other_commands_read_a_class_index_too(
    options: list[str], sparse_with_names: tuple[str, list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *further = options
    model, source, index = sparse_with_names
    assert main([name, model, *further, *source]) != 0
    assert "--class-index" in capsys.readouterr().err
    assert main([name, model, *further, *source, "--class-index", index]) == 0


def test_wrong_folders_are_refused_with_one_sentence(saved: Path, tmp_path: Path, command: Command) -> None:
    write(tmp_path / "other", ["n00000001", "n00000002"], 1)
    write(tmp_path / "more", [*SOME, "n00000001"], 1)
    write(tmp_path / "imagenet-o", SOME, 1)
    (tmp_path / "empty").mkdir()
    for folder, words in {
        "other": "no class in common",
        "more": "classes that the model does not have, 1 of 6: n00000001",
        "imagenet-o": "add --source",
        "empty": "no class folders",
        "missing": "is not a folder",
    }.items():
        done = command("evaluate", str(saved), "--shift", str(tmp_path / folder), columns=400)
        assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr, folder
        assert len(done.stderr.strip().splitlines()) == 1, folder


def test_a_folder_without_splits_is_tested_as_a_whole(saved: Path, tmp_path: Path, command: Command) -> None:
    write(tmp_path / "photos", SOME, 4)
    few = ["--source", str(tmp_path / "photos"), "--out", str(tmp_path / "out.json")]
    done = command("evaluate", str(saved), *few, columns=200)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["clean"]["examples"] == 20


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for split, each in (("train", 12), ("test", 4)):
        write(folder / split, ["cat", "dog", "ship"], each)
    write(tmp_path / "drawings", ["cat", "ship"], 3)
    return folder


SMALL = {"data.size": 8, "training.steps": 3, "training.batch": 8, "attack.steps": 1, "attack.examples": 6}


@pytest.mark.slow
def test_a_comparison_scores_shifted_tests_and_compares_them_by_seed(
    digits: MakeRecipe, image_folder: Path, tmp_path: Path
) -> None:
    from holdfast.report import render

    shifts = {"data.source": f"{image_folder}/", "data.shifts": [str(tmp_path / "drawings"), "corruptions"]}
    recipe = digits({**SMALL, **shifts})
    comparison = Comparison(recipe, parse_routers("smoe,symphony"), 2, tmp_path / "run")
    results = comparison.run()
    finished = comparison.finish(results)
    figures = {(one["router"], one["seed"]): one["shifts"]["drawings"]["figure"] for one in results}
    differences = [figures["symphony", seed] - figures["smoe", seed] for seed in (0, 1)]
    baseline, found = (row.shifts["drawings"].difference for row in finished.rows)
    assert found is not None and found.mean == pytest.approx(sum(differences) / 2) and found.seeds == 2
    assert baseline is None
    page = render(finished)
    assert "Shifted test sets" in page and "drawings, error, %" in page
    made = results[0]["shifts"]["corruptions"]["errors"]
    assert set(made) == set(CORRUPTIONS)
    worst = {name: errors["5"] for name, errors in made.items()}
    assert worst == pytest.approx(results[0]["trials"]["corruptions"]["each"])  # a path of its own, at severity 5


def test_shifts_of_a_recipe_are_checked_before_training(digits: MakeRecipe, image_folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "plants", ["oak", "rose"], 1)
    with pytest.raises(ValueError, match="no class in common"):
        make_task(digits({**SMALL, "data.source": f"{image_folder}/", "data.shifts": [str(tmp_path / "plants")]}))
    assert_refused("colour images", lambda: make_task(digits({"data.shifts": [str(tmp_path / "drawings")]})))
    assert_refused("given twice", lambda: make_task(digits({"data.shifts": ["corruptions", "corruptions"]})))


@pytest.mark.slow
def test_corruptions_equal_a_naive_loop(digits: MakeRecipe) -> None:
    """The digits are more than one batch."""
    from holdfast.train import build_model

    task = make_task(digits({"data.shifts": ["corruptions"], "attack.examples": 100}))
    assert isinstance(task, ImageTask) and task.shifts is not None
    model = build_model(task, "smoe", {}, seed=0).eval()
    classify = Classifier(model, task.scaling)
    found = task.shifts.score(classify, model.device)["corruptions"]
    images = task.image_set.images("test")
    numbers = evenly_spaced(len(images), task.recipe.attack.examples)
    pixels, labels = images.pixels(numbers), images.labels[numbers]
    naive = {
        name: error_of(wrong_of(classify, corrupt(pixels, name, severity=3, seed=0).images, labels)) for name in CORRUPTIONS
    }
    assert {name: errors["3"] for name, errors in found["errors"].items()} == pytest.approx(naive)
    assert found["examples"] == 100 == len(numbers)


def test_a_folder_that_a_model_was_trained_on_is_still_split(digits: MakeRecipe, tmp_path: Path) -> None:
    from holdfast.train import load_trained

    write(tmp_path / "images", ["cat", "dog", "ship"], 30)
    source = f"{tmp_path / 'images'}/"
    recipe = digits({**SMALL, "data.source": source, "data.shifts": []})
    Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run").run()
    trained = load_trained(tmp_path / "run" / "cells" / "smoe-seed0")
    split, own = make_task(recipe), trained.task(source=source)
    assert isinstance(own, ImageTask) and isinstance(split, ImageTask)
    assert len(own.image_set.images("test")) == len(split.image_set.images("test")) < 30
    (tmp_path / "images" / "cat" / "0.png").unlink()  # other images now: all of them are test images
    other = trained.task(source=source)
    assert isinstance(other, ImageTask) and len(other.image_set.images("test")) == 89
