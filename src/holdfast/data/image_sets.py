"""Picture sources by name or path."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.data.checksum import checksum
from holdfast.data.files import find, places
from holdfast.data.idx import read_idx
from holdfast.data.image_files import folder_set
from holdfast.data.images import ArrayImages, ImageSet
from holdfast.data.splitting import hold_out
from holdfast.extras import require_extra
from holdfast.suggest import unknown

SOURCES = {
    "digits": "1,797 handwritten digits of 8x8 pixels, from scikit-learn; embedded there",
    "fashion-mnist": "70,000 pieces of clothing of 28x28 pixels, from Zalando's IDX files",
}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts it
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def image_sets() -> dict[str, str]:
    """Names of the picture sources, with one line each."""
    return dict(SOURCES)


def image_set(name: str | Path, *, folder: str | Path | None = None, size: int | None = None) -> ImageSet:
    """The picture source of this name, or the folder of pictures at this path, scaled to `size` pixels a side (224).

    Named sources that are not embedded are looked for in `folder`.
    """
    if isinstance(name, str) and name in SOURCES:
        if size is not None:
            raise ValueError(f"{name} has a size of its own; only folders of pictures are scaled.")
        return _digits() if name == "digits" else _fashion(None if folder is None else Path(folder))
    path = Path(name)
    if path.is_dir():
        return folder_set(path, size)
    if isinstance(name, Path) or os.sep in name:
        raise ValueError(f"{path} is not a folder; pictures lie in one folder a class, or in train/CLASS and val/CLASS.")
    raise ValueError(unknown("picture source", name, SOURCES))


def _digits() -> ImageSet:
    require_extra("the picture source digits", "sklearn")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    values = torch.from_numpy(np.asarray(found.images, dtype=np.uint8))[:, None]
    images = ArrayImages(values, torch.from_numpy(np.asarray(found.target, dtype=np.int64)), top=16)
    rest, test = hold_out([str(number) for number in range(len(images))])
    kept, valid = hold_out([str(number) for number in rest], share=len(test) / len(rest))
    numbers = {"train": [rest[i] for i in kept], "valid": [rest[i] for i in valid], "test": test}
    splits = {split: images.only(chosen) for split, chosen in numbers.items()}
    return ImageSet("digits", SOURCES["digits"], tuple(map(str, range(10))), splits, _array_checksum(splits))


def _fashion(folder: Path | None) -> ImageSet:
    looked = [DEBIAN] if folder is None else places(folder, ("fashion-mnist", "fashion_mnist"))
    for place in looked:
        if find(place, _idx_names("train", "images", 3)):
            full, test = _idx_pair(place, "train"), _idx_pair(place, "t10k")
            break
    else:
        raise ValueError(
            f"fashion-mnist is not in {folder or DEBIAN}: install Debian's package dataset-fashion-mnist, or put its four "
            "files (train-images-idx3-ubyte.gz and so on) into a folder fashion-mnist and say where that is."
        )
    kept, valid = hold_out([str(number) for number in range(len(full))])
    splits = {"train": full.only(kept), "valid": full.only(valid), "test": test}
    return ImageSet("fashion-mnist", SOURCES["fashion-mnist"], CLOTHES, splits, _array_checksum(splits))


def _idx_names(part: str, what: str, dimensions: int) -> list[str]:
    return [f"{part}-{what}{joint}idx{dimensions}-ubyte" for joint in "-."]


def _idx_pair(folder: Path, part: str) -> ArrayImages:
    images, labels = (_read(folder, _idx_names(part, *which), which[1]) for which in (("images", 3), ("labels", 1)))
    if len(images) != len(labels) or int(labels.max()) >= len(CLOTHES):
        raise ValueError(f"{folder}: the labels of {part} are not labels of its {len(images):,} pictures.")
    return ArrayImages(images[:, None], labels.long())


def _read(folder: Path, names: list[str], dimensions: int) -> Tensor:
    path = find(folder, names)
    if path is None:
        raise ValueError(f"{folder} has no {names[0]} (plain, .gz or .xz) beside its other files.")
    return read_idx(path, dimensions)


def _array_checksum(splits: dict[str, ArrayImages]) -> str:
    return checksum(
        part
        for name, images in splits.items()
        for part in (name.encode(), images.values.numpy().tobytes(), images.labels.numpy().tobytes())
    )
