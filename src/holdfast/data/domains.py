"""Images of several domains, DOMAIN/CLASS/file, of which one is held out for testing (PACS, VLCS, OfficeHome, DomainNet).

The protocol is DomainBed's "training-domain validation" (Gulrajani and Lopez-Paz, 2021): a fifth of each training domain,
drawn by a seed, is for validation, and the rest for training; a batch has as many images of each training domain; the whole
held-out domain is for testing.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.blocks import Order, shuffled
from holdfast.data.files import checksum, names_and_sizes, require_utf8_name
from holdfast.data.images import ENDINGS, SIZE, ImageSet
from holdfast.data.labelled_images import ChooseBox, FileImages, Images, as_index, decode, require_decoder
from holdfast.errors import unknown_name

DOMAIN_LAYOUT = "put the images into folders DOMAIN/CLASS, with the same classes in every domain"
VALID_SHARE = 0.2  # of each training domain
LARGEST_IN_MEMORY = 2 * 1024**3  # bytes of decoded images; more are decoded again whenever they are needed


@final
class DomainImages(Images):
    """The images of one domain, from files. `read` decodes all of them once, so that an unreadable one is found early."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], size: int) -> None:
        self.files = FileImages(paths, labels, size)
        self.labels, self.shape = self.files.labels, self.files.shape
        self.values: Tensor | None = None  # (N,3,size,size) uint8, after `read`
        self.is_read = False

    def read(self, *, keep: bool) -> None:
        """Decode every image; with `keep`, they stay in memory. Raise ValueError for the first that cannot be read."""
        if self.is_read:
            return
        size = self.shape[1]
        found = np.empty((len(self), size, size, 3), dtype=np.uint8) if keep else None
        for number, path in enumerate(self.files.paths):
            pixels = decode(path, size)
            if found is not None:
                found[number] = pixels
        self.values = None if found is None else torch.from_numpy(found).permute(0, 3, 1, 2).contiguous()
        self.is_read = True

    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        if self.values is None:
            return self.files.pixels(numbers)
        return self.values[as_index(numbers)].float() / 255

    def crops(self, numbers: Iterable[int] | Tensor, choose: ChooseBox) -> Tensor:
        return self.files.crops(numbers, choose)

    def sides(self, numbers: Iterable[int]) -> list[int]:
        return self.files.sides(numbers)


@final
class JoinedImages(Images):
    """Some images of several sets, one set after the other: those of `numbers[i]` from `parts[i]`."""

    def __init__(self, parts: Sequence[Images], numbers: Sequence[Tensor]) -> None:
        assert len(parts) == len(numbers) > 0
        self.parts, self.numbers = list(parts), list(numbers)
        self.labels = torch.cat([part.labels[chosen] for part, chosen in zip(parts, numbers, strict=True)])
        self.shape = parts[0].shape
        self.ends = torch.tensor([len(chosen) for chosen in numbers]).cumsum(0)

    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        wanted = as_index(numbers)
        found = torch.empty(len(wanted), *self.shape)
        for part, rows, own in self._by_part(wanted):
            found[rows] = part.pixels(own)
        return found

    def crops(self, numbers: Iterable[int] | Tensor, choose: ChooseBox) -> Tensor:
        wanted = as_index(numbers)
        found = torch.empty(len(wanted), *self.shape, dtype=torch.uint8)
        for part, rows, own in self._by_part(wanted):
            places = rows.tolist()  # `choose` is given the place in the whole batch
            found[rows] = part.crops(own, lambda place, *size, places=places: choose(places[place], *size))
        return found

    def sides(self, numbers: Iterable[int]) -> list[int] | None:
        ends, found = self.ends.tolist(), []  # without new tensors: it is called while a model is built on `meta`
        for number in numbers:
            place = bisect_right(ends, number)
            own = int(self.numbers[place][number - ends[place]])  # counted from the end of this part
            found.append(self.parts[place].sides([own]))
        if any(part.sides([]) is None for part in self.parts):
            return None
        return [side for sides in found if sides is not None for side in sides]

    def _by_part(self, wanted: Tensor) -> Iterator[tuple[Images, Tensor, Tensor]]:
        """Yield each set that has some of the wanted images, with their places in `wanted` and their numbers in the set."""
        part_of = torch.bucketize(wanted, self.ends, right=True)
        for place, (part, chosen) in enumerate(zip(self.parts, self.numbers, strict=True)):
            rows = (part_of == place).nonzero().flatten()
            if len(rows):
                yield part, rows, chosen[wanted[rows] - (self.ends[place] - len(chosen))]


