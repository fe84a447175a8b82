"""The size of images, checked before the first step: what a model makes of it, and what a user can change.

A transformer over all patches of an image takes time with the square of their number, and a folder of small images is
scaled up without need if nothing is said: 40 pixels as 224 are 12,544 patches of 2, and minutes a step.
"""

import math
from typing import Any

from holdfast.data.images import Images

MOST_PATCHES = 4096  # of an image, if attention is over all patches
SAMPLED = 8  # images whose size on disk is read
LARGE_SCALE = 2  # images that are scaled up at least so much are warned about


def patch_count(config: Any) -> int | None:
    """Return how many patches an image has, in the first layer if later ones merge them; None if it has no patches."""
    pixels, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    return (pixels // patch) ** 2 if isinstance(pixels, int) and isinstance(patch, int) and patch > 0 else None


def has_windows(config: Any) -> bool:
    """Return whether attention is within windows, as in Swin, so that time grows only with the number of patches."""
    return hasattr(config, "window_size")


def side_on_disk(images: Images) -> int | None:
    """Return the usual shorter side of images in files, in pixels; None for other images, which are not scaled."""
    wanted = min(SAMPLED, len(images))
    sides = images.sides([place * len(images) // wanted for place in range(wanted)])
    return None if sides is None else sorted(sides)[len(sides) // 2]


def require_patches(config: Any, images: Images, *, is_new: bool) -> None:
    """Raise ValueError if the images do not fit the patches of a model, or would take hours.

    is_new   whether the model is new; a checkpoint decides on its own sizes
    """
    patch, pixels, count = getattr(config, "patch_size", None), images.shape[1], patch_count(config)
    if count is None or not isinstance(patch, int):
        return
    can_be_scaled = images.sides([]) is not None
    if is_new and pixels < patch:
        raise ValueError(
            f"images of {pixels} pixels per side are smaller than a patch of {patch}; set model.config.patch_size to less"
            f"{' or data.size to more' if can_be_scaled else ''}."
        )
    if is_new and pixels % patch and not has_windows(config):
        divisors = ", ".join(str(size) for size in range(1, pixels + 1) if pixels % size == 0)
        raise ValueError(
            f"images of {pixels} pixels per side cannot be divided into patches of {patch}, so their edge would be ignored; "
            f"set model.config.patch_size to one of {divisors}"
            f"{f', or data.size to a multiple of {patch}' if can_be_scaled else ''}."
        )
    if is_new:
        _require_windows(config, pixels)
    if count > MOST_PATCHES and not has_windows(config):
        side, most = side_on_disk(images), patch * math.isqrt(MOST_PATCHES)
        found = f"; these images have about {side} pixels per side" if side is not None else ""
        smaller = min(most, side // patch * patch) if side is not None and side >= patch else most
        raise ValueError(
            f"images of {pixels} pixels per side have {count:,} patches of {patch}, more than {MOST_PATCHES:,}{found}: "
            f"set data.size to {smaller}, or model.config.patch_size to more."
        )


def _require_windows(config: Any, pixels: int) -> None:
    """Raise ValueError if a stage of Swin has fewer patches per side than a window, which transformers' model cannot run."""
    if config.model_type != "swin":
        return
    side = -(-pixels // config.patch_size)
    for stage in range(len(config.depths)):
        if side < config.window_size:
            raise ValueError(
                f"stage {stage + 1} of this Swin has {side} x {side} patches for images of {pixels} pixels per side, fewer "
                f"than its window of {config.window_size}; set model.config.window_size to {side}, or "
                "model.config.patch_size to less, or data.size to more."
            )
        side = -(-side // 2)  # a stage merges 2 x 2 patches


def size_line(config: Any) -> str | None:
    """Return what a model makes of an image, in one line; None if it has no patches."""
    count = patch_count(config)
    if count is None:
        return None
    stages = " in the first stage" if has_windows(config) else ""
    return f"{count:,} patches per image{stages}: {config.image_size} pixels per side, {config.patch_size} per patch"


def scale_warning(config: Any, images: Images) -> str | None:
    """Return a warning if images are scaled up a lot, with the number of patches without it; None if they are not."""
    side, count = side_on_disk(images), patch_count(config)
    if side is None or count is None or images.shape[1] < LARGE_SCALE * side:
        return None
    patch = config.patch_size
    fitting = max(1, side // patch)
    return (
        f"the images have about {side} pixels per side and are scaled up to {images.shape[1]}, which shows no more "
        f"detail and makes training slow: an image has {count:,} patches; with --set data.size={fitting * patch}, it would "
        f"have {fitting**2:,}."
    )
