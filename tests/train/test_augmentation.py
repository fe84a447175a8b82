"""Augmented images follow from the seed and the step alone, equal a naive recount, and train with the right loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import Interrupted, stop_at
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from train.conftest import AUGMENT, MakeRecipe
from wording import assert_refused

from holdfast.data import Order, PixelScaling
from holdfast.data.draws import Draws, ManyDraws
from holdfast.data.images import ArrayImages, FileImages
from holdfast.train import Comparison, Recipe, build_model, load_recipe, make_task, parse_routers
from holdfast.train.augmentation import AugmentedImages, MovedImages, crop_box, mixing_term, soft_labels
from holdfast.train.recipe import AugmentPart, parse_router
from holdfast.train.training import SingleRun

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
CASES: dict[str, dict[str, Any]] = {
    "crop": {"crop": 0.08},
    "pad": {"pad": 4},
    "flip": {"flip": True},
    "randaugment": {"randaugment": 9},
    "erase": {"erase": 0.5},
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
    "all": AUGMENT,
}


def augmented(recipe: Recipe, seed: int = 0) -> Any:
    return make_task(recipe).examples(seed)


@pytest.mark.parametrize("case", CASES)
def test_images_follow_from_the_seed_and_the_step(case: str, digits: MakeRecipe) -> None:
    recipe = digits({"training.augment": CASES[case], "training.batch": 16})
    examples, again = augmented(recipe), augmented(recipe)
    later = examples.__getitems__(range(32, 48))  # first, as in a run that is resumed
    first = again.__getitems__(range(16))
    assert all(torch.equal(value, again.__getitems__(range(32, 48))[key]) for key, value in later.items())
    # However the batch is split: over micro-batches of another size, and over ranks.
    parts = [examples.__getitems__(range(start, stop)) for start, stop in ((0, 3), (3, 11), (11, 16))]
    assert all(torch.equal(torch.cat([part[key] for part in parts]), value) for key, value in first.items())
    assert examples.hash(1) == again.hash(1) != augmented(recipe, seed=1).hash(1)
    plain = augmented(digits({"training.batch": 16}))
    assert torch.equal(plain.__getitems__(range(16))["labels"], first["labels"])
    changed = (plain.__getitems__(range(64))["pixel_values"] - examples.__getitems__(range(64))["pixel_values"]).abs()
    assert float((changed.amax((1, 2, 3)) > 0.05).float().mean()) > 0.3
    assert float(first["pixel_values"].abs().max()) <= 1


def test_an_example_is_changed_anew_in_every_epoch() -> None:
    images = ArrayImages(torch.arange(4 * 64, dtype=torch.uint8).view(4, 1, 8, 8), torch.arange(4))
    augmented = AugmentedImages(images, PixelScaling(), AugmentPart(crop=0.3), batch=4, seed=0)
    order = Order(4, 4, seed=0)
    epochs = [augmented(order, range(4 * epoch, 4 * epoch + 4)) for epoch in range(3)]
    shown = [one["pixel_values"][one["labels"].argsort()] for one in epochs]
    assert not torch.equal(shown[0], shown[1]) and not torch.equal(shown[1], shown[2])


@pytest.mark.parametrize("given", [{"pad": 4}, {"flip": True}, {"pad": 3, "flip": True}, {"pad": 40, "flip": True}], ids=str)
@pytest.mark.parametrize(("channels", "top"), [(1, 16), (3, 255)])
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_images_moved_on_a_device_are_those_of_the_host_to_the_bit(
    place: str, channels: int, top: int, given: dict[str, Any]
) -> None:
    source, device = torch.Generator().manual_seed(0), torch.device(place)
    values = torch.randint(top + 1, (61, channels, 13, 11), generator=source, dtype=torch.uint8)
    images = ArrayImages(values, torch.randint(10, (61,), generator=source), top)
    scaling = PixelScaling((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)) if channels == 3 else PixelScaling()
    on_host = AugmentedImages(images, scaling, AugmentPart(**given), batch=16, seed=5)
    on_device = on_host.on(device)
    assert isinstance(on_device, MovedImages)
    for places in (range(16), range(48, 80), [7, 3, 2**40]):
        expected, found = on_host(Order(61, 16, seed=5), places), on_device(Order(61, 16, seed=5), places)
        assert expected.keys() == found.keys() and all(value.device.type == place for value in found.values())
        assert all(torch.equal(value, found[key].cpu()) for key, value in expected.items())


@pytest.mark.parametrize("case", CASES)
def test_examples_on_a_gpu_are_made_there_if_pixels_only_move(case: str, digits: MakeRecipe) -> None:
    """`Examples.on` passes the device on; the loop calls it with that of the model. `meta` stands for a GPU."""
    examples = augmented(digits({"training.augment": CASES[case]}))
    assert examples.on(torch.device("cpu")) is examples
    assert isinstance(examples.on(torch.device("meta")).fetch, MovedImages if case in ("pad", "flip") else AugmentedImages)


def test_many_draws_are_those_of_each_key() -> None:
    last = [0, 1, 511, 2**40, 2**64 - 1]
    many, single = ManyDraws(3, 1, last=last), [Draws(3, 1, number) for number in last]
    for count in (1, 9, 81, 2**32 - 1):
        assert many.below(count).tolist() == [draws.below(count) for draws in single]
        assert many.uniform().tolist() == [draws.uniform() for draws in single]
        assert many.bits().tolist() == [draws.bits() for draws in single]


def naive_mixing(images: Tensor, labels: Tensor, part: AugmentPart, number: int) -> tuple[Tensor, Tensor]:
    """Return a micro-batch mixed with its reverse, image by image and pixel by pixel, and (B,10) targets."""
    draws, mixed, targets = Draws(0, 2, number), images.clone(), torch.zeros(len(labels), 10)
    is_mixup = bool(part.mixup) and not (part.cutmix and draws.uniform() < 0.5)
    share = draws.symmetric_beta(part.mixup if is_mixup else part.cutmix)
    side = images.shape[-1]
    if not is_mixup:
        cut, x, y = int(side * share**0.5) // 2, draws.below(side), draws.below(side)
        inside = [(v, u) for v in range(side) for u in range(side) if y - cut <= v < y + cut and x - cut <= u < x + cut]
        share = len(inside) / side**2
    for row in range(len(labels)):
        other = len(labels) - 1 - row
        if is_mixup:
            mixed[row] = (1 - share) * images[row] + share * images[other]
        else:
            for v, u in inside:
                mixed[row, :, v, u] = images[other, :, v, u]
        targets[row, labels[row]] += 1 - share
        targets[row, labels[other]] += share
    return mixed, targets


@pytest.mark.parametrize("case", ["mixup", "cutmix", "both"])
def test_images_are_mixed_as_a_loop_mixes_them(case: str, digits: MakeRecipe) -> None:
    given = {"mixup": 0.8, "cutmix": 1.0} if case == "both" else CASES[case]
    single = augmented(digits({"training.augment": {"flip": True}, "training.batch": 7}))
    mixed = augmented(digits({"training.augment": {"flip": True, **given}, "training.batch": 7}))
    shares = set()
    for number in range(12):
        places = range(7 * number, 7 * number + 7)
        before, found = single.__getitems__(places), mixed.__getitems__(places)
        pixels, targets = naive_mixing(before["pixel_values"], before["labels"], AugmentPart(**given), number)
        torch.testing.assert_close(found["pixel_values"], pixels, atol=1e-6, rtol=0)
        share = found["second_shares"][:, None]
        soft = (1 - share) * one_hot(found["labels"], 10) + share * one_hot(found["second_labels"], 10)
        torch.testing.assert_close(soft, targets)
        shares.add(round(float(share[0]), 3))
    assert len(shares) > 6 and min(shares) < 0.3 and max(shares) > 0.5


def test_a_crop_of_an_array_is_that_of_pillow() -> None:
    source = np.random.default_rng(0)
    smooth = np.kron(source.integers(0, 256, (6, 5, 5, 3)), np.ones((1, 6, 6, 1))).astype(np.uint8)
    images = ArrayImages(torch.from_numpy(smooth).permute(0, 3, 1, 2).contiguous(), torch.zeros(6, dtype=torch.int64))
    boxes = [crop_box(Draws(row), 30, 30, 0.08) for row in range(6)]
    found = images.crops(range(6), lambda row, width, height: boxes[row])
    for row, (left, top, width, height) in enumerate(boxes):
        box = (left, top, left + width, top + height)
        expected = np.array(Image.fromarray(smooth[row]).resize((30, 30), Image.Resampling.BILINEAR, box=box))
        assert np.array_equal(found[row].permute(1, 2, 0).numpy(), expected)


def test_a_crop_of_a_file_is_of_the_whole_image(tmp_path: Path) -> None:
    """And not of the scaled central square that evaluation reads."""
    wide = np.zeros((40, 100, 3), dtype=np.uint8)
    wide[:, 90:] = 255
    Image.fromarray(wide).save(tmp_path / "wide.png")
    images = FileImages([tmp_path / "wide.png"], [0], 16)
    seen = []

    def right_end(row: int, width: int, height: int) -> tuple[int, int, int, int]:
        seen.append((width, height))
        return 90, 0, 10, 40

    found = images.crops([0], right_end)
    assert seen == [(100, 40)] and found.shape == (1, 3, 16, 16) and int(found.min()) > 100
    assert images.sides([0]) == [40] and float(images.pixels([0]).max()) == 0


def test_boxes_have_the_area_and_the_ratio_that_are_asked_for() -> None:
    for width, height in ((50, 40), (32, 32), (200, 10)):
        for key in range(300):
            left, top, across, down = crop_box(Draws(key), width, height, 0.25)
            assert left >= 0 and top >= 0 and left + across <= width and top + down <= height
            if (width, height) != (200, 10):  # otherwise no box fits, and the central square is used
                assert 0.2 < across * down / (width * height) <= 1 and 0.7 < across / down < 1.4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_labels_is_that_of_soft_targets(smoothing: float, digits: MakeRecipe) -> None:
    task = make_task(digits({"losses.balance": 0.0, "training.augment": AUGMENT, "training.batch": 9}))
    inputs = task.examples(0).__getitems__(range(9, 18))
    assert 0.05 < float(inputs["second_shares"][0]) < 0.95
    model = build_model(task, "smoe", {}, seed=0).train()
    with soft_labels(model, smoothing):
        outputs = model(**inputs)
    share = inputs["second_shares"][:, None]
    targets = (1 - share) * one_hot(inputs["labels"], 10) + share * one_hot(inputs["second_labels"], 10)
    expected = cross_entropy(outputs.logits, targets, label_smoothing=smoothing)
    torch.testing.assert_close(outputs.loss, expected)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(outputs.loss, weights, retain_graph=True, allow_unused=True)
    for one, other in zip(found, torch.autograd.grad(expected, weights, allow_unused=True), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    term = mixing_term(outputs.logits, inputs["labels"], inputs["second_labels"], share[:, 0])
    counted = mixing_term(outputs.logits, inputs["labels"], inputs["second_labels"], share[:, 0], 18)
    torch.testing.assert_close(counted, term / 2)
    assert "second_labels" in inputs  # the caller's inputs are not changed
    held_out = {name: inputs[name] for name in ("pixel_values", "labels")}
    with soft_labels(model, smoothing):
        loss = model.eval()(**held_out).loss
    torch.testing.assert_close(loss, cross_entropy(model(**held_out).logits, inputs["labels"]))


@pytest.mark.slow
def test_a_resumed_run_and_every_router_see_the_same_images(digits: MakeRecipe, tmp_path: Path) -> None:
    recipe = digits({"training.augment": AUGMENT, "training.steps": 6, "training.save_every": 2, "training.warmup": 0})
    whole = SingleRun(recipe, parse_router("smoe"), 1, tmp_path / "whole").run()
    with pytest.raises(Interrupted):
        SingleRun(recipe, parse_router("smoe"), 1, tmp_path / "parts").run(stop_at(5))
    assert SingleRun(recipe, parse_router("smoe"), 1, tmp_path / "parts").run() == whole
    few = digits({"training.augment": AUGMENT, "training.steps": 2, "attack.examples": 4, "attack.steps": 1})
    results = Comparison(few, parse_routers("smoe,smooth"), 1, tmp_path / "both").run()
    assert len({result["last_batch"] for result in results}) == 1
    assert results[0]["first_batch"] != results[0]["last_batch"]


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("vmoe-tiny", {"crop": 0}, "training.augment.crop is 0, not a number from 0.001 to 1"),
        ("vmoe-tiny", {"crop": 0.5, "pad": 4}, "give one of training.augment.crop and training.augment.pad"),
        ("vmoe-tiny", {"randaugment": 11}, "training.augment.randaugment is 11, not a number from 0 to 10"),
        ("vmoe-tiny", {"mixup": -1}, "training.augment.mixup is -1, not a number from 0 to 4"),
        ("vmoe-tiny", {"erase": 2}, "training.augment.erase is 2"),
        ("vmoe-tiny", {"flip": 3}, "training.augment.flip"),
        ("vmoe-tiny", {"cutmx": 1}, "unknown key 'cutmx': did you mean 'cutmix'"),
        ("tiny", {"flip": True}, "training.augment is for images .*, and this task is text"),
        ("labels-tiny", {"mixup": 1}, "training.augment is for images .*, and this task is labels"),
    ],
)
def test_mistakes_are_one_sentence(name: str, changes: dict[str, Any], sentence: str) -> None:
    assert_refused(sentence, load_recipe, name, {"training.augment": changes})
