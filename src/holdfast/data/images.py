"""Images with labels as pixels: from an array, or from files that are decoded when needed."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.files import require_utf8_name
from holdfast.errors import require_extra
from holdfast.files import MIB

if TYPE_CHECKING:
    from PIL.Image import Image

# The formats that are decoded, whatever the name of a file. Formats for which Pillow starts other programs are excluded.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
LARGEST_ON_DEVICE = 4096 * MIB  # bytes of all images of a split, to be kept on a GPU
LARGEST_IN_MEMORY = 2048 * MIB  # bytes of all images of a set, to be kept after they were decoded

Box = tuple[int, int, int, int]  # left, top, width, height, in pixels
ChooseBox = Callable[[int, int, int], Box]  # from the place in the batch, the width and the height of an image


@final
@dataclass(frozen=True)
class PixelScaling:
    """How a model reads pixels between 0 and 1: (pixel - mean) / std, for each channel or with one number for all."""

    mean: tuple[float, ...] = (0.5,)  # to [-1, 1], the input range of vision models in transformers
    std: tuple[float, ...] = (0.5,)

    @classmethod
    def from_lists(cls, mean: Any, std: Any) -> "PixelScaling":
        """Return the scaling of untrusted lists; raise ValueError if they are not numbers, one of each for a channel."""
        for values in (mean, std):
            if not isinstance(values, list | tuple) or not values or not all(type(x) in (int, float) for x in values):
                raise ValueError(f"pixels are scaled by a list of numbers, one for each channel, not by {values!r}.")
        if len(mean) != len(std) or not all(0 < x < math.inf for x in std) or not all(map(math.isfinite, mean)):
            raise ValueError(f"pixels cannot be scaled by the mean {mean} and the standard deviation {std}.")
        return cls(tuple(map(float, mean)), tuple(map(float, std)))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return (B,C,H,W) pixels as the model reads them."""
        if len(self.mean) not in (1, pixels.shape[1]):
            raise ValueError(f"images have {pixels.shape[1]} channels, and are scaled as images with {len(self.mean)}.")
        if len(self.mean) == 1:
            return (pixels - self.mean[0]) / self.std[0]
        mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels - mean) / std


class Images(ABC):
    """Images of one shape (channels, height, width), with labels (N,) int64 (abstract)."""

    labels: Tensor
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        """Return the images of these numbers: (B,C,H,W) float32 between 0 and 1."""

    def labels_of(self, numbers: Tensor) -> Tensor:
        """Return the labels of these numbers, on the device of `pixels`."""
        return self.labels[numbers]

    def on(self, device: torch.device) -> "Images":
        """Return images whose `pixels` and `labels` are on the device, if all of them fit there; otherwise these."""
        return self

    def sides(self, numbers: Iterable[int]) -> list[int] | None:
        """Return the shorter side of these images on disk; None for images that are not scaled from files."""
        return None

    def crops(self, numbers: Iterable[int] | Tensor, choose: ChooseBox) -> Tensor:
        """Return (B,C,H,W) uint8: the box of each whole image that `choose` returns, scaled to the size of the images."""
        _, height, width = self.shape
        found = []
        for place, image in enumerate(self.whole(numbers)):
            left, top, across, down = choose(place, *image.size)
            box = (left, top, left + across, top + down)
            found.append(from_picture(image.resize((width, height), _pillow().Resampling.BILINEAR, box=box)))
        return torch.stack(found)

    def whole(self, numbers: Iterable[int] | Tensor) -> Iterator["Image"]:
        """Yield images of Pillow; on disk they may be larger than what `pixels` returns."""
        return map(as_picture, as_bytes(self.pixels(numbers)))


@final
class ArrayImages(Images):
    """Images in memory as small integers, where `top` is white."""

    def __init__(self, values: Tensor, labels: Tensor, top: int = 255) -> None:
        assert values.dim() == 4 and values.dtype == torch.uint8 and len(values) == len(labels)
        self.values, self.labels, self.top = values, labels, top
        self.shape = (values.shape[1], values.shape[2], values.shape[3])

    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        return self.values[self.index(numbers)].float() / self.top

    def labels_of(self, numbers: Tensor) -> Tensor:
        return self.labels[self.index(numbers)]

    def index(self, numbers: Iterable[int] | Tensor) -> Tensor:
        """Return the numbers where the images are; to a GPU they are copied without waiting for it."""
        index = as_index(numbers)
        return index.pin_memory().to(self.values.device, non_blocking=True) if self.values.is_cuda else index

    def on(self, device: torch.device) -> "ArrayImages":
        if self.values.device == device or self.values.nbytes > LARGEST_ON_DEVICE:
            return self
        return ArrayImages(self.values.to(device), self.labels.to(device), self.top)

    def only(self, numbers: Iterable[int]) -> "ArrayImages":
        chosen = as_index(numbers)
        return ArrayImages(self.values[chosen], self.labels[chosen], self.top)


Prepare = Callable[["Image"], "np.typing.NDArray[np.uint8]"]  # from an image of any size to (size,size,3)
Decoded = dict[Path, Tensor]  # (3,size,size) uint8 of each file


def memory_for(count: int, size: int) -> Decoded | None:
    """Return where a set of `count` images keeps them after they were decoded; None if they are too many."""
    return {} if count * 3 * size**2 <= LARGEST_IN_MEMORY else None


