"""Labelled images in three splits, by name or path.

digits          of scikit-learn, embedded there
fashion-mnist   IDX files of the MNIST family: a magic number, the sizes, the bytes
cifar10         in a folder cifar10, one of:
                    train/CLASS/*.jpg, test/CLASS/*.jpg     in folders or in cifar10.tar, cifar10-jpg.tar (plain, .gz or .xz)
                    data_batch_1.bin ... test_batch.bin     in cifar-10-batches-bin or cifar-10-binary.tar.gz
                The authors' Python version is a pickle, which can execute code, and is not read.
a folder        one folder per class, split by file, or train/CLASS, val/CLASS and test/CLASS; decoded when needed
"""

import io
import math
import os
import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.datasets import DATASETS, Dataset, datasets_for, find_dataset, require_splits
from holdfast.data.documents import SPLITS, hold_out, split_by_title
from holdfast.data.files import checksum, find_file, names_and_sizes, open_unpacked, require_utf8_name, source_folders
from holdfast.data.images import (
    ENDINGS,
    ArrayImages,
    FileImages,
    Images,
    as_bytes,
    folders_in,
    images_in,
    memory_for,
    read_image,
)
from holdfast.errors import require_extra, require_known
from holdfast.files import MIB, require_regular

SIZE = 224  # pixels per side, as usual for ImageNet
LAYOUT = "put the images of each class into a folder of their own, or into train/CLASS and val/CLASS"
VALID, TEST = ("val", "valid", "validation"), ("test",)
ABOUT = {
    "digits": "1,797 handwritten digits of 8x8 pixels, from scikit-learn; embedded there",
    "fashion-mnist": "70,000 pieces of clothing of 28x28 pixels, from Zalando's IDX files",
    "cifar10": "60,000 colour images of 32x32 pixels, ten classes of animals and vehicles",
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
    outputs: tuple[int, ...] | None = None  # a model's output of each class; None: they are in order

    def images(self, split: str) -> Images:
        require_known("split", split, self.splits)
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
    is_name = isinstance(name, str) and os.sep not in name
    if is_name and (found := find_dataset(str(name), "images", installed=not path.is_dir())):
        loaded = _as_image_set(found, found.load(None if folder is None else Path(folder)))
        require_size(name, loaded.images("train"), size)
        return loaded
    if path.is_dir():
        return folder_set(path, size)
    if not is_name or path.exists():
        raise ValueError(f"{path} is not a folder; {LAYOUT}.")
    raise ValueError(f"there is no folder {name}; {DATASETS.unknown(name, image_sets())}")


def require_size(name: str | Path, images: Images, size: int | None) -> None:
    """Raise ValueError if a named set, which is not scaled, has other pixels per side."""
    if size not in (None, own := max(images.shape[1:])):
        is_of = f"{name} has images of {own} pixels per side and is not scaled"
        raise ValueError(f"{is_of}; set data.size to {own}, not {size}.")


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
    return _array_set(dataset.name, dataset.about, [str(number) for number in range(classes)], splits)


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
        pixels = as_bytes(pixels.double())
    elif pixels.dtype != torch.uint8:
        raise ValueError(f"{what} has pixels of type {pixels.dtype}; give bytes (uint8), or numbers between 0 and 1.")
    return ArrayImages(pixels.contiguous(), labels.long())


def _array_set(name: str, about: str, classes: Sequence[str], splits: Mapping[str, ArrayImages]) -> ImageSet:
    """Return a set of images in memory."""
    parts = (
        part
        for split, images in splits.items()
        for part in (split.encode(), images.values.numpy().tobytes(), images.labels.numpy().tobytes())
    )
    return ImageSet(name, about, tuple(classes), splits, checksum(parts))


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
    return _array_set("digits", ABOUT["digits"], "0123456789", splits)


def _fashion(folder: Path | None) -> ImageSet:
    for place in [DEBIAN] if folder is None else source_folders(folder, ("fashion-mnist", "fashion_mnist")):
        if find_file(place, _idx_names("train", "images", 3)):
            full, test = _idx_pair(place, "train"), _idx_pair(place, "t10k")
            kept, held = hold_out([str(number) for number in range(len(full))])
            splits = {"train": full.only(kept), "valid": full.only(held), "test": test}
            return _array_set("fashion-mnist", ABOUT["fashion-mnist"], CLOTHES, splits)
    raise ValueError(
        f"fashion-mnist is not in {folder or DEBIAN}: install Debian's package dataset-fashion-mnist, or put its four "
        "files (train-images-idx3-ubyte.gz and so on) into a folder fashion-mnist and name the folder around it."
    )


def _idx_names(part: str, what: str, dimensions: int) -> list[str]:
    return [f"{part}-{what}{joint}idx{dimensions}-ubyte" for joint in "-."]


def _idx_pair(folder: Path, part: str) -> ArrayImages:
    found = []
    for what, dimensions in (("images", 3), ("labels", 1)):
        names = _idx_names(part, what, dimensions)
        path = find_file(folder, names)
        if path is None:
            raise ValueError(f"{folder} has no {names[0]} (plain, .gz or .xz) next to its other files.")
        found.append(_read_idx(path, dimensions))
    images, labels = found
    if len(images) != len(labels) or int(labels.max()) >= len(CLOTHES):
        raise ValueError(f"{folder}: the labels of {part} are not labels of its {len(images):,} images.")
    return ArrayImages(images[:, None], labels.long())


def _read_idx(path: Path, dimensions: int) -> Tensor:
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


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")  # of CIFAR-10
SIDE = 32
BINARY = "cifar-10-batches-bin"
ARCHIVES = ("cifar10.tar", "cifar10-jpg.tar", "cifar-10-binary.tar")
RECORD = 1 + 3 * SIDE * SIDE  # bytes of the authors' format: the class, then red, green and blue
MOST_UNPACKED, LARGEST_FILE, MOST_FILES = 1024 * MIB, 64 * MIB, 200_000  # of an archive
Named = dict[str, tuple[int, Any]]  # name of an image: its class and its pixels (3,32,32)


def load_cifar10(folder: Path | None) -> ImageSet:
    """Return CIFAR-10; a tenth of the training images is held out for validation."""
    if folder is None:
        raise ValueError("cifar10 is not downloaded; name the folder around cifar10/ with --data.")
    for place in source_folders(folder, ("cifar10", "cifar-10")):
        if (place / "train").is_dir() and (place / "test").is_dir():
            return _cifar10(place, _from_folder(place, [*place.glob("train/*/*"), *place.glob("test/*/*")]))
        if (place / BINARY).is_dir():
            return _cifar10(place, _from_folder(place, (place / BINARY).glob("*.bin")))
        if archive := find_file(place, ARCHIVES):
            return _cifar10(place, _from_archive(archive))
    raise ValueError(
        f"cifar10 is not in {folder}: put train/CLASS and test/CLASS, cifar10.tar with these folders, or the authors' "
        "cifar-10-binary.tar.gz into a folder cifar10 and name the folder around it."
    )


def _from_folder(place: Path, paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for path in filter(Path.is_file, paths):
        require_regular(path, limit=LARGEST_FILE)
        yield path.relative_to(place).as_posix(), path.read_bytes()


def _from_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive; nothing is written to the disk."""
    with open_unpacked(path) as file:
        data = file.read(MOST_UNPACKED + 1)
    if len(data) > MOST_UNPACKED:
        raise ValueError(f"{path} unpacks to more than {MOST_UNPACKED // MIB:,} MiB; it is not read.")
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number >= MOST_FILES or member.size > LARGEST_FILE:
                    raise ValueError(f"{path} has more or larger files than CIFAR-10; it is not read.")
                if content := archive.extractfile(member) if member.isreg() else None:
                    yield member.name, content.read()
    except tarfile.TarError as problem:
        raise ValueError(f"{path} is not a complete tar archive: {problem}.") from problem


def _cifar10(place: Path, files: Iterable[tuple[str, bytes]]) -> ImageSet:
    found: dict[str, Named] = {"train": {}, "test": {}}
    for name, content in files:
        parts = Path(name).parts
        if parts[-1].endswith(".bin"):
            found["test" if parts[-1].startswith("test") else "train"] |= _records(parts[-1], content, place)
        elif len(parts) >= 3 and parts[-3] in found and Path(name).suffix.lower() in ENDINGS:
            name, (split, label) = "/".join(parts[-3:]), parts[-3:-1]
            if label not in CLASSES:
                raise ValueError(f"{place} has images of {label!r}, which is no class of CIFAR-10: {', '.join(CLASSES)}.")
            image = np.asarray(read_image(io.BytesIO(content), f"{name} in {place}"), dtype=np.uint8)
            if image.shape != (SIDE, SIDE, 3):
                width, height = image.shape[1::-1]
                raise ValueError(f"{name} in {place} has {width} x {height} pixels; CIFAR-10 has 32 x 32.")
            found[split][name] = CLASSES.index(label), image.transpose(2, 0, 1)
    splits = {}
    for split, images in found.items():
        counts = np.bincount([label for label, _ in images.values()], minlength=len(CLASSES)).tolist()
        if len(set(counts)) > 1 or not counts[0]:  # also of an archive that is cut off
            few, most = min(counts), max(counts)
            raise ValueError(
                f"{place} has {few:,} images of {CLASSES[counts.index(few)]} in {split}, and {most:,} of another class; "
                "CIFAR-10 has as many of each, so some are missing."
            )
        labels, pixels = zip(*(images[name] for name in sorted(images)), strict=True)
        splits[split] = ArrayImages(torch.from_numpy(np.stack(pixels)), torch.tensor(labels, dtype=torch.int64))
    kept, held = hold_out(sorted(found["train"]))
    splits = {"train": splits["train"].only(kept), "valid": splits["train"].only(held), "test": splits["test"]}
    return _array_set("cifar10", ABOUT["cifar10"], CLASSES, splits)


def _records(name: str, content: bytes, place: Path) -> Named:
    """Return the images of a file of the authors' binary version."""
    if not content or len(content) % RECORD:
        raise ValueError(f"{name} in {place} has {len(content):,} bytes; an image has {RECORD:,}, so it is damaged.")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    if int(records[:, 0].max()) >= len(CLASSES):
        raise ValueError(f"{name} in {place} has a class that CIFAR-10 does not have; it is damaged.")
    return {
        f"{name}/{number:05}": (int(record[0]), record[1:].reshape(3, SIDE, SIDE)) for number, record in enumerate(records)
    }


def folder_set(folder: Path, size: int | None = None) -> ImageSet:
    """Return the images of `folder/CLASS/`, split by file, or of `train/CLASS/`, `val/CLASS/` and `test/CLASS/` in it.

    If there is no test folder, as in ImageNet, val is the test split and a tenth of train is held out for validation. The
    checksum is of names and sizes: reading a million images for it would take hours.
    """
    require_extra("decoding images", "PIL")  # raise now if it is missing, not in the middle of training
    size = SIZE if size is None else size
    inner = {path.name: path for path in folders_in(folder)}
    files = _split_folders(folder, inner) if "train" in inner else _split_by_file(folder, inner)
    classes = sorted({path.parent.name for path in files["train"]})
    if len(classes) < 2:
        raise ValueError(
            f"{folder} has images of one class only, {classes[0]}; classification needs two, each in a folder of its own."
        )
    count = sum(map(len, files.values()))
    decoded = memory_for(count, size)
    splits: dict[str, Images] = {}
    for split, paths in files.items():
        if new := next((path for path in paths if path.parent.name not in classes), None):
            raise ValueError(f"{new.parent} has images of a class that is not in the training images.")
        numbers = {name: number for number, name in enumerate(classes)}
        splits[split] = FileImages(paths, [numbers[path.parent.name] for path in paths], size, decoded=decoded)
    parts = (part for split, paths in files.items() for part in (split.encode(), *names_and_sizes(paths, folder)))
    name = require_utf8_name(folder.resolve()).name
    about = f"{count:,} images of {len(classes)} classes in {name}, {size} pixels per side"
    return ImageSet(name, about, tuple(classes), splits, checksum(parts))


def _split_folders(folder: Path, inner: dict[str, Path]) -> dict[str, list[Path]]:
    train = _class_images(inner["train"])
    valid, test = (next((inner[name] for name in names if name in inner), None) for names in (VALID, TEST))
    if valid is not None and test is not None:
        return {"train": train, "valid": _class_images(valid), "test": _class_images(test)}
    tested = test or valid
    if tested is None:
        raise ValueError(f"{folder} has a folder train but no folder val or test next to it.")
    kept, held = hold_out([path.relative_to(folder).as_posix() for path in train])
    return {"train": [train[i] for i in kept], "valid": [train[i] for i in held], "test": _class_images(tested)}


def _split_by_file(folder: Path, inner: dict[str, Path]) -> dict[str, list[Path]]:
    if not inner:
        raise ValueError(f"{folder} has no folders; {LAYOUT}.")
    paths = {path.relative_to(folder).as_posix(): path for path in _class_images(folder)}
    if len(paths) < 3:
        raise ValueError(f"{folder} has {len(paths)} images; splitting them needs at least 3.")
    split_of = split_by_title(dict.fromkeys(paths, 1))
    return {split: [path for title, path in paths.items() if split_of[title] == split] for split in SPLITS}


def _class_images(folder: Path) -> list[Path]:
    """Return the images in the class folders of a folder, sorted."""
    found = [path for inner in folders_in(folder) for path in images_in(inner)]
    if not found:
        raise ValueError(f"{folder} has no images in folders of their class ({', '.join(sorted(ENDINGS))}).")
    return found


for _name, _load in (("digits", _digits), ("fashion-mnist", _fashion), ("cifar10", load_cifar10)):
    DATASETS.add(Dataset(_name, ABOUT[_name], "images", _load))
