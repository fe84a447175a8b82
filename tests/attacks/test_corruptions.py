"""Common corruptions: known properties of each, naive versions where there is one, and peers for JPEG and pixelation."""

import io
import json
import math
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor
from wording import assert_refused

from holdfast.attacks import CORRUPTIONS, corrupt, corruptions
from holdfast.attacks.corruptions import cloud_noise, impulse_noise, motion_blur, shot_noise, zoom_blur

# The severities after which the published settings do not go farther from the image. Elastic ones differ in kind (first the
# whole image is sheared, then it crumples), small glass blur blurs what it has shuffled, large snow has other flakes but no
# more white from 2 to 3, large fog is rougher but not thicker from 3 to 4, and frost gets darker there but no thicker.
UNORDERED = {
    ("large", "elastic_transform"): {2},
    ("small", "elastic_transform"): {1, 2, 3, 4},
    ("small", "glass_blur"): {1, 2, 4},
    ("large", "snow"): {2},
    ("large", "fog"): {3},
    ("small", "frost"): {3},
    ("large", "frost"): {3},
}


def sources(count: int = 1) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in range(count)]


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """Two photographs, (2,3,400,400)."""
    datasets: Any = pytest.importorskip("sklearn.datasets")
    pytest.importorskip("PIL")
    return (
        torch.stack([torch.tensor(image)[:400, :400] for image in datasets.load_sample_images().images]).permute(0, 3, 1, 2)
        / 255
    )


@pytest.fixture(scope="module")
def small(photographs: Tensor) -> Tensor:
    """(18,3,32,32): parts of them, shrunk."""
    parts = [photographs[:, :, top : top + 200, left : left + 200] for top in (0, 100, 200) for left in (0, 100, 200)]
    return F.interpolate(torch.cat(parts), size=(32, 32), mode="area")


@pytest.fixture(scope="module")
def large(photographs: Tensor) -> Tensor:
    """(2,3,224,208): parts of them, as they are; not square."""
    return photographs[:, :, 120:344, 100:308]


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_higher_severity_is_farther_from_the_clean_image(size: str, name: str, request: pytest.FixtureRequest) -> None:
    images: Tensor = request.getfixturevalue(size)
    results = [corrupt(images, name, severity=severity) for severity in range(6)]
    assert all(result.size == size for result in results)
    far = [result.realised for result in results]
    assert far[0] == 0 and far[1] > 0.005
    assert far[5] == pytest.approx(float((results[5].images - images).square().mean((1, 2, 3)).sqrt().mean()), rel=1e-4)
    falls = {severity for severity, (low, high) in enumerate(pairwise(far)) if low > high}
    assert falls <= UNORDERED.get((size, name), set()), far
    assert far[5] > 1.2 * far[1] or name in ("elastic_transform", "glass_blur", "fog")


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_results_are_images_and_depend_on_the_seed_and_the_number_of_an_image_only(name: str, small: Tensor) -> None:
    images = small[:4]
    whole = corrupt(images, name, severity=3, seed=5)
    assert whole.images.shape == images.shape and (whole.images >= 0).all() and (whole.images <= 1).all()
    assert torch.equal(whole.images, corrupt(images, name, severity=3, seed=5).images)
    alone = corrupt(images[2:3], name, severity=3, seed=5, first=2)
    torch.testing.assert_close(alone.images[0], whole.images[2], rtol=0, atol=1e-6)
    random = name not in {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
    assert torch.equal(whole.images, corrupt(images, name, severity=3, seed=6).images) != random


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (1, 1, 28, 28), (1, 3, 5, 9), (1, 1, 97, 101)])
def test_grey_odd_and_tiny_images_are_fine(name: str, shape: tuple[int, ...]) -> None:
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        corrupted = corrupt(images, name, severity=severity).images
        assert corrupted.shape == shape and corrupted.isfinite().all()


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if CORRUPTIONS[name].group != "noise"])
def test_a_grey_image_is_treated_as_a_colour_image_without_colour(name: str, small: Tensor) -> None:
    """Where channels get no noise of their own, a grey image and three equal channels must come out the same."""
    grey = small[:2].mean(1, keepdim=True)
    one = corrupt(grey, name, severity=4).images.expand(-1, 3, -1, -1)
    torch.testing.assert_close(corrupt(grey.expand(-1, 3, -1, -1), name, severity=4).images, one, rtol=0, atol=2e-5)


