"""Test sets whose images differ from those that a model was trained on: recognise a folder's layout, and read its images.

    classes     FOLDER/CLASS/file: ImageNet-A, ImageNet-R, or others; of a folder with splits, its test split
    outliers    the same layout, with images of none of the model's classes: ImageNet-O
    corrupted   FOLDER/CORRUPTION/SEVERITY/CLASS/file, or GROUP/CORRUPTION/... as the archives of ImageNet-C are published

ImageNet-O has the layout of ImageNet-A; it is recognised by its list of classes, or by the folder's name. A folder is only
listed here. Its images are decoded when they are needed, and all of them are test images.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from holdfast.data.class_names import ClassIndex, are_wordnet_ids, outputs_of, published_set
from holdfast.data.files import checksum, names_and_sizes, require_utf8_name
from holdfast.data.images import ENDINGS, SIZE, TEST, VALID, ImageSet
from holdfast.data.labelled_images import FileImages, Prepare
from holdfast.errors import require_extra

Kind = Literal["classes", "outliers", "corrupted"]
KINDS: tuple[Kind, ...] = ("classes", "outliers", "corrupted")
SPLIT_FOLDERS = ("train", *VALID, *TEST)
SEVERITIES = ("1", "2", "3", "4", "5")
NAMED = re.compile(r"imagenet[-_ ]?([aro])(?![a-z])", re.IGNORECASE)  # folders of the published archives
LAYOUTS = "CLASS/file (ImageNet-A, -R, -O), CORRUPTION/SEVERITY/CLASS/file (ImageNet-C), or test/CLASS/file"


@final
@dataclass(frozen=True)
class Part:
    """The class folders at one place: all of a set, or those of a corruption at one severity."""

    place: Path
    counts: Mapping[str, int]  # of the images of each class
    corruption: str = ""
    severity: int = 0

    def __len__(self) -> int:
        return sum(self.counts.values())


@final
@dataclass(frozen=True)
class ShiftedFolder:
    """A folder of test images, with its layout."""

    folder: Path
    kind: Kind
    layout: str  # for users, such as "ImageNet-A"
    parts: tuple[Part, ...]
    checksum: str

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def classes(self) -> list[str]:
        """The names of its class folders, sorted."""
        return sorted({name for part in self.parts for name in part.counts})

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def about(self) -> str:
        """What the folder is, in one line."""
        found = f"{counted(len(self), 'image')} of {counted(len(self.classes), 'class', 'classes')}"
        if self.kind == "corrupted":
            found += f", {counted(len({part.corruption for part in self.parts}), 'corruption')}"
        return f"{self.folder}: {self.layout}, {found}"

    def images(self, part: Part, labels: Mapping[str, int], size: int, prepare: Prepare | None = None) -> FileImages:
        """Return the images of a part; `labels` has the number of each class folder."""
        files = [(path, labels[name]) for name in part.counts for path in _files(part.place / name)]
        return FileImages([path for path, _ in files], [label for _, label in files], size, prepare)


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return a number with its noun: "1 class", "2 classes"."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def recognise(written: str) -> ShiftedFolder:
    """Return the test set in a folder, written as FOLDER or KIND=FOLDER; raise ValueError if it has no known layout."""
    require_extra("decoding images", "PIL")  # raise now if it is missing, not after other work
    prefix, sign, rest = written.partition("=")
    kind: Kind | None = next((one for one in KINDS if sign and one == prefix), None)
    name = rest if kind else written
    folder = Path(name)
    if not name.strip() or not folder.is_dir():
        raise ValueError(
            f"{name or repr(name)} is not a folder; the images of a shifted test set are in folders: {LAYOUTS}."
        )
    inner = _folders(folder)
    if kind in (None, "corrupted") and (corrupted := _corruptions(folder, inner)):
        return _corrupted_set(folder, corrupted)
    if kind == "corrupted":
        raise ValueError(f"{folder} has no folders CORRUPTION/SEVERITY/CLASS, with severities from 1 to 5.")
    place = next((folder / name for name in (*TEST, *VALID) if name in inner), folder)
    part = _part(place, folder)
    layout = published_set(part.counts) or _by_name(folder, part) or ("test split" if place != folder else "class folders")
    found: Kind = kind or ("outliers" if layout == "ImageNet-O" else "classes")
    if found == "outliers" and (kind or layout != "ImageNet-O"):
        layout = "outliers"  # as the user writes it, whatever the folder is called: a model may have no class of ImageNet-O
    files = (path for name in part.counts for path in _files(part.place / name))
    return ShiftedFolder(folder, found, layout, (part,), checksum(names_and_sizes(files, folder)))


def _by_name(folder: Path, part: Part) -> str | None:
    """Return the published set that the folder is named after: a user may have a part of it only."""
    named = NAMED.search(folder.resolve().name)
    return f"ImageNet-{named[1].upper()}" if named and are_wordnet_ids(part.counts) else None


def _corruptions(folder: Path, inner: Sequence[str]) -> dict[str, Path]:
    """Return the folders of corruptions: those that contain nothing but folders of severities, at most one level deeper."""
    found: dict[str, Path] = {}
    for name in (name for name in inner if name not in SPLIT_FOLDERS):  # classes of a split may be called 1 to 5
        own = _folders(folder / name)
        if own and set(own) <= set(SEVERITIES):
            deeper = {name: folder / name}
        else:
            deeper = {
                one: folder / name / one
                for one in own
                if (severities := _folders(folder / name / one)) and set(severities) <= set(SEVERITIES)
            }
            if deeper and len(deeper) < len(own):
                raise ValueError(f"{folder / name} has folders of corruptions and others; expected {LAYOUTS}.")
        if twice := next((one for one in deeper if one in found), None):
            raise ValueError(f"{folder} has the corruption {twice} twice, in {found[twice]} and in {deeper[twice]}.")
        found |= deeper
    return found


def _corrupted_set(folder: Path, corruptions: Mapping[str, Path]) -> ShiftedFolder:
    parts = []
    for corruption, place in sorted(corruptions.items()):
        for severity in _folders(place):
            found = _part(place / severity, folder)
            parts.append(Part(found.place, found.counts, corruption, int(severity)))
    classes = {name for part in parts for name in part.counts}
    if short := next((part for part in parts if set(part.counts) != classes), None):
        lost = sorted(classes - set(short.counts))
        raise ValueError(f"{short.place} has no class {lost[0]}, which other corruptions of {folder} have.")
    layout = "ImageNet-C" if are_wordnet_ids(classes) else "corruption folders"
    # Numbers of files, not their sizes: ImageNet-C has four million files.
    lines = (
        f"{(part.place / name).relative_to(folder).as_posix()} {count}"
        for part in parts
        for name, count in part.counts.items()
    )
    return ShiftedFolder(folder, "corrupted", layout, tuple(parts), checksum(line.encode() for line in lines))


def _part(place: Path, folder: Path) -> Part:
    """Return the class folders of a place, each with the number of its images; raise ValueError for one without images."""
    names = _folders(place)
    if not names:
        raise ValueError(f"{place} has no class folders; expected {LAYOUTS} in {folder}.")
    counts = {name: sum(1 for _ in _files(place / name)) for name in names}
    if empty := next((name for name, count in counts.items() if not count), None):
        raise ValueError(f"{place / empty} has no images ({', '.join(sorted(ENDINGS))}); expected {LAYOUTS} in {folder}.")
    return Part(place, counts)


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return [require_utf8_name(folder / name).name for name in found]


def _files(folder: Path) -> list[Path]:
    """Return the image files in a folder, sorted, without hidden ones; pipes and devices are no files."""
    with os.scandir(folder) as entries:
        names = [
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and os.path.splitext(entry.name)[1].lower() in ENDINGS and entry.is_file()
        ]
    return [folder / name for name in sorted(names)]


@final
@dataclass(frozen=True)
class UnsplitImages:
    """All images of a folder as a test split, and the model's output of each of the folder's classes."""

    image_set: ImageSet
    outputs: tuple[int, ...]


def unsplit_images(
    folder: Path,
    classes: Sequence[str],
    *,
    size: int | None = None,
    prepare: Prepare | None = None,
    index: ClassIndex | None = None,
) -> UnsplitImages:
    """Return the images of `folder/CLASS/`, or of its test split, for a model that was trained on other images.

    classes     the model's classes, in the order of its outputs; those of the folder may be fewer
    """
    found = recognise(f"classes={folder}")
    size = SIZE if size is None else size
    outputs = outputs_of(folder, found.classes, classes, index)
    numbers = {name: number for number, name in enumerate(found.classes)}
    images = found.images(found.parts[0], numbers, size, prepare)
    about = f"{counted(len(images), 'test image')} of {counted(len(outputs), 'class', 'classes')}"
    about += f" in {found.name}, {size} pixels per side"
    return UnsplitImages(ImageSet(found.name, about, tuple(found.classes), {"test": images}, found.checksum), tuple(outputs))
