"""Common corruptions: changes of images without an attacker, fifteen kinds at five severities (Hendrycks & Dietterich 2019).

`corruption_kinds` has the functions with their settings.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from holdfast.attacks.corruption_kinds import CORRUPTIONS
from holdfast.attacks.flags import AttackResult, Flag
from holdfast.attacks.threat import check_bounds, check_count, check_seed, distances, generators
from holdfast.errors import require_known

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

    The recipes and settings are the published ones, the arithmetic is not: only JPEG rounds to 8 bits, and borders are
    mirrored. The published frost is cut from photographs, which cannot be shipped (frost1.png to frost6.jpg, in the folder
    ImageNet-C/create_c of the GitHub repository hendrycks/robustness). Pass them as `frost`; without them it is a texture of
    ours. To compare with published numbers, use the published files.

    images      (B,C,H,W) with 1 or 3 channels, values from 0 to 1
    severity    1 to 5; 0 returns the images unchanged
    first       the index of the first image in its data set: an image's random numbers depend only on the seed and on
                its index, and are the same at each severity
    size        "large" for the settings published for 224 pixels, "small" for those for 32; by default large from a shorter
                side of 96 pixels on
    frost       photographs of frost, (photographs, channels, height, width), from 0 to 1
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
        files = (frost,) if name == "frost" else ()
        corrupted = corruption.apply(images.float(), sources, *settings, *files).clamp(0, 1).to(images.dtype)
    pixels = max(images[0].numel(), 1) if images.shape[0] else 1
    apart = distances(corrupted, images, "l2") / pixels**0.5
    return CorruptedImages(name, corrupted, severity, seed, size, apart)
