"""Test sets whose images differ from those that a model was trained on: recognise a folder's layout, and read its images.

    classes     FOLDER/CLASS/file: ImageNet-A, ImageNet-R, or others; of a folder with splits, its test split
    outliers    the same layout, with images of none of the model's classes: ImageNet-O
    corrupted   FOLDER/CORRUPTION/SEVERITY/CLASS/file, or GROUP/CORRUPTION/... as the archives of ImageNet-C are published

ImageNet-O has the layout of ImageNet-A; it is recognised by its list of classes, or by the folder's name. A folder is only
listed here. Its images are decoded when they are needed, and all of them are test images.

Published test sets have one folder per class, named by its WordNet id (n01498041), and often only some of the classes that a
model knows (`outputs_of`). A model's classes may be WordNet ids too, or names such as "tench, Tinca tinca". Then a class
index is needed: the list of ids, with or without names, from ImageNet's own folders or from a file. None is shipped; only
checksums of published lists are, which tell whether a list is complete.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from holdfast.data.files import checksum, names_and_sizes
from holdfast.data.images import ENDINGS, FileImages, Prepare, folders_in, images_in, memory_for
from holdfast.data.labelled_images import SIZE, TEST, VALID, ImageSet
from holdfast.errors import require_extra
from holdfast.files import MIB, read_json, read_text

Kind = Literal["classes", "outliers", "corrupted"]
KINDS: tuple[Kind, ...] = ("classes", "outliers", "corrupted")
SPLIT_FOLDERS = ("train", *VALID, *TEST)
SEVERITIES = ("1", "2", "3", "4", "5")
NAMED = re.compile(r"imagenet[-_ ]?([aro])(?![a-z])", re.IGNORECASE)  # folders of the published archives
LAYOUTS = "CLASS/file (ImageNet-A, -R, -O), CORRUPTION/SEVERITY/CLASS/file (ImageNet-C), or test/CLASS/file"

WORDNET_ID = re.compile(r"n\d{8}")
# SHA-256 of the sorted WordNet ids of published sets, joined by spaces.
PUBLISHED = {
    "791ce0333040dd249d13133f90d28ef0263ffc01e5de0afd85b3e32048d7d456": "ImageNet",
    "ff8c384504d3ec59dd70537e83c7ed3dfa0debb07210febc47b58c136a443706": "ImageNet-A",
    "354baa0a46566aa68cee6a8093d8de471b7d45a1004b81a95c6210f757ad3740": "ImageNet-R",
    "55722c5b79803f3068747ee03f6506845c70cb9ff9bd3fca9e09d45357c793eb": "ImageNet-O",
}
# Some names of the usual thousand in their usual order. A list of ids without names is used only for a model that has these.
LANDMARKS = {0: "tench", 207: "golden retriever", 388: "giant panda", 508: "computer keyboard", 999: "toilet tissue"}
FORMATS = (
    "a folder with ImageNet's class folders, a text file with a WordNet id in each line (LOC_synset_mapping.txt), or a JSON "
    "file (imagenet_class_index.json)"
)


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
        files = [(path, labels[name]) for name in part.counts for path in images_in(part.place / name)]
        decoded = memory_for(len(files), size)
        return FileImages([path for path, _ in files], [label for _, label in files], size, prepare, decoded)


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
    inner = [one.name for one in folders_in(folder)]
    if kind in (None, "corrupted") and (corrupted := _corruptions(folder, inner)):
        return _corrupted_set(folder, corrupted)
    if kind == "corrupted":
        raise ValueError(f"{folder} has no folders CORRUPTION/SEVERITY/CLASS, with severities from 1 to 5.")
    place = next((folder / name for name in (*TEST, *VALID) if name in inner), folder)
    part = _part(place, folder)
    named = NAMED.search(folder.resolve().name) if are_wordnet_ids(part.counts) else None  # perhaps a part of the set only
    layout = published_set(part.counts) or (f"ImageNet-{named[1].upper()}" if named else "")
    layout = layout or ("test split" if place != folder else "class folders")
    found: Kind = kind or ("outliers" if layout == "ImageNet-O" else "classes")
    if found == "outliers" and (kind or layout != "ImageNet-O"):
        layout = "outliers"  # as the user writes it, whatever the folder is called: a model may have no class of ImageNet-O
    files = (path for name in part.counts for path in images_in(part.place / name))
    return ShiftedFolder(folder, found, layout, (part,), checksum(names_and_sizes(files, folder)))


def _corruptions(folder: Path, inner: Sequence[str]) -> dict[str, Path]:
    """Return the folders of corruptions: those that contain nothing but folders of severities, at most one level deeper."""

    def has_severities(place: Path) -> bool:
        names = {one.name for one in folders_in(place)}
        return bool(names) and names <= set(SEVERITIES)

    found: dict[str, Path] = {}
    for name in (name for name in inner if name not in SPLIT_FOLDERS):  # classes of a split may be called 1 to 5
        if has_severities(folder / name):
            deeper = {name: folder / name}
        else:
            own = folders_in(folder / name)
            deeper = {one.name: one for one in own if has_severities(one)}
            if deeper and len(deeper) < len(own):
                raise ValueError(f"{folder / name} has folders of corruptions and others; expected {LAYOUTS}.")
        if twice := next((one for one in deeper if one in found), None):
            raise ValueError(f"{folder} has the corruption {twice} twice, in {found[twice]} and in {deeper[twice]}.")
        found |= deeper
    return found


def _corrupted_set(folder: Path, corruptions: Mapping[str, Path]) -> ShiftedFolder:
    parts = []
    for corruption, place in sorted(corruptions.items()):
        for severity in folders_in(place):
            parts.append(replace(_part(severity, folder), corruption=corruption, severity=int(severity.name)))
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
    counts = {one.name: len(images_in(one)) for one in folders_in(place)}
    if not counts:
        raise ValueError(f"{place} has no class folders; expected {LAYOUTS} in {folder}.")
    if empty := next((name for name, count in counts.items() if not count), None):
        raise ValueError(f"{place / empty} has no images ({', '.join(sorted(ENDINGS))}); expected {LAYOUTS} in {folder}.")
    return Part(place, counts)


def published_set(classes: Iterable[str]) -> str | None:
    """Return the name of the published set that has exactly these WordNet ids, or None."""
    return PUBLISHED.get(hashlib.sha256(" ".join(sorted(classes)).encode("utf-8", "replace")).hexdigest())


def are_wordnet_ids(classes: Iterable[str]) -> bool:
    return all(WORDNET_ID.fullmatch(name) for name in classes)


@final
@dataclass(frozen=True)
class ClassIndex:
    """WordNet ids in the order of a model's outputs, with the names of the classes if they are known."""

    source: str
    ids: tuple[str, ...]
    names: tuple[str, ...] | None = None

    def ids_of(self, classes: Sequence[str]) -> list[str | None]:
        """Return the WordNet id of each class of a model that names its classes, None where a class has none.

        Raise ValueError if it is not clear which ids they have.
        """
        if self.names is not None and not _are_unnamed(classes):
            return self._by_name(classes, self.names)
        extra = len(classes) - len(self.ids)
        has_background = extra == 1 and _plain(classes[0]) == "background"
        if extra and not has_background:
            raise ValueError(
                f"{self.source} lists {len(self.ids):,} classes, and the model has {len(classes):,}, such as {classes[0]!r}."
            )
        named = list(classes[1:] if has_background else classes)
        are_usual = len(named) == 1000 and all(_first(named[place]) == name for place, name in LANDMARKS.items())
        if not _are_unnamed(classes) and not (published_set(self.ids) == "ImageNet" and are_usual):
            raise ValueError(
                f"{self.source} has WordNet ids without names, and the model's classes ({_some(named)}) are not the usual "
                "ones of ImageNet in their usual order; give a class index with names."
            )
        return [None, *self.ids] if has_background else list(self.ids)

    def _by_name(self, classes: Sequence[str], names: Sequence[str]) -> list[str | None]:
        """Find classes by their names; two classes of ImageNet are called crane, and their place tells them apart."""
        whole: dict[str, list[int]] = {}
        first: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            whole.setdefault(_plain(name), []).append(number)
            first.setdefault(_first(name), []).append(number)
        offset = 1 if len(classes) == len(names) + 1 else 0
        found: list[str | None] = []
        for place, name in enumerate(classes):
            numbers = whole.get(_plain(name)) or first.get(_first(name)) or []
            if len(numbers) > 1:
                numbers = [number for number in numbers if number == place - offset]
            found.append(self.ids[numbers[0]] if numbers else None)
        return found


