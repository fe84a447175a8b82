"""Common corruptions: changes of images without an attacker, fifteen kinds at five severities (Hendrycks & Dietterich 2019).

`CORRUPTIONS` has the published settings: `large` for 224 x 224 pixels (ImageNet-C), `small` for 32 x 32 (CIFAR-10-C),
severities 1 to 5, in the order of the function's arguments. `corruption_kinds` has the functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from holdfast.attacks.corruption_kinds import (
    brightness,
    contrast,
    defocus_blur,
    elastic_transform,
    fog,
    frost,
    gaussian_noise,
    glass_blur,
    impulse_noise,
    jpeg_compression,
    motion_blur,
    pixelate,
    shot_noise,
    snow,
    zoom_blur,
)
from holdfast.attacks.flags import AttackResult, Flag
from holdfast.attacks.threat import check_bounds, check_count, check_seed, distances, generators
from holdfast.errors import require_known

Setting = tuple[Any, ...]
FOR_LARGE, FOR_SMALL = 244, 32  # the published elastic settings are shares of these; the 244 is published so


class Corruption(NamedTuple):
    group: Literal["noise", "blur", "weather", "digital"]
    apply: Callable[..., Tensor]
    large: tuple[Setting, ...]
    small: tuple[Setting, ...]
    files: bool = False  # needs photographs that are not shipped


def _each(*values: float) -> tuple[Setting, ...]:
    return tuple((value,) for value in values)


def _shares(size: int, *settings: tuple[float, float, float]) -> tuple[Setting, ...]:
    return tuple(tuple(size * share for share in setting) for setting in settings)


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(
        "noise", gaussian_noise, _each(0.08, 0.12, 0.18, 0.26, 0.38), _each(0.04, 0.06, 0.08, 0.09, 0.10)
    ),
    "shot_noise": Corruption("noise", shot_noise, _each(60, 25, 12, 5, 3), _each(500, 250, 100, 75, 50)),
    "impulse_noise": Corruption(
        "noise", impulse_noise, _each(0.03, 0.06, 0.09, 0.17, 0.27), _each(0.01, 0.02, 0.03, 0.05, 0.07)
    ),
    "defocus_blur": Corruption(
        "blur",
        defocus_blur,
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    ),
    "glass_blur": Corruption(
        "blur",
        glass_blur,
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ),
    "motion_blur": Corruption(
        "blur", motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)), ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
    ),
    "zoom_blur": Corruption(
        "blur",
        zoom_blur,  # the largest factor that np.arange returns, which by rounding is sometimes its excluded end
        ((1.11, 0.01), (1.15, 0.01), (1.20, 0.02), (1.24, 0.02), (1.30, 0.03)),
        ((1.06, 0.01), (1.11, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01)),
    ),
    "snow": Corruption(
        "weather",
        snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Corruption(
        "weather",
        frost,
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        files=True,
    ),
    "fog": Corruption(
        "weather",
        fog,
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    ),
    "brightness": Corruption("weather", brightness, _each(0.1, 0.2, 0.3, 0.4, 0.5), _each(0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Corruption("digital", contrast, _each(0.4, 0.3, 0.2, 0.1, 0.05), _each(0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": Corruption(
        "digital",
        elastic_transform,
        _shares(FOR_LARGE, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
        _shares(FOR_SMALL, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": Corruption("digital", pixelate, _each(0.6, 0.5, 0.4, 0.3, 0.25), _each(0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": Corruption("digital", jpeg_compression, _each(25, 18, 15, 10, 7), _each(80, 65, 58, 50, 40)),
}


Size = Literal["large", "small"]
LARGE = 96  # images whose shorter side has this many pixels or more take the settings for 224, others those for 32
SEVEREST = 5


@dataclass(frozen=True)
class CorruptedImages(AttackResult):
    """Images after a corruption."""

    stored = ("attack", "group", "severity", "seed", "size", "realised", "examples", "flags")
    attack: str  # the corruption's name
    images: Tensor  # (B,C,H,W), in [0,1]
    severity: int  # the budget: 0 is clean, 5 the worst
    seed: int
    size: Size  # which published settings were used
    distances: Tensor  # (B,) float64: root mean square difference from the clean image
    flags: tuple[Flag, ...] = ()

    @property
    def realised(self) -> float:
        """The mean of `distances`."""
        return float(self.distances.mean()) if self.distances.numel() else 0.0

    @property
    def group(self) -> str:
        return CORRUPTIONS[self.attack].group

    @property
    def examples(self) -> int:
        return self.images.shape[0]


def corrupt(
    images: Tensor,
    name: str,
    *,
    severity: int,
    seed: int = 0,
    first: int = 0,
    size: Size | None = None,
    frost: Tensor | None = None,
) -> CorruptedImages:
    """Apply one of the common corruptions of Hendrycks & Dietterich 2019; `CORRUPTIONS` has their names.

    Fourteen of the fifteen need no files. "frost" needs photographs, passed as `frost`, and raises ValueError without them.
    The recipes and settings are the published ones, the arithmetic is not: only JPEG rounds to 8 bits, and borders are
    mirrored. To compare with published numbers, use the published files.

    images      (B,C,H,W) with 1 or 3 channels, values from 0 to 1
    severity    1 to 5; 0 returns the images unchanged
    first       the index of the first image in its data set: an image's random numbers depend only on the seed and on
                its index, and are the same at each severity
    size        "large" for the settings published for 224 pixels, "small" for those for 32; by default large from a shorter
                side of 96 pixels on
    frost       (photographs, channels, height, width), from 0 to 1
    """
    require_known("corruption", name, CORRUPTIONS)
    check_count(severity, "severity", least=0)
    if severity > SEVEREST:
        raise ValueError(f"severity is {severity}; expected 1 to {SEVEREST}, or 0 for clean images.")
    check_seed(seed)
    check_count(first, "first", least=0)
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images have shape {tuple(images.shape)}; expected (B, C, H, W) with 1 or 3 channels.")
    check_bounds(images, (0.0, 1.0))
    size = size or ("large" if min(images.shape[-2:]) >= LARGE else "small")
    require_known("size", size, ("large", "small"))
    corruption = CORRUPTIONS[name]
    corrupted = images
    if severity > 0 and images.numel() > 0:
        settings = (corruption.large if size == "large" else corruption.small)[severity - 1]
        sources = generators(seed, images.shape[0], name, first=first)
        files = (frost,) if corruption.files else ()
        corrupted = corruption.apply(images.float(), sources, *settings, *files).clamp(0, 1).to(images.dtype)
    pixels = max(images[0].numel(), 1) if images.shape[0] else 1
    apart = distances(corrupted, images, "l2") / pixels**0.5
    return CorruptedImages(name, corrupted, severity, seed, size, apart)