def test_frost_without_photographs_adds_bright_ridges(small: Tensor) -> None:
    black = torch.zeros(8, 1, 64, 64)
    _, cover = CORRUPTIONS["frost"].small[4]
    texture = corrupt(black, "frost", severity=5).images / cover
    assert float(texture.min()) >= 0 and 0.9 < float(texture.max()) <= 1 and 0.2 < float(texture.mean()) < 0.7
    assert float((texture[0] - texture[1]).abs().mean()) > 0.1  # each image has its own
    keep, cover = CORRUPTIONS["frost"].small[2]
    frosted = corrupt(small * 0.2, "frost", severity=3).images - keep * small * 0.2
    assert float(frosted.min()) >= -1e-6 and float(frosted.max()) <= cover + 1e-6


def test_frost_adds_a_part_of_a_photograph(small: Tensor) -> None:
    ramp = torch.linspace(0, 1, 40 * 50).view(1, 1, 40, 50).expand(1, 3, 40, 50)
    keep, cover = CORRUPTIONS["frost"].small[2]
    frosted = corrupt(small * 0.5, "frost", severity=3, frost=ramp).images
    part = (frosted - keep * small * 0.5) / cover
    unclipped = frosted < 1
    step = (part[..., 1:] - part[..., :-1])[unclipped[..., 1:] & unclipped[..., :-1]]
    torch.testing.assert_close(step, torch.full_like(step, 1 / (40 * 50 - 1)), rtol=0, atol=1e-5)
    assert_refused("32", corrupt, small, "frost", severity=3, frost=ramp[..., :20])


def test_noise_has_the_moments_it_should() -> None:
    grey = torch.full((1, 1, 200, 200), 0.5)
    gaussian = corrupt(grey, "gaussian_noise", severity=1, size="small").images
    assert float(gaussian.mean()) == pytest.approx(0.5, abs=1e-3) and float(gaussian.std()) == pytest.approx(0.04, rel=0.03)
    shot = shot_noise(grey, sources(), 50.0)  # the variance of a Poisson count is its mean
    assert float(shot.mean()) == pytest.approx(0.5, abs=3e-3) and float(shot.var()) == pytest.approx(0.5 / 50, rel=0.03)
    impulse = impulse_noise(grey, sources(), 0.2)
    assert float((impulse == 1).float().mean()) == pytest.approx(0.1, abs=0.01)
    assert float((impulse == 0).float().mean()) == pytest.approx(0.1, abs=0.01)
    assert ((impulse == 0) | (impulse == 1) | (impulse == 0.5)).all()


@pytest.mark.parametrize("name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform", "pixelate"])
def test_what_moves_pixels_about_leaves_a_flat_image_flat(name: str) -> None:
    flat = torch.full((1, 3, 40, 40), 0.3)
    torch.testing.assert_close(corrupt(flat, name, severity=5).images, flat, rtol=0, atol=1e-5)


def test_a_gaussian_blur_is_the_sum_it_stands_for() -> None:
    image = torch.rand(1, 1, 7, 6, generator=torch.Generator().manual_seed(1))
    sigma = 1.3
    reach = int(4 * sigma + 0.5)
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(-reach, reach + 1)]

    def mirror(place: int, size: int) -> int:
        while not 0 <= place < size:
            place = -1 - place if place < 0 else 2 * size - 1 - place
        return place

    naive = torch.zeros(7, 6)
    for row in range(7):
        for column in range(6):
            for a, down in enumerate(weights):
                for b, right in enumerate(weights):
                    at = image[0, 0, mirror(row + a - reach, 7), mirror(column + b - reach, 6)]
                    naive[row, column] += down * right * at / sum(weights) ** 2
    torch.testing.assert_close(corruptions.blur(image, sigma)[0, 0], naive)


def test_a_point_out_of_focus_becomes_a_disc() -> None:
    image = torch.zeros(1, 1, 21, 21)
    image[0, 0, 10, 10] = 1
    blurred = corruptions.convolve(image, corruptions.disc(4, 0.1))[0, 0]
    far = torch.hypot(*torch.meshgrid(torch.arange(21.0) - 10, torch.arange(21.0) - 10, indexing="ij"))
    inside = far <= 4
    torch.testing.assert_close(blurred, inside / inside.sum(), rtol=0, atol=1e-6)


