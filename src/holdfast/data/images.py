"""Labelled images in three splits, by name or path.

digits          of scikit-learn, embedded there
cifar10         image files or the authors' binary files (`cifar`)
fashion-mnist   IDX files of the MNIST family: a magic number, the sizes, the bytes
a folder        one folder per class, split by file, or train/CLASS, val/CLASS and test/CLASS; decoded when needed
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.datasets import DATASETS, Dataset, datasets_for, find_dataset, require_splits
from holdfast.data.documents import SPLITS, hold_out, split_by_title
from holdfast.data.files import checksum, find_file, names_and_sizes, open_unpacked, require_utf8_name, source_folders
from holdfast.data.labelled_images import ArrayImages, FileImages, Images, require_decoder
from holdfast.errors import require_extra, unknown_name

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
SIZE = 224  # pixels per side, as usual for ImageNet
LAYOUT = "put the images of each class into a folder of their own, or into train/CLASS and val/CLASS"
VALID, TEST = ("val", "valid", "validation"), ("test",)
ABOUT = {
    "digits": "1,797 handwritten digits of 8x8 pixels, from scikit-learn; embedded there",
    "fashion-mnist": "70,000 pieces of clothing of 28x28 pixels, from Zalando's IDX files",
}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts it
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_UNSIGNED_BYTES = 0x08  # the type code of IDX files, the only one in use


@final
@dataclass(frozen=True)
class ImageSet:
    """A source of images to classify."""

    name: str
    about: str
    classes: tuple[str, ...]
    splits: Mapping[str, Images]
    checksum: str

    def images(self, split: str) -> Images:
        if split not in self.splits:
            raise ValueError(unknown_name("split", split, self.splits))
        return self.splits[split]

    def describe(self) -> dict[str, Any]:
        """Return what a result records of its images."""
        return {"name": self.name, "about": self.about, "checksum": self.checksum}


def image_sets() -> dict[str, str]:
    """Return the names of the image sources, each with one line of help."""
    return datasets_for("images")


def image_set(name: str | Path, *, folder: str | Path | None = None, size: int | None = None) -> ImageSet:
    """Return the image source of this name, or the images of the folder at this path, scaled to `size` pixels per side.

    Named sources that are not embedded are searched for in `folder`. They are not scaled: `size` must be theirs if it is
    given. The default size of the images of a folder is 224.
    """
    path = Path(name)
    found = (
        find_dataset(name, "images", installed=not path.is_dir()) if isinstance(name, str) and os.sep not in name else None
    )
    if found:
        loaded = _as_image_set(found, found.load(None if folder is None else Path(folder)))
        own = max(loaded.images("train").shape[1:])
        if size not in (None, own):
            raise ValueError(
                f"{name} has images of {own} pixels per side and is not scaled; set data.size to {own}, not {size}."
            )
        return loaded
    if path.is_dir():
        return folder_set(path, size)
    if isinstance(name, Path) or os.sep in name or path.exists():
        raise ValueError(f"{path} is not a folder; {LAYOUT}.")
    raise ValueError(f"there is no folder {name}; {DATASETS.unknown(name, image_sets())}")


def _as_image_set(dataset: Dataset, loaded: Any) -> ImageSet:
    """Return what the function of a dataset has loaded as a set of images."""
    if isinstance(loaded, ImageSet):
        return loaded
    require_splits(dataset.name, loaded, SPLITS, "(pixels, labels)")
    splits = {split: _as_images(f"dataset {dataset.name!r}, {split}", loaded[split]) for split in SPLITS}
    if len(shapes := {images.shape for images in splits.values()}) > 1:
        raise ValueError(f"dataset {dataset.name!r} has images of different shapes: {', '.join(map(str, sorted(shapes)))}.")
    classes = 1 + int(splits["train"].labels.max())
    for split, images in splits.items():
        if int(images.labels.max()) >= classes:
            raise ValueError(f"dataset {dataset.name!r}, {split} has a class that is not in the training images.")
    if classes < 2:
        raise ValueError(f"dataset {dataset.name!r} has one class only; classification needs two.")
    return ImageSet(dataset.name, dataset.about, tuple(map(str, range(classes))), splits, array_checksum(splits))


def _as_images(what: str, pair: Any) -> ArrayImages:
    """Return the pixels and labels of a split; pixels between 0 and 1 are stored as bytes, the precision of image files."""
    try:
        pixels, labels = (torch.as_tensor(each) for each in pair)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ValueError(f"{what} is not a pair of pixels and labels ({' '.join(str(problem).split())}).") from None
    if pixels.dim() != 4 or labels.shape != pixels.shape[:1] or not len(labels):
        shapes = f"{tuple(pixels.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"{what} has pixels and labels of shape {shapes}; expected (N,C,H,W) and (N,), with N above 0.")
    if labels.is_floating_point() or labels.dtype == torch.bool or int(labels.min()) < 0:
        raise ValueError(f"{what} has labels that are not class numbers from 0.")
    if pixels.is_floating_point():
        if not bool(pixels.isfinite().all()) or float(pixels.min()) < 0 or float(pixels.max()) > 1:
            raise ValueError(f"{what} has pixels that are not between 0 and 1; give bytes, or divide by the value of white.")
        pixels = (255 * pixels.double()).round().to(torch.uint8)
    elif pixels.dtype != torch.uint8:
        raise ValueError(f"{what} has pixels of type {pixels.dtype}; give bytes (uint8), or numbers between 0 and 1.")
    return ArrayImages(pixels.contiguous(), labels.long())


def _digits(_: Path | None) -> ImageSet:
    require_extra("the image source digits", "sklearn")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    values = torch.from_numpy(np.asarray(found.images, dtype=np.uint8))[:, None]
    images = ArrayImages(values, torch.from_numpy(np.asarray(found.target, dtype=np.int64)), top=16)
    rest, test = hold_out([str(number) for number in range(len(images))])
    kept, valid = hold_out([str(number) for number in rest], share=len(test) / len(rest))
    numbers = {"train": [rest[i] for i in kept], "valid": [rest[i] for i in valid], "test": test}
    splits = {split: images.only(chosen) for split, chosen in numbers.items()}
    return ImageSet("digits", ABOUT["digits"], tuple(map(str, range(10))), splits, array_checksum(splits))


def _fashion(folder: Path | None) -> ImageSet:
    looked = [DEBIAN] if folder is None else source_folders(folder, ("fashion-mnist", "fashion_mnist"))
    for place in looked:
        if find_file(place, _idx_names("train", "images", 3)):
            full, test = _idx_pair(place, "train"), _idx_pair(place, "t10k")
            break
    else:
        raise ValueError(
            f"fashion-mnist is not in {folder or DEBIAN}: install Debian's package dataset-fashion-mnist, or put its four "
            "files (train-images-idx3-ubyte.gz and so on) into a folder fashion-mnist and name the folder around it."
        )
    kept, valid = hold_out([str(number) for number in range(len(full))])
    splits = {"train": full.only(kept), "valid": full.only(valid), "test": test}
    return ImageSet("fashion-mnist", ABOUT["fashion-mnist"], CLOTHES, splits, array_checksum(splits))


def _idx_pair(folder: Path, part: str) -> ArrayImages:
    images, labels = (_read_first(folder, _idx_names(part, *which), which[1]) for which in (("images", 3), ("labels", 1)))
    if len(images) != len(labels) or int(labels.max()) >= len(CLOTHES):
        raise ValueError(f"{folder}: the labels of {part} are not labels of its {len(images):,} images.")
    return ArrayImages(images[:, None], labels.long())


def _idx_names(part: str, what: str, dimensions: int) -> list[str]:
    return [f"{part}-{what}{joint}idx{dimensions}-ubyte" for joint in "-."]


def _read_first(folder: Path, names: list[str], dimensions: int) -> Tensor:
    path = find_file(folder, names)
    if path is None:
        raise ValueError(f"{folder} has no {names[0]} (plain, .gz or .xz) next to its other files.")
    return read_idx(path, dimensions)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Return a uint8 tensor with `dimensions` dimensions; unpack no more than the header announces."""
    with open_unpacked(path) as file:
        header = file.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
            raise ValueError(f"{path} is not an IDX file of bytes with {dimensions} dimensions.")
        sizes = struct.unpack(f">{dimensions}I", header[4:])
        wanted = math.prod(sizes)
        if wanted > 2**32:
            raise ValueError(f"{path} announces {wanted:,} bytes of images; that is too many for an IDX file.")
        data = file.read(wanted + 1)
    if len(data) != wanted:
        more = "more" if len(data) > wanted else f"{len(data):,}"
        raise ValueError(f"{path} announces {wanted:,} bytes and has {more}.")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(sizes).copy())