@final
class FileImages(Images):
    """Images on disk, in colour: the shorter side is scaled to `size`, and the central square is used.

    prepare     resizes and crops images in another way
    decoded     where images are kept after they were decoded (`memory_for`); several splits may share it. None: each file is
                decoded whenever it is needed
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: Sequence[int],
        size: int,
        prepare: Prepare | None = None,
        decoded: Decoded | None = None,
    ) -> None:
        self.paths, self.labels = list(paths), torch.tensor(labels, dtype=torch.int64)
        self.shape, self.prepare, self.decoded = (3, size, size), prepare, decoded

    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        return self._bytes(as_index(numbers).tolist()).float() / 255

    def on(self, device: torch.device) -> Images:
        if self.decoded is None or device.type == "cpu":
            return self
        return ArrayImages(self._bytes(range(len(self))), self.labels).on(device)

    def _bytes(self, numbers: Sequence[int]) -> Tensor:
        """Return (B,3,size,size) uint8."""
        images = [self.read(self.paths[number]) for number in numbers]
        return torch.stack(images) if images else torch.empty(0, *self.shape).byte()

    def read(self, path: Path) -> Tensor:
        """Return (3,size,size) uint8: the image in a file."""
        if self.decoded is not None and path in self.decoded:
            return self.decoded[path]
        pixels = torch.from_numpy(decode(path, self.shape[1], self.prepare)).permute(2, 0, 1).contiguous()
        if self.decoded is not None:
            self.decoded[path] = pixels
        return pixels

    def whole(self, numbers: Iterable[int] | Tensor) -> Iterator["Image"]:
        return (read_image(self.paths[number], str(self.paths[number])) for number in as_index(numbers).tolist())

    def sides(self, numbers: Iterable[int]) -> list[int]:
        """Return the shorter side of these images on disk; only their headers are read."""
        return [min(read_image(self.paths[number], str(self.paths[number]), decode=False).size) for number in numbers]


def as_bytes(pixels: Tensor) -> Tensor:
    """Return pixels between 0 and 1 as whole numbers from 0 to 255, uint8."""
    return (255 * pixels).round().clamp(0, 255).to(torch.uint8)


def as_picture(image: Tensor) -> "Image":
    """Return (C,H,W) uint8, in colour or grey, as an image of Pillow."""
    return _pillow().fromarray(image.permute(1, 2, 0).squeeze(2).numpy())  # type: ignore[no-any-return]


def from_picture(picture: "Image") -> Tensor:
    """Return (C,H,W) uint8: the values of an image of Pillow."""
    values = torch.from_numpy(np.array(picture))
    return values.view(picture.height, picture.width, -1).permute(2, 0, 1)


def read_image(file: Path | IO[bytes], name: str, *, decode: bool = True) -> "Image":
    """Return an image in colour and upright; without `decode`, only its header is read. `name` is the file's in errors."""
    pillow = _pillow()
    from PIL import ImageOps

    try:
        with pillow.open(file, formats=FORMATS) as opened:
            if not decode:
                return opened  # type: ignore[no-any-return]
            opened.load()
            with suppress(Exception):  # Pillow does not document what damaged EXIF data raise
                ImageOps.exif_transpose(opened, in_place=True)
            return _as_bytes_per_channel(opened).convert("RGB")
    except FileNotFoundError as error:
        raise ValueError(f"{name} does not exist.") from error
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:  # what Pillow's decoders raise
        raise ValueError(f"{name} is not an image that can be read: {error}.") from error


def _as_bytes_per_channel(image: "Image") -> "Image":
    """Return an image whose channels are bytes. Pillow clips larger numbers at 255, so they are scaled by their range here.

    16-bit integers are divided by 257; real numbers must be between 0 and 1. The range of other integers is not known.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # 0 to 65535
        values = np.asarray(image, dtype=np.float64) / 257
    elif image.mode == "F":
        values = 255 * np.asarray(image, dtype=np.float64)
        if not 0 <= values.min() <= values.max() <= 255:  # also false for NaN
            low, high = values.min() / 255, values.max() / 255
            raise ValueError(f"its pixels are real numbers from {low:g} to {high:g}, not from 0 to 1")
    elif image.mode == "I":
        raise ValueError("its pixels are integers of unknown range; save it with 8 or 16 bits per channel")
    else:
        return image
    return _pillow().fromarray(values.round().astype(np.uint8))  # type: ignore[no-any-return]


def decode(path: Path, size: int, prepare: Prepare | None = None) -> "np.typing.NDArray[np.uint8]":
    """Return the scaled and cropped image, (size,size,3)."""
    image = read_image(path, str(path))
    return central_square(image, size) if prepare is None else prepare(image)


def central_square(image: "Image", size: int) -> "np.typing.NDArray[np.uint8]":
    """Return the central square of an image whose shorter side is scaled to `size`: (size,size,3)."""
    if image.size == (size, size):
        return np.array(image, dtype=np.uint8)
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), _pillow().Resampling.BILINEAR)
    return np.array(scaled.crop((left, top, left + size, top + size)), dtype=np.uint8)


def _pillow() -> Any:
    require_extra("decoding images", "PIL")
    from PIL import Image

    return Image


def as_index(numbers: Iterable[int] | Tensor) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers), dtype=torch.int64)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones. Reports show their names, so these must be UTF-8."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return [require_utf8_name(folder / name) for name in names]


def images_in(folder: Path) -> list[Path]:
    """Return the image files in a folder, sorted, without hidden ones; pipes and devices are no files."""
    with os.scandir(folder) as entries:
        names = [
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and os.path.splitext(entry.name)[1].lower() in ENDINGS and entry.is_file()
        ]
    return [folder / name for name in sorted(names)]