def test_motion_leaves_a_trail_in_its_direction() -> None:
    image = torch.zeros(2, 1, 41, 41)
    image[:, 0, 20, 20] = 1
    trails = corruptions.smear(image, 6, 3.0, torch.tensor([0.0, 90.0]))
    torch.testing.assert_close(trails[0, 0], trails[1, 0].t(), rtol=0, atol=1e-5)
    trail = trails[0, 0]
    assert float(trail[20].sum()) == pytest.approx(1, abs=1e-4)  # nothing off the line
    expected = torch.tensor(
        [math.exp(-0.5 * (step / 3) ** 2) for step in range(13) if math.exp(-0.5 * (step / 3) ** 2) > 1e-3]
    )
    torch.testing.assert_close(trail[20, 20 - len(expected) + 1 : 21].flip(0), expected / expected.sum(), rtol=0, atol=1e-5)
    assert float(motion_blur(image, sources(2), 6, 3.0).amax()) < 0.5


def test_zooming_is_about_the_middle() -> None:
    image = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    zoomed = corruptions.zoom(image, 2.0)
    assert float(zoomed[0, 0, 4, 4]) == pytest.approx(float(image[0, 0, 4, 4]), abs=1e-6)
    torch.testing.assert_close(zoomed[0, 0, 0::2, 0::2], image[0, 0, 2:7, 2:7], rtol=0, atol=1e-5)
    torch.testing.assert_close(zoom_blur(image, [], 1.0, 0.01), image, rtol=0, atol=1e-5)


def test_glass_moves_pixels_without_losing_any() -> None:
    image = torch.arange(400.0).view(1, 1, 20, 20) / 400
    shuffled = CORRUPTIONS["glass_blur"].apply(image, sources(), 0, 2, 1)
    assert torch.equal(shuffled.flatten().sort().values, image.flatten()) and not torch.equal(shuffled, image)
    rows, columns = (shuffled * 400).round().long() // 20, (shuffled * 400).round().long() % 20
    moved = (rows - torch.arange(20).view(-1, 1)).abs() + (columns - torch.arange(20)).abs()
    assert 1 < float(moved.float().mean()) < 6  # to the neighbourhood


def test_clouds_are_rougher_when_small_scales_decay_less() -> None:
    smooth, rough = (cloud_noise(torch.zeros(4, 1, 64, 64), decay, sources(4)) for decay in (3.0, 1.4))
    for clouds in (smooth, rough):
        assert clouds.shape == (4, 1, 64, 64) and float(clouds.min()) == 0 and float(clouds.max()) == 1
        assert not torch.equal(clouds[0], clouds[1])
    assert float(rough.diff(dim=-1).abs().mean()) > 2 * float(smooth.diff(dim=-1).abs().mean())


def test_fog_keeps_the_brightest_value_of_an_image(small: Tensor) -> None:
    dark = small * 0.4
    for severity in (1, 5):
        foggy = corrupt(dark, "fog", severity=severity).images
        assert (foggy.amax((1, 2, 3)) <= dark.amax((1, 2, 3)) + 1e-6).all()
        assert (foggy.amin((1, 2, 3)) >= 0).all() and float(foggy.mean()) > 0