def read_class_index(path: Path) -> ClassIndex:
    """Return the class index in a file, or the sorted class folders of a folder; raise ValueError if it is none."""
    if path.is_dir():
        inner = next((path / name for name in ("train", "val") if (path / name).is_dir()), path)
        rows: list[tuple[str, str]] = [(one.name, "") for one in folders_in(inner)]
    elif not path.exists():
        raise ValueError(f"{path} does not exist; a class index is {FORMATS}.")
    elif path.suffix == ".json":
        stored = read_json(path, limit=MIB)
        try:  # {"0": ["n01440764", "tench"], ...} or a list of ids
            pairs = stored if isinstance(stored, list) else [stored[str(number)] for number in range(len(stored))]
            rows = [(pair, "") if isinstance(pair, str) else (str(pair[0]), str(pair[1])) for pair in pairs]
        except (AttributeError, IndexError, KeyError, TypeError):
            raise ValueError(f'{path} is not a class index of the form {{"0": ["n01440764", "tench"], ...}}.') from None
    else:
        lines = [line.split(maxsplit=1) for line in read_text(path, limit=MIB).splitlines() if line.strip()]
        rows = [(line[0], line[1].strip() if len(line) > 1 else "") for line in lines]
    ids, names = [row[0] for row in rows], [row[1] for row in rows]
    if not ids or not are_wordnet_ids(ids) or len(set(ids)) < len(ids):
        wrong = next((one for one in ids if not WORDNET_ID.fullmatch(one)), "the same id twice" if ids else "no classes")
        raise ValueError(f"{path} has {wrong[:40]!r}; a class index is {FORMATS}.")
    return ClassIndex(str(path), tuple(ids), tuple(names) if all(names) else None)


