"""CIFAR-10: 60,000 colour images of 32x32 pixels in ten classes, decoded once and kept in memory as bytes.

In a folder cifar10, one of:

    train/CLASS/*.jpg, test/CLASS/*.jpg     image files, in folders or in cifar10.tar, cifar10-jpg.tar (plain, .gz or .xz)
    data_batch_1.bin ... test_batch.bin     the authors' binary version, in cifar-10-batches-bin or cifar-10-binary.tar.gz

The authors' Python version is a pickle, which can execute code, and is not read.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from holdfast.data.datasets import DATASETS, Dataset
from holdfast.data.documents import hold_out
from holdfast.data.files import find_file, open_unpacked, source_folders
from holdfast.data.images import ENDINGS, ImageSet, array_checksum
from holdfast.data.labelled_images import ArrayImages, read_image
from holdfast.files import MIB, require_regular

ABOUT = "60,000 colour images of 32x32 pixels, ten classes of animals and vehicles"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
FOLDERS, BINARY = ("cifar10", "cifar-10"), "cifar-10-batches-bin"
ARCHIVES = ("cifar10.tar", "cifar10-jpg.tar", "cifar-10-binary.tar")
RECORD = 1 + 3 * SIDE * SIDE  # bytes of the authors' format: the class, then red, green and blue
MOST_UNPACKED, LARGEST_FILE, MOST_FILES = 1024 * MIB, 64 * MIB, 200_000  # of an archive
Found = dict[str, dict[str, tuple[int, Any]]]  # split: name of an image: its class and its pixels (3,32,32)


def load_cifar10(folder: Path | None) -> ImageSet:
    """Return CIFAR-10; a tenth of the training images is held out for validation."""
    if folder is None:
        raise ValueError("cifar10 is not downloaded; name the folder around cifar10/ with --data.")
    for place in source_folders(folder, FOLDERS):
        if files := _files(place):
            return _image_set(place, files)
    raise ValueError(
        f"cifar10 is not in {folder}: put train/CLASS and test/CLASS, cifar10.tar with these folders, or the authors' "
        "cifar-10-binary.tar.gz into a folder cifar10 and name the folder around it."
    )


def _files(place: Path) -> Iterator[tuple[str, bytes]] | None:
    """Return the names and contents of the files of a folder or of the archive in it; None if there is neither."""
    if (place / "train").is_dir() and (place / "test").is_dir():
        return _from_folder(place, sorted([*place.glob("train/*/*"), *place.glob("test/*/*")]))
    if (place / BINARY).is_dir():
        return _from_folder(place, sorted((place / BINARY).glob("*.bin")))
    archive = find_file(place, ARCHIVES)
    return None if archive is None else _from_archive(archive)


def _from_folder(place: Path, paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        if not path.is_file():
            continue
        require_regular(path, limit=LARGEST_FILE)
        yield path.relative_to(place).as_posix(), path.read_bytes()


def _from_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive, which is read once from start to end; nothing is written to the disk."""
    with open_unpacked(path) as file:
        try:
            with tarfile.open(fileobj=_Limited(file, path), mode="r|") as archive:  # type: ignore[call-overload]
                for number, member in enumerate(archive):
                    if number >= MOST_FILES or member.size > LARGEST_FILE:
                        raise ValueError(f"{path} has more or larger files than CIFAR-10; it is not read.")
                    content = archive.extractfile(member) if member.isreg() else None
                    if content is not None:
                        yield member.name, content.read()
        except tarfile.TarError as problem:
            raise ValueError(f"{path} is not a complete tar archive: {problem}.") from problem


class _Limited:
    """A file that raises ValueError once more than MOST_UNPACKED bytes have been read from it."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path, self.left = file, path, MOST_UNPACKED

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"{self.path} unpacks to more than {MOST_UNPACKED // MIB:,} MiB; it is not read.")
        return data


def _image_set(place: Path, files: Iterator[tuple[str, bytes]]) -> ImageSet:
    found: Found = {"train": {}, "test": {}}
    for name, content in files:
        parts = Path(name).parts
        if parts[-1].endswith(".bin"):
            _add_records(found, parts[-1], content, place)
        elif len(parts) >= 3 and parts[-3] in found and Path(name).suffix.lower() in ENDINGS:
            _add_image(found[parts[-3]], "/".join(parts[-3:]), content, place)
    for split, images in found.items():
        counts = np.bincount([label for label, _ in images.values()], minlength=len(CLASSES)).tolist()
        if len(set(counts)) > 1 or not counts[0]:  # also of an archive that is cut off
            few, most = min(counts), max(counts)
            raise ValueError(
                f"{place} has {few:,} images of {CLASSES[counts.index(few)]} in {split}, and {most:,} of another class; "
                "CIFAR-10 has as many of each, so some are missing."
            )
    names = sorted(found["train"])
    kept, held = hold_out(names)
    chosen = {"train": [names[i] for i in kept], "valid": [names[i] for i in held], "test": sorted(found["test"])}
    splits = {split: _images(found["test" if split == "test" else "train"], some) for split, some in chosen.items()}
    return ImageSet("cifar10", ABOUT, CLASSES, splits, array_checksum(splits))


def _add_image(images: dict[str, tuple[int, Any]], name: str, content: bytes, place: Path) -> None:
    _, label, _ = name.split("/")
    if label not in CLASSES:
        raise ValueError(f"{place} has images of {label!r}, which is no class of CIFAR-10: {', '.join(CLASSES)}.")
    pixels = np.asarray(read_image(io.BytesIO(content), f"{name} in {place}"), dtype=np.uint8)
    if pixels.shape != (SIDE, SIDE, 3):
        raise ValueError(f"{name} in {place} has {pixels.shape[1]} x {pixels.shape[0]} pixels; CIFAR-10 has 32 x 32.")
    images[name] = CLASSES.index(label), pixels.transpose(2, 0, 1)


def _add_records(found: Found, name: str, content: bytes, place: Path) -> None:
    """Add the images of a file of the authors' binary version."""
    if not content or len(content) % RECORD:
        raise ValueError(f"{name} in {place} has {len(content):,} bytes; an image has {RECORD:,}, so it is damaged.")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    if int(records[:, 0].max()) >= len(CLASSES):
        raise ValueError(f"{name} in {place} has a class that CIFAR-10 does not have; it is damaged.")
    images = found["test" if name.startswith("test") else "train"]
    for number, record in enumerate(records):
        images[f"{name}/{number:05}"] = int(record[0]), record[1:].reshape(3, SIDE, SIDE)


def _images(images: dict[str, tuple[int, Any]], names: list[str]) -> ArrayImages:
    labels, pixels = zip(*(images[name] for name in names), strict=True)
    return ArrayImages(torch.from_numpy(np.stack(pixels)), torch.tensor(labels, dtype=torch.int64))


DATASETS.add(Dataset("cifar10", ABOUT, "images", load_cifar10))
