"""Random changes of training images: crops, flips, RandAugment, random erasing, mixup and cutmix; and losses of soft labels.

What happens to an example follows only from the seed and from its place in the sequence of all training examples (`Order`).
So every router of a comparison and a resumed run see the same images at the same step, however a batch is split into
micro-batches and over ranks. Images are changed in the order of the list above, which is that of the papers' code (timm).
Images for validation and testing are never changed.

Shifts and flips only move pixels, so a GPU makes them in its own memory, to the same numbers (`MovedImages`). All other
changes are made on the host.

**Soft labels** are smoothed ones, and those of mixed images.

    smoothing   a target is 1 - e of its class and e of the uniform distribution over all C classes. The smoothed loss of an
                example with logits l and class y, -(1 - e) log p_y - (e / C) sum_c log p_c, differs from the cross entropy
                by e (l_y - mean_c l_c), because the logarithm of the softmax's denominator cancels. Szegedy et al. 2016
    mixing      a target is 1 - s of the class y and s of a second class z, and the loss differs by s (l_y - l_z) in the same
                way; with smoothed labels by (1 - e) s (l_y - l_z). Zhang et al. 2018, Yun et al. 2019

A hook adds these terms to `outputs.loss` in training mode, so the loss on held-out data is the cross entropy.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.data import ExampleOrder, Images, PixelScaling
from holdfast.data.draws import Draws, ManyDraws
from holdfast.data.images import ArrayImages, Box, as_bytes, as_picture, from_picture
from holdfast.metrics.tasks import IGNORED
from holdfast.train.recipe import AugmentPart

OF_IMAGES, OF_MIXING = 1, 2  # the second numbers of the keys of random draws
RATIO = (3 / 4, 4 / 3)  # of the sides of a crop; Szegedy et al. 2015
ERASED_SHARE, ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)  # Zhong et al. 2020
ATTEMPTS = 10  # at a box that lies within the image
SECOND_LABELS, SECOND_SHARES = "second_labels", "second_shares"  # further inputs of a batch: z and s of each example


@final
@dataclass(frozen=True)
class PlainImages:
    """Call it with an order and places in it; it returns the inputs of a model, unchanged."""

    images: Images
    scaling: PixelScaling

    def on(self, device: torch.device) -> "PlainImages":
        return PlainImages(self.images.on(device), self.scaling)

    def __call__(self, order: ExampleOrder, places: Sequence[int]) -> dict[str, Tensor]:
        return self.inputs(order.at(places))

    def inputs(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return the inputs of these images."""
        return {"pixel_values": self.scaling(self.images.pixels(numbers)), "labels": self.images.labels_of(numbers)}


