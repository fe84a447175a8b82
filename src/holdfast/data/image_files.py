"""Folders of pictures, one sub-folder a class, decoded as they are asked for."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.checksum import checksum
from holdfast.data.images import Images, ImageSet, as_index
from holdfast.data.splitting import by_title, hold_out
from holdfast.extras import require_extra

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
# What is decoded, whatever the file is called. Pillow knows formats that start other programs: those are not among them.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
SIZE = 224  # pixels, ImageNet's usual
VALID, TEST = ("val", "valid", "validation"), ("test",)


@final
class FileImages(Images):
    """Pictures on disk, in colour: the shorter side is scaled to `size` and the middle is cut out."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], size: int) -> None:
        self.paths, self.labels = list(paths), torch.tensor(labels, dtype=torch.int64)
        self.shape = (3, size, size)

    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        chosen = as_index(numbers).tolist()
        pixels = [torch.from_numpy(decode(self.paths[number], self.shape[1])) for number in chosen]
        return torch.stack(pixels).permute(0, 3, 1, 2).float() / 255 if pixels else torch.empty(0, *self.shape)


def decode(path: Path, size: int) -> "np.typing.NDArray[np.uint8]":
    """(size,size,3)."""
    pillow = _pillow()
    try:
        with pillow.open(path, formats=FORMATS) as file:
            image: Image = file.convert("RGB")
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist.") from error
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:  # what Pillow's decoders raise
        raise ValueError(f"{path} is not a picture that can be read: {error}.") from error
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), pillow.Resampling.BILINEAR)
    return np.array(scaled.crop((left, top, left + size, top + size)), dtype=np.uint8)


def _pillow() -> Any:
    require_extra("decoding pictures", "PIL")
    from PIL import Image

    return Image


def folder_set(folder: Path, size: int | None = None) -> ImageSet:
    """The pictures of `folder/CLASS/`, split by file, or of `train/CLASS/`, `val/CLASS/` and `test/CLASS/` in the folder.

    Where there is no test folder, as in ImageNet, val is the test and a tenth of train is held out in its place. The
    checksum is of names and sizes: reading a million pictures for it would take hours.
    """
    _pillow()  # better now than in the middle of training
    size = SIZE if size is None else size
    if size < 1:
        raise ValueError(f"pictures of {size} pixels a side hold nothing; the size is at least 1.")
    inner = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}
    files = _split_folders(folder, inner) if "train" in inner else _split_by_file(folder, inner)
    classes = sorted({_class(path) for path in files["train"]})
    if len(classes) < 2:
        raise ValueError(
            f"{folder} has pictures of one class only, {classes[0]}; to classify takes two, each in a folder of its own."
        )
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, Images] = {}
    for split, paths in files.items():
        if stranger := next((path for path in paths if _class(path) not in numbers), None):
            raise ValueError(f"{stranger.parent} has pictures of a class that is not among those to train on.")
        splits[split] = FileImages(paths, [numbers[_class(path)] for path in paths], size)
    parts = (
        part
        for split, paths in files.items()
        for path in paths
        for part in (split.encode(), path.relative_to(folder).as_posix().encode(), str(path.stat().st_size).encode())
    )
    name = folder.resolve().name
    about = f"{sum(map(len, files.values())):,} pictures of {len(classes)} classes in {name}, {size} pixels a side"
    return ImageSet(name, about, tuple(classes), splits, checksum(parts))


def _split_folders(folder: Path, inner: dict[str, Path]) -> dict[str, list[Path]]:
    train = _pictures(inner["train"])
    valid, test = (next((inner[name] for name in names if name in inner), None) for names in (VALID, TEST))
    if valid is None and test is None:
        raise ValueError(f"{folder} has a folder train but no folder val or test beside it.")
    if valid is not None and test is not None:
        return {"train": train, "valid": _pictures(valid), "test": _pictures(test)}
    kept, held = hold_out([path.relative_to(folder).as_posix() for path in train])
    tested = test if test is not None else valid
    assert tested is not None
    return {"train": [train[i] for i in kept], "valid": [train[i] for i in held], "test": _pictures(tested)}


def _split_by_file(folder: Path, inner: dict[str, Path]) -> dict[str, list[Path]]:
    if not inner:
        raise ValueError(f"{folder} has no folders in it: pictures lie in one a class, or in train/CLASS and val/CLASS.")
    paths = {path.relative_to(folder).as_posix(): path for path in _pictures(folder)}
    if len(paths) < 3:
        raise ValueError(f"{folder} holds {len(paths)} pictures; splitting them takes at least 3.")
    split_of = by_title(dict.fromkeys(paths, 1))
    return {
        split: [path for title, path in paths.items() if split_of[title] == split] for split in ("train", "valid", "test")
    }


def _pictures(folder: Path) -> list[Path]:
    """The pictures in the class folders of a folder, sorted."""
    found = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not found:
        raise ValueError(f"{folder} holds no pictures in folders of their class ({', '.join(sorted(ENDINGS))}).")
    return found


def _class(path: Path) -> str:
    return path.parent.name