def outputs_of(folder: Path, folders: Sequence[str], classes: Sequence[str], index: ClassIndex | None = None) -> list[int]:
    """Return for each class folder the number of the model's output that it belongs to.

    folder      for messages
    folders     names of the class folders
    classes     the model's classes, in the order of its outputs
    index       used if the folders are named by WordNet id and the model's classes are not

    Raise ValueError if the model does not have one of the classes: its images could never be classified rightly.
    """
    known = _numbers(classes)
    if not any(name in known for name in folders) and are_wordnet_ids(folders) and not are_wordnet_ids(classes):
        if index is None:
            raise ValueError(
                f"{folder} names its classes by WordNet id, such as {folders[0]}, and the model's classes have names, such "
                f"as {classes[0]!r}; add --class-index with {FORMATS}."
            )
        known = _numbers(index.ids_of(classes))
    missing = [name for name in folders if name not in known]
    if missing:
        some = f"classes that the model does not have, {len(missing)} of {len(folders)}"
        what = "no class in common with the model" if len(missing) == len(folders) else some
        raise ValueError(f"{folder} has {what}: {_some(missing)}; the model has {_some(classes)}.")
    outputs = [known[name] for name in folders]
    if None in outputs:
        twice = folders[outputs.index(None)]
        raise ValueError(f"the model has two classes {twice!r}, so it is not clear which of them {folder / twice} is.")
    return [number for number in outputs if number is not None]


def _numbers(classes: Sequence[str | None]) -> dict[str, int | None]:
    """Return the number of each class; None for a name that two classes have."""
    found: dict[str, int | None] = {}
    for number, name in enumerate(classes):
        if name is not None:
            found[name] = None if name in found else number
    return found


def _are_unnamed(classes: Sequence[str]) -> bool:
    """Return whether these are transformers' labels of classes without names."""
    return all(name == f"LABEL_{number}" for number, name in enumerate(classes))


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").lower().split())


def _first(name: str) -> str:
    """Return the first of the synonyms of a class."""
    return _plain(name.partition(",")[0])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name[:40] for name in names[:3])
    return f"{shown} and {len(names) - 3:,} more" if len(names) > 3 else shown


def unsplit_images(
    folder: Path, classes: Sequence[str], size: int = SIZE, prepare: Prepare | None = None, index: ClassIndex | None = None
) -> ImageSet:
    """Return all images of `folder/CLASS/`, or of its test split, as the test split for a model trained on other images.

    classes     the model's classes, in the order of its outputs; those of the folder may be fewer
    """
    found = recognise(f"classes={folder}")
    outputs = outputs_of(folder, found.classes, classes, index)
    numbers = {name: number for number, name in enumerate(found.classes)}
    images = found.images(found.parts[0], numbers, size, prepare)
    shown = f"{counted(len(images), 'test image')} of {counted(len(outputs), 'class', 'classes')}"
    about = f"{shown} in {found.name}, {size} pixels per side"
    return ImageSet(found.name, about, tuple(found.classes), {"test": images}, found.checksum, tuple(outputs))