def array_checksum(splits: dict[str, ArrayImages]) -> str:
    return checksum(
        part
        for name, images in splits.items()
        for part in (name.encode(), images.values.numpy().tobytes(), images.labels.numpy().tobytes())
    )


def folder_set(folder: Path, size: int | None = None) -> ImageSet:
    """Return the images of `folder/CLASS/`, split by file, or of `train/CLASS/`, `val/CLASS/` and `test/CLASS/` in it.

    If there is no test folder, as in ImageNet, val is the test split and a tenth of train is held out for validation. The
    checksum is of names and sizes: reading a million images for it would take hours.
    """
    require_decoder()  # raise now if it is missing, not in the middle of training
    size = SIZE if size is None else size
    if size < 1:
        raise ValueError(f"size is {size}; images have at least 1 pixel per side.")
    inner = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}
    files = _split_folders(folder, inner) if "train" in inner else _split_by_file(folder, inner)
    classes = sorted({require_utf8_name(path.parent).name for path in files["train"]})
    if len(classes) < 2:
        raise ValueError(
            f"{folder} has images of one class only, {classes[0]}; classification needs two, each in a folder of its own."
        )
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, Images] = {}
    for split, paths in files.items():
        if new := next((path for path in paths if _class(path) not in numbers), None):
            raise ValueError(f"{new.parent} has images of a class that is not in the training images.")
        splits[split] = FileImages(paths, [numbers[_class(path)] for path in paths], size)
    parts = (part for split, paths in files.items() for part in (split.encode(), *names_and_sizes(paths, folder)))
    name = require_utf8_name(folder.resolve()).name
    about = f"{sum(map(len, files.values())):,} images of {len(classes)} classes in {name}, {size} pixels per side"
    return ImageSet(name, about, tuple(classes), splits, checksum(parts))