def test_the_noise_of_clouds_falls_by_the_square_of_the_decay_from_scale_to_scale() -> None:
    clouds = cloud_noise(torch.zeros(8, 1, 256, 256, dtype=torch.float64), 1.5, sources(8))[:, 0]
    spread = []
    for step in (4, 2):
        corners = clouds[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        spread.append(float((clouds[:, step // 2 :: step, step // 2 :: step] - (pairs + pairs.roll(-1, 2)) / 4).std()))
    assert spread[0] / spread[1] == pytest.approx(1.5**2, rel=0.02)


@given(colour=st.tuples(*[st.floats(0.0, 1.0, width=32)] * 3), severity=st.integers(1, 5))
def test_brightness_raises_value_and_keeps_hue_and_saturation(colour: tuple[float, float, float], severity: int) -> None:
    """Against Python's own HSV."""
    import colorsys

    hue, saturation, value = colorsys.rgb_to_hsv(*colour)
    more = CORRUPTIONS["brightness"].small[severity - 1][0]
    expected = colorsys.hsv_to_rgb(hue, saturation, min(value + more, 1))
    if value > 1e-6:
        image = torch.tensor(colour).view(1, 3, 1, 1)
        torch.testing.assert_close(
            corrupt(image, "brightness", severity=severity).images.flatten(),
            torch.tensor(expected).float(),
            rtol=0,
            atol=1e-5,
        )


def test_contrast_keeps_the_mean_and_shrinks_the_spread(small: Tensor) -> None:
    flat = corrupt(small, "contrast", severity=5).images
    torch.testing.assert_close(flat.mean((2, 3)), small.mean((2, 3)))
    torch.testing.assert_close(flat.std((2, 3)), 0.15 * small.std((2, 3)))


def through_pillow(image: Tensor, work: Any) -> Tensor:
    pillow: Any = pytest.importorskip("PIL.Image")
    bytes_ = (image * 255).round().byte().permute(1, 2, 0).squeeze(-1)
    result = work(pillow, pillow.fromarray(bytes_.numpy()))
    values = torch.tensor(list(result.tobytes()), dtype=torch.float32) / 255
    return values.view(image.shape[1], image.shape[2], image.shape[0]).permute(2, 0, 1)


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("channels", [1, 3])
def test_our_jpeg_loses_what_pillows_does(severity: int, channels: int, large: Tensor) -> None:
    image = large[0, :, :90] if channels == 3 else large[0, :, :90].mean(0, keepdim=True)  # no multiples of 8
    quality = CORRUPTIONS["jpeg_compression"].large[severity - 1][0]

    def work(pillow: Any, pillow_image: Any) -> Any:
        file = io.BytesIO()
        pillow_image.save(file, "JPEG", quality=quality)
        return pillow.open(file)

    theirs = through_pillow(image, work)
    ours = corrupt(image[None], "jpeg_compression", severity=severity, size="large").images[0]
    loss = float((theirs - image).square().mean().sqrt())
    assert float((ours - image).square().mean().sqrt()) == pytest.approx(loss, rel=0.02)
    assert (
        float((ours - theirs).square().mean().sqrt()) < 0.12 * loss
    )  # a coefficient halfway between two steps goes either way


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_our_pixels_are_pillows(severity: int, large: Tensor) -> None:
    image = (large[0] * 255).round() / 255  # of a size at which no pixel's centre is on the border of two cells
    share = CORRUPTIONS["pixelate"].large[severity - 1][0]
    height, width = image.shape[-2:]

    def work(pillow: Any, pillow_image: Any) -> Any:
        return pillow_image.resize((int(width * share), int(height * share)), pillow.BOX).resize((width, height), pillow.BOX)

    ours = corrupt(image[None], "pixelate", severity=severity).images[0]
    assert float((ours - through_pillow(image, work)).abs().max()) * 255 < 1.01  # Pillow rounds twice


def test_the_settings_follow_the_size_and_can_be_chosen(small: Tensor, large: Tensor) -> None:
    assert corrupt(small, "contrast", severity=1).size == "small" and corrupt(large, "contrast", severity=1).size == "large"
    assert corrupt(small, "contrast", severity=1, size="large").realised > corrupt(small, "contrast", severity=1).realised


def test_a_summary_is_json(small: Tensor) -> None:
    summary = json.loads(json.dumps(corrupt(small, "fog", severity=2, seed=3).summary()))
    assert summary["attack"] == "fog" and summary["severity"] == 2 and summary["seed"] == 3 and summary["realised"] > 0


def test_wrong_arguments_are_named(small: Tensor) -> None:
    assert_refused("'snow'", corrupt, small, "snwo", severity=1)
    assert_refused(r"severity.* 6", corrupt, small, "snow", severity=6)
    with pytest.raises(TypeError, match="severity"):
        corrupt(small, "snow")  # type: ignore[call-arg]
    assert_refused("channels", corrupt, small[:, :2], "snow", severity=1)
    assert_refused("0 to 1", corrupt, small * 255, "snow", severity=1)
    assert_refused("'large'", corrupt, small, "snow", severity=1, size="larg")
