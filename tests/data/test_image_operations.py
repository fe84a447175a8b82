"""RandAugment's operations are those of timm, for colour and grey images of awkward sizes; draws follow a key."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from torch import Tensor

from holdfast.data.draws import Draws
from holdfast.data.image_operations import OPERATIONS, randaugment
from holdfast.data.images import as_picture, from_picture

GREY = (128, 128, 128)


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    fill = GREY if image.mode == "RGB" else GREY[0]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def _rotate(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=GREY if image.mode == "RGB" else GREY[0])


def _solarize_add(image: Image.Image, amount: float) -> Image.Image:
    table = [min(255, value + int(amount)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _posterize(image: Image.Image, bits: float) -> Image.Image:
    return ImageOps.posterize(image, int(bits)) if bits else image.point([0] * 256 * len(image.getbands()))


# The operation of Pillow for a strength, as timm calls it.
PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "invert": lambda image, _: ImageOps.invert(image),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": lambda image, threshold: ImageOps.solarize(image, int(threshold)),
    "solarize_add": _solarize_add,
    "color": lambda image, change: ImageEnhance.Color(image).enhance(max(0.1, 1 + change)),
    "contrast": lambda image, change: ImageEnhance.Contrast(image).enhance(max(0.1, 1 + change)),
    "brightness": lambda image, change: ImageEnhance.Brightness(image).enhance(max(0.1, 1 + change)),
    "sharpness": lambda image, change: ImageEnhance.Sharpness(image).enhance(max(0.1, 1 + change)),
    "shear_x": lambda image, factor: _affine(image, (1, factor, 0, 0, 1, 0)),
    "shear_y": lambda image, factor: _affine(image, (1, 0, 0, factor, 1, 0)),
    "translate_x": lambda image, share: _affine(image, (1, 0, share * image.size[0], 0, 1, 0)),
    "translate_y": lambda image, share: _affine(image, (1, 0, 0, 0, 1, share * image.size[1])),
}


def images(channels: int, height: int, width: int) -> Tensor:
    """Return noise, a slope, one colour, few values, and two values: what tables of values treat differently."""
    source = np.random.default_rng(height)
    noise = source.integers(0, 256, (channels, height, width))
    slope = np.broadcast_to(np.arange(width) * 200 // width + 20, (channels, height, width))
    few = source.integers(100, 108, (channels, height, width))
    two = np.where(noise > 200, 190, 3)
    return torch.from_numpy(np.stack([noise, slope, np.full_like(noise, 77), few, two]).astype(np.uint8))


@pytest.mark.every_combination
@pytest.mark.parametrize("shape", [(3, 33, 30), (1, 8, 8), (3, 2, 5)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_timm(name: str, shape: tuple[int, int, int]) -> None:
    operation, given = OPERATIONS[name], images(*shape)
    for magnitude in (0.0, 3.3, 9.0, 10.0):
        for sign in (1, -1) if operation.signed else (1,):
            strength = sign * operation.strength(magnitude)
            for one in given:
                found = from_picture(operation.apply(as_picture(one), strength))
                expected = from_picture(PILLOW[name](as_picture(one), strength))
                assert found.dtype == torch.uint8 and found.shape == one.shape
                assert torch.equal(found, expected), (magnitude, sign)


def test_random_operations_are_drawn_one_after_the_other() -> None:
    """An operation, whether it is applied, its magnitude and its sign, from the same draws as by hand."""
    picture, names = as_picture(images(3, 16, 17)[0]), list(OPERATIONS)
    for key in range(40):
        draws, expected = Draws(key), picture
        for _ in range(3):
            operation, is_applied = OPERATIONS[names[draws.below(15)]], draws.uniform() < 0.5
            strength = operation.strength(min(10.0, 9 + 0.5 * draws.normal()))
            is_opposite = draws.uniform() < 0.5 and operation.signed
            if is_applied:
                expected = operation.apply(expected, -strength if is_opposite else strength)
        assert torch.equal(from_picture(randaugment(picture, 9.0, 3, Draws(key))), from_picture(expected))


def test_a_larger_magnitude_changes_an_image_more() -> None:
    row, column = torch.arange(32)[:, None], torch.arange(32)
    smooth = torch.stack([3 * (row + column), 2 * (row + column) + 20, 190 - 3 * (row + column)]).to(torch.uint8)
    for name in set(OPERATIONS) - {"autocontrast", "equalize", "invert", "posterize", "sharpness"}:
        operation = OPERATIONS[name]
        changes = []
        for magnitude in (1.0, 5.0, 10.0):
            changed = from_picture(operation.apply(as_picture(smooth), operation.strength(magnitude)))
            changes.append(float((changed.float() - smooth.float()).abs().mean()))
        assert changes[0] < changes[-1] and changes[-1] > 5, (name, changes)


def test_draws_follow_from_their_key() -> None:
    first, again, other = Draws(3, 5), Draws(3, 5), Draws(5, 3)
    numbers = [first.bits() for _ in range(20)]
    assert numbers == [again.bits() for _ in range(20)] and len(set(numbers)) == 20
    assert not set(numbers) & {other.bits() for _ in range(20)}
    # The first output of SplitMix64 for the seed 1234567, from its published test vectors.
    known = Draws()
    known._state = 1234567
    assert known.bits() == 6457827717110365317
    assert np.array_equal(Draws(1).byte_array(3, 5), Draws(1).byte_array(3, 5))


@pytest.mark.parametrize("alpha", [0.1, 0.8, 1.0, 3.0])
def test_mixing_shares_have_a_beta_distribution(alpha: float) -> None:
    source = Draws(1)
    found = [source.symmetric_beta(alpha) for _ in range(3000)]
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert all(0 <= value <= 1 for value in found)


def test_other_draws_have_their_distributions() -> None:
    source = Draws(2)
    assert stats.kstest([source.normal() for _ in range(3000)], stats.norm.cdf).pvalue > 0.01
    assert stats.kstest([source.uniform(2, 5) for _ in range(3000)], stats.uniform(2, 3).cdf).pvalue > 0.01
    counts = np.bincount([source.below(7) for _ in range(7000)], minlength=7)
    assert len(counts) == 7 and stats.chisquare(counts).pvalue > 0.01
    counts = np.bincount(source.byte_array(100, 257).ravel(), minlength=256)
    assert stats.chisquare(counts).pvalue > 0.01
    assert math.isfinite(Draws(3).symmetric_beta(1e-6))
