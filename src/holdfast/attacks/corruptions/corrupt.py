"""Common corruptions: what happens to images without an enemy, fifteen kinds at five severities."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from holdfast.attacks.ball import check_bounds
from holdfast.attacks.corruptions.table import CORRUPTIONS
from holdfast.attacks.flags import Flag
from holdfast.attacks.seeds import check_seed, generators
from holdfast.attacks.threat import Json, check_count, distances
from holdfast.suggest import unknown

Size = Literal["large", "small"]
LARGE = 96  # images whose shorter side has as many pixels take the settings for 224, smaller ones those for 32
SEVEREST = 5


@dataclass(frozen=True)
class CorruptedImages:
    """Images after a corruption."""

    attack: str  # the corruption's name
    images: Tensor  # (B,C,H,W), in [0,1]
    severity: int  # the budget: 0 is clean, 5 the worst
    seed: int
    size: Size  # which of the published settings
    distances: Tensor  # (B,) float64: root mean square difference from the clean image
    flags: tuple[Flag, ...] = ()

    @property
    def realised(self) -> float:
        """The mean of `distances`."""
        return float(self.distances.mean()) if self.distances.numel() else 0.0

    def summary(self) -> dict[str, Json]:
        """What to store with a result."""
        return {
            "attack": self.attack,
            "group": CORRUPTIONS[self.attack].group,
            "severity": self.severity,
            "seed": self.seed,
            "size": self.size,
            "realised": self.realised,
            "examples": self.images.shape[0],
            "flags": [flag.summary() for flag in self.flags],
        }


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
    """One of the common corruptions (`CORRUPTIONS` has their names) of Hendrycks & Dietterich 2019, in plain torch.

    Fourteen of the fifteen need no files. `frost` needs photographs, passed as `frost`; without them it is refused.
    These follow the published recipes and settings, not their arithmetic: only JPEG rounds to 8 bits, and borders are
    mirrored. For figures to set beside published ones, use the published files.

    images      (B,C,H,W) with 1 or 3 channels, values from 0 to 1
    severity    1 to 5; 0 returns the images as they are
    first       the number of the first image in its set: an image's randomness depends on the seed and its number only,
                and is the same at each severity
    size        "large" for the settings published for 224 pixels, "small" for those for 32; by default large from a shorter
                side of 96 pixels on
    frost       (photographs, channels, height, width), from 0 to 1
    """
    if name not in CORRUPTIONS:
        raise ValueError(unknown("corruption", name, CORRUPTIONS))
    check_count(severity, "severity", least=0)
    if severity > SEVEREST:
        raise ValueError(f"severity is {severity}; expected 1 to {SEVEREST}, or 0 for clean images.")
    check_seed(seed)
    check_count(first, "first", least=0)
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images have shape {tuple(images.shape)}; expected (B, C, H, W) with 1 or 3 channels.")
    check_bounds(images, (0.0, 1.0))
    if size not in (None, "large", "small"):
        raise ValueError(unknown("size", size, ("large", "small")))
    size = size or ("large" if min(images.shape[-2:]) >= LARGE else "small")
    corruption = CORRUPTIONS[name]
    corrupted = images
    if severity > 0 and images.numel() > 0:
        settings = (corruption.large if size == "large" else corruption.small)[severity - 1]
        sources = generators(seed, images.shape[0], name, first=first)
        files = (frost,) if corruption.files else ()
        corrupted = corruption.apply(images.float(), sources, *settings, *files).clamp(0, 1).to(images.dtype)
    pixels = max(images[0].numel(), 1) if images.shape[0] else 1
    return CorruptedImages(
        attack=name,
        images=corrupted,
        severity=severity,
        seed=seed,
        size=size,
        distances=distances(corrupted, images, "l2") / pixels**0.5,
    )