@final
class DomainOrder:
    """The examples in the batch of every step, as `Order`, with as many of each domain.

    The training images are those of all domains, one domain after the other. Place p of the endless sequence is an image of
    domain p mod D; each domain has an order of its own, which has every image of it once per epoch of this domain.
    """

    def __init__(self, counts: Mapping[str, int], size: int, seed: int) -> None:
        if size % len(counts):
            raise ValueError(f"a batch of {size} images does not have as many of each of {len(counts)} domains.")
        self.count, self.size = sum(counts.values()), size
        self.orders = [Order(count, size // len(counts), _seed_of("order", name, seed)) for name, count in counts.items()]
        self.starts = [sum(list(counts.values())[:place]) for place in range(len(counts))]

    def numbers(self, step: int) -> Tensor:
        """Return (size,) int64: the examples of a step."""
        if step < 0:
            raise ValueError(f"there is no step {step}; the first is 0.")
        return self.at(range(step * self.size, (step + 1) * self.size))

    def at(self, places: Iterable[int]) -> Tensor:
        """Return the examples at these places of the endless sequence; the first example of the first step has place 0."""
        place = torch.tensor(list(places), dtype=torch.int64)
        found = torch.empty_like(place)
        for domain, (order, start) in enumerate(zip(self.orders, self.starts, strict=True)):
            there = place % len(self.orders) == domain
            found[there] = start + order.at((place[there] // len(self.orders)).tolist())
        return found


@final
@dataclass(frozen=True)
class DomainSet:
    """The images of a folder DOMAIN/CLASS/file, by domain."""

    name: str
    about: str
    classes: tuple[str, ...]
    domains: Mapping[str, DomainImages]
    checksum: str

    def describe(self) -> dict[str, Any]:
        """Return what a result records of its images."""
        counts = {name: len(images) for name, images in self.domains.items()}
        return {"name": self.name, "about": self.about, "checksum": self.checksum, "domains": counts}

    def read(self) -> None:
        """Decode all images; keep them in memory if they fit. Raise ValueError for the first that cannot be read."""
        needed = sum(len(images) * math.prod(images.shape) for images in self.domains.values())
        for images in self.domains.values():
            images.read(keep=needed <= LARGEST_IN_MEMORY)

    def training_domains(self, held_out: str) -> list[str]:
        if held_out not in self.domains:
            raise ValueError(f"data.held_out: {unknown_name('domain', held_out, self.domains)}")
        return [name for name in self.domains if name != held_out]

    def split(self, domain: str, seed: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of a domain's images for training, and those of the fifth for validation."""
        count = len(self.domains[domain])
        mixed = shuffled(count, seed=_seed_of("split", domain, seed), epoch=0)
        held = int(VALID_SHARE * count)
        return mixed[held:].sort().values, mixed[:held].sort().values

    def leave_out(self, held_out: str, seed: int) -> ImageSet:
        """Return the training images and the pooled validation images of the other domains; the held-out one is the test."""
        names = self.training_domains(held_out)
        parts, splits = [self.domains[name] for name in names], [self.split(name, seed) for name in names]
        images: dict[str, Images] = {
            "train": JoinedImages(parts, [train for train, _ in splits]),
            "valid": JoinedImages(parts, [valid for _, valid in splits]),
            "test": self.domains[held_out],
        }
        return ImageSet(self.name, self.about, self.classes, images, self.checksum)

    def order(self, held_out: str, size: int, seed: int, *, split_seed: int) -> DomainOrder:
        """Return the order of the training images that `leave_out` returns with the seed `split_seed`."""
        counts = {name: len(self.split(name, split_seed)[0]) for name in self.training_domains(held_out)}
        return DomainOrder(counts, size, seed)


def _seed_of(what: str, domain: str, seed: int) -> int:
    """Return a seed for one domain: the split of a domain does not depend on which domain is held out."""
    return int.from_bytes(hashlib.sha256(f"{what} {seed} {domain}".encode()).digest()[:6], "big")


def domain_set(source: str | Path, *, size: int | None = None) -> DomainSet:
    """Return the images of a folder DOMAIN/CLASS/file, scaled to `size` pixels per side (224 by default).

    The files are not read yet. The checksum is of names and sizes. Raise ValueError if there are fewer than two domains or
    classes, if the classes of two domains differ, or if a class folder has no images.
    """
    require_decoder()  # raise now if it is missing, not in the middle of training
    folder, size = Path(source), SIZE if size is None else size
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of domains; {DOMAIN_LAYOUT}.")
    files = {domain.name: _class_files(domain) for domain in _folders(folder)}
    if len(files) < 2:
        found = f"one domain only, {next(iter(files))}" if files else "no folders"
        raise ValueError(f"{folder} has {found}; to leave one domain out, {DOMAIN_LAYOUT}.")
    classes = _common_classes(folder, files)
    domains = {}
    for name, by_class in files.items():
        paths = [path for each in classes for path in by_class[each]]
        labels = [number for number, each in enumerate(classes) for _ in by_class[each]]
        if int(VALID_SHARE * len(paths)) < 1:
            needed = math.ceil(1 / VALID_SHARE)
            raise ValueError(f"{folder / name} has {len(paths)} images; splitting a domain needs at least {needed}.")
        domains[name] = DomainImages(paths, labels, size)
    parts = (part for images in domains.values() for part in names_and_sizes(images.files.paths, folder))
    name, count = folder.resolve().name, sum(map(len, domains.values()))
    about = f"{count:,} images of {len(classes)} classes in {len(domains)} domains of {name}, {size} pixels per side"
    return DomainSet(name, about, classes, domains, checksum(parts))


def _folders(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder, sorted by name, without hidden ones."""
    found = (path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith("."))
    return map(require_utf8_name, found)


def _class_files(domain: Path) -> dict[str, list[Path]]:
    """Return the images of each class of a domain, sorted; raise ValueError if a class has none."""
    found = {}
    for folder in _folders(domain):
        found[folder.name] = sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS and p.is_file())
        if not found[folder.name]:
            raise ValueError(f"{folder} has no images ({', '.join(sorted(ENDINGS))}); add some, or remove the folder.")
    if not found:
        raise ValueError(f"the domain {domain} has no folders of classes; {DOMAIN_LAYOUT}.")
    return found


def _common_classes(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    first, *others = files
    for other in others:
        for has, lacks in ((first, other), (other, first)):
            if missing := sorted(files[has].keys() - files[lacks].keys()):
                raise ValueError(
                    f"{folder}: the domain {lacks} has no class {missing[0]}, which {has} has; every domain needs the same "
                    "classes."
                )
    classes = tuple(sorted(files[first]))
    if len(classes) < 2:
        raise ValueError(f"{folder} has images of one class only, {classes[0]}; classification needs two.")
    return classes