def _split_folders(folder: Path, inner: dict[str, Path]) -> dict[str, list[Path]]:
    train = _image_files(inner["train"])
    valid, test = (next((inner[name] for name in names if name in inner), None) for names in (VALID, TEST))
    if valid is None and test is None:
        raise ValueError(f"{folder} has a folder train but no folder val or test next to it.")
    if valid is not None and test is not None:
        return {"train": train, "valid": _image_files(valid), "test": _image_files(test)}
    kept, held = hold_out([path.relative_to(folder).as_posix() for path in train])
    tested = test if test is not None else valid
    assert tested is not None
    return {"train": [train[i] for i in kept], "valid": [train[i] for i in held], "test": _image_files(tested)}


def _split_by_file(folder: Path, inner: dict[str, Path]) -> dict[str, list[Path]]:
    if not inner:
        raise ValueError(f"{folder} has no folders; {LAYOUT}.")
    paths = {path.relative_to(folder).as_posix(): path for path in _image_files(folder)}
    if len(paths) < 3:
        raise ValueError(f"{folder} has {len(paths)} images; splitting them needs at least 3.")
    split_of = split_by_title(dict.fromkeys(paths, 1))
    return {
        split: [path for title, path in paths.items() if split_of[title] == split] for split in ("train", "valid", "test")
    }


def _image_files(folder: Path) -> list[Path]:
    """Return the images in the class folders of a folder, sorted."""
    found = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not found:
        raise ValueError(f"{folder} has no images in folders of their class ({', '.join(sorted(ENDINGS))}).")
    return found


def _class(path: Path) -> str:
    return path.parent.name


DATASETS.add(Dataset("digits", ABOUT["digits"], "images", _digits))
DATASETS.add(Dataset("fashion-mnist", ABOUT["fashion-mnist"], "images", _fashion))