@final
class AugmentedImages:
    """Call it with an order and places in it; it returns the inputs of a model, changed as `part` says.

    batch   the images of a micro-batch: an image is mixed with another one of its micro-batch, the first with the last,
            and all of them with the same share or box, as in the papers' code
    """

    def __init__(self, images: Images, scaling: PixelScaling, part: AugmentPart, *, batch: int, seed: int) -> None:
        self.images, self.scaling, self.part, self.batch, self.seed = images, scaling, part, batch, seed

    def on(self, device: torch.device) -> "AugmentedImages | MovedImages":
        """Return the same with inputs on the device, if pixels are only moved and all images fit there; otherwise this."""
        images = self.images.on(device) if self.part.only_moves_pixels else None
        if isinstance(images, ArrayImages) and images.values.device.type == device.type:
            return MovedImages(images, self.scaling, self.part, seed=self.seed)
        return self

    def __call__(self, order: ExampleOrder, places: Sequence[int]) -> dict[str, Tensor]:
        if not self.part.mixup and not self.part.cutmix:
            numbers = order.at(places)
            pixels = self._changed(numbers, places).float() / 255
            return {"pixel_values": self.scaling(pixels), "labels": self.images.labels[numbers]}
        # The places of a micro-batch are mirrored: the first image is mixed with the last.
        partners = [(2 * (place // self.batch) + 1) * self.batch - 1 - place for place in places]
        needed = sorted({*places, *partners})  # a partner may be in the part of another rank
        index = {place: position for position, place in enumerate(needed)}
        numbers = order.at(needed)
        pixels, labels = self._changed(numbers, needed).float() / 255, self.images.labels[numbers]
        own, other = (torch.tensor([index[place] for place in chosen]) for chosen in (places, partners))
        mixed, shares = pixels[own], torch.zeros(len(places))
        for number in sorted({place // self.batch for place in places}):
            rows = torch.tensor([row for row, place in enumerate(places) if place // self.batch == number])
            mixed[rows], shares[rows] = self._mixed(number, mixed[rows], pixels[other[rows]])
        inputs = {"pixel_values": self.scaling(mixed), "labels": labels[own]}
        return {**inputs, SECOND_LABELS: labels[other], SECOND_SHARES: shares}

    def _mixed(self, number: int, own: Tensor, other: Tensor) -> tuple[Tensor, float]:
        """Return images of micro-batch `number` mixed with `other` ones, and the share of the others."""
        draws, part = Draws(self.seed, OF_MIXING, number), self.part
        if part.mixup and not (part.cutmix and draws.uniform() < 0.5):
            share = draws.symmetric_beta(part.mixup)
            return own * (1 - share) + other * share, share
        # A box with about this share of the area, cut where it leaves the image.
        (height, width), side = own.shape[-2:], math.sqrt(draws.symmetric_beta(part.cutmix))
        across, down = int(width * side), int(height * side)
        x, y = draws.below(width), draws.below(height)
        left, right = max(0, x - across // 2), min(width, x + across // 2)
        top, bottom = max(0, y - down // 2), min(height, y + down // 2)
        pasted = own.clone()
        pasted[..., top:bottom, left:right] = other[..., top:bottom, left:right]
        return pasted, (right - left) * (bottom - top) / (height * width)

    def _changed(self, numbers: Tensor, places: Sequence[int]) -> Tensor:
        """Return (B,C,H,W) uint8: the images of these numbers, changed by what their places give."""
        draws = [Draws(self.seed, OF_IMAGES, place) for place in places]
        smallest = self.part.crop
        if smallest is not None:
            pixels = self.images.crops(numbers, lambda row, width, height: crop_box(draws[row], width, height, smallest))
        else:
            pixels = as_bytes(self.images.pixels(numbers))
        if pad := self.part.pad:
            (height, width), padded = pixels.shape[-2:], torch.nn.functional.pad(pixels, (pad, pad, pad, pad))
            for image, around, draw in zip(pixels, padded, draws, strict=True):
                left, top = draw.below(2 * pad + 1), draw.below(2 * pad + 1)
                image.copy_(around[:, top : top + height, left : left + width])
        if self.part.flip:
            flipped = torch.tensor([draw.uniform() < 0.5 for draw in draws]).view(-1, 1, 1, 1)
            pixels = pixels.flip(-1).where(flipped, pixels)
        if magnitude := self.part.randaugment:
            from holdfast.data.image_operations import randaugment

            for image, draw in zip(pixels, draws, strict=True):
                changed = randaugment(as_picture(image), magnitude, self.part.operations, draw)
                image.copy_(from_picture(changed))
        if self.part.erase:
            for image, draw in zip(pixels, draws, strict=True):
                _erase(image, self.part.erase, draw)
        return pixels


@final
class MovedImages:
    """The inputs of `AugmentedImages` to the bit, on the device of the images, for changes that only move pixels.

    Only the numbers, offsets and flips of a batch are copied to the device. Pixels are looked up in a table of the values
    that the host computes: a GPU divides by a number by multiplying with its rounded reciprocal.
    """

    def __init__(self, images: ArrayImages, scaling: PixelScaling, part: AugmentPart, *, seed: int) -> None:
        assert part.only_moves_pixels
        self.images, self.part, self.seed, device = images, part, seed, images.values.device
        channels, height, width = images.shape
        pixels = as_bytes(torch.arange(256).float() / images.top).float() / 255
        self.table = scaling(pixels.expand(1, channels, 1, 256)).flatten().to(device)  # (C * 256,)
        self.rows_of_table = 256 * torch.arange(channels, device=device).view(-1, 1)
        self.y, self.x = torch.arange(height, device=device), torch.arange(width, device=device)

    def on(self, device: torch.device) -> "MovedImages":
        return self

    def __call__(self, order: ExampleOrder, places: Sequence[int]) -> dict[str, Tensor]:
        draws, pad = ManyDraws(self.seed, OF_IMAGES, last=places), self.part.pad
        none = np.zeros(len(places), dtype=np.int64)
        drawn = [draws.below(2 * pad + 1) - pad if pad else none for _ in range(2)]
        drawn.append((draws.uniform() < 0.5).astype(np.int64) if self.part.flip else none)
        moves = torch.from_numpy(np.stack((order.at(places).numpy(), *drawn)))
        numbers, left, top, is_flipped = self.images.index(moves).unbind()
        (_, height, width), x = self.images.shape, self.x
        column = left[:, None] + torch.where(is_flipped[:, None] > 0, width - 1 - x, x)  # (B,W)
        row = top[:, None] + self.y  # (B,H)
        near_row, near_column = row.clamp(0, height - 1), column.clamp(0, width - 1)
        inside = (row == near_row)[:, :, None] & (column == near_column)[:, None, :]
        source = (near_row * width)[:, :, None] + near_column[:, None, :]  # (B,H,W)
        pixels = self.images.values[numbers]
        moved = pixels.flatten(2).gather(2, source.flatten(1)[:, None].expand(-1, pixels.shape[1], -1)).long()
        moved = moved.masked_fill(~inside.flatten(1)[:, None], 0) + self.rows_of_table
        return {"pixel_values": self.table[moved].view(pixels.shape), "labels": self.images.labels[numbers]}


def _sides(
    draws: Draws, width: int, height: int, share: tuple[float, float], ratio: tuple[float, float]
) -> Iterator[tuple[int, int]]:
    """Yield the sides of random boxes, which may not fit: the share of the area, and the first side to the second."""
    for _ in range(ATTEMPTS):
        area = width * height * draws.uniform(*share)
        drawn = math.exp(draws.uniform(math.log(ratio[0]), math.log(ratio[1])))
        yield round(math.sqrt(area * drawn)), round(math.sqrt(area / drawn))


def crop_box(draws: Draws, width: int, height: int, smallest: float) -> Box:
    """Return a random box with a share of the area from `smallest` to 1; the central square if no box fits."""
    for across, down in _sides(draws, width, height, (smallest, 1.0), RATIO):
        if 0 < across <= width and 0 < down <= height:
            return draws.below(width - across + 1), draws.below(height - down + 1), across, down
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def _erase(image: Tensor, probability: float, draws: Draws) -> None:
    """With this probability, replace a random box of the image by random values, in place."""
    if draws.uniform() >= probability:
        return
    channels, height, width = image.shape
    for down, across in _sides(draws, width, height, ERASED_SHARE, ERASED_RATIO):
        if 0 < across < width and 0 < down < height:
            left, top = draws.below(width - across + 1), draws.below(height - down + 1)
            noise = torch.from_numpy(draws.byte_array(channels, down, across))
            image[:, top : top + down, left : left + across] = noise
            return


@contextmanager
def soft_labels(model: nn.Module, smoothing: float) -> Iterator[None]:
    """Inside the `with`, the model's loss in training mode is that of smoothed labels, mixed where the inputs have a second.

    The model's own forward does not see these further inputs.
    """
    seconds: list[tuple[Tensor, Tensor] | None] = [None]  # of the forward that runs

    def take_seconds(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        seconds[0] = None
        if SECOND_LABELS not in options:
            return None
        kept = dict(options)
        seconds[0] = kept.pop(SECOND_LABELS), kept.pop(SECOND_SHARES)
        return given, kept

    def add_terms(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            count = options.get("num_items_in_batch")
            if seconds[0] is not None:
                term = mixing_term(outputs.logits, options["labels"], *seconds[0], count)
                outputs.loss = outputs.loss + (1 - smoothing) * term
            if smoothing:
                labels = options["shift_labels"] if "shift_labels" in options else options["labels"]
                outputs.loss = outputs.loss + smoothing * smoothing_term(outputs.logits, labels, count)
        return outputs

    handles = [
        model.register_forward_pre_hook(take_seconds, with_kwargs=True, prepend=True),
        model.register_forward_hook(add_terms, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def smoothing_term(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean over labels of l_y - mean_c l_c; with a `count`, the sum divided by it."""
    rows, classes = logits.float().flatten(0, -2), labels.flatten()
    in_use = classes != IGNORED
    of_class = rows.gather(-1, classes.where(in_use, 0).unsqueeze(-1)).squeeze(-1)
    total = (of_class - rows.mean(-1)).where(in_use, 0.0).sum()
    return total / (in_use.sum() if count is None else count)


def mixing_term(logits: Tensor, labels: Tensor, second: Tensor, shares: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean over examples of s (l_y - l_z); with a `count`, the sum divided by it."""
    rows = logits.float()
    of_first, of_second = (rows.gather(-1, classes.unsqueeze(-1)).squeeze(-1) for classes in (labels, second))
    return (shares * (of_first - of_second)).sum() / (len(labels) if count is None else count)
