"""Images of several domains, DOMAIN/CLASS/file, of which one is held out for testing (PACS, VLCS, OfficeHome, DomainNet).

The protocol is DomainBed's "training-domain validation" (Gulrajani and Lopez-Paz, 2021): a fifth of each training domain,
drawn by a seed, is for validation, and the rest for training; a batch has as many images of each training domain; the whole
held-out domain is for testing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from torch import Tensor

from holdfast.data.draws import DomainOrder, domain_seed, shuffled
from holdfast.data.files import checksum, names_and_sizes
from holdfast.data.images import ENDINGS, FileImages, folders_in, images_in, memory_for
from holdfast.data.labelled_images import SIZE, ImageSet
from holdfast.errors import require_extra, unknown_name

DOMAIN_LAYOUT = "put the images into folders DOMAIN/CLASS, with the same classes in every domain"
VALID_SHARE = 0.2  # of each training domain


@final
@dataclass(frozen=True)
class DomainSet:
    """The images of a folder DOMAIN/CLASS/file, by domain."""

    name: str
    about: str
    classes: tuple[str, ...]
    domains: Mapping[str, FileImages]
    checksum: str

    def describe(self) -> dict[str, Any]:
        """Return what a result records of its images."""
        counts = {name: len(images) for name, images in self.domains.items()}
        return {"name": self.name, "about": self.about, "checksum": self.checksum, "domains": counts}

    def read(self) -> None:
        """Decode all images, which stay in memory if they fit. Raise ValueError for the first that cannot be read."""
        assert self._is_read

    @cached_property
    def _is_read(self) -> bool:
        for images in self.domains.values():
            for path in images.paths:
                images.read(path)
        return True

    def training_domains(self, held_out: str) -> list[str]:
        if held_out not in self.domains:
            raise ValueError(f"data.held_out: {unknown_name('domain', held_out, self.domains)}")
        return [name for name in self.domains if name != held_out]

    def split(self, domain: str, seed: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of a domain's images for training, and those of the fifth for validation."""
        count = len(self.domains[domain])
        mixed = shuffled(count, seed=domain_seed("split", domain, seed), epoch=0)
        held = int(VALID_SHARE * count)
        return mixed[held:].sort().values, mixed[:held].sort().values

    def leave_out(self, held_out: str, seed: int) -> ImageSet:
        """Return the training images and the pooled validation images of the other domains; the held-out one is the test."""
        splits = {name: self.split(name, seed) for name in self.training_domains(held_out)}
        train, valid = (self._joined({name: parts[at] for name, parts in splits.items()}) for at in (0, 1))
        images = {"train": train, "valid": valid, "test": self.domains[held_out]}
        return ImageSet(self.name, self.about, self.classes, images, self.checksum)

    def _joined(self, numbers: Mapping[str, Tensor]) -> FileImages:
        """Return the images of these numbers in some domains, one domain after the other."""
        domains = {name: self.domains[name] for name in numbers}
        paths = [images.paths[number] for name, images in domains.items() for number in numbers[name].tolist()]
        labels = [label for name, images in domains.items() for label in images.labels[numbers[name]].tolist()]
        any_domain = next(iter(domains.values()))
        return FileImages(paths, labels, any_domain.shape[1], decoded=any_domain.decoded)

    def order(self, held_out: str, size: int, seed: int, *, split_seed: int) -> DomainOrder:
        """Return the order of the training images that `leave_out` returns with the seed `split_seed`."""
        counts = {name: len(self.split(name, split_seed)[0]) for name in self.training_domains(held_out)}
        return DomainOrder(counts, size, seed)


def domain_set(source: str | Path, *, size: int | None = None) -> DomainSet:
    """Return the images of a folder DOMAIN/CLASS/file, scaled to `size` pixels per side (224 by default).

    The files are not read yet. The checksum is of names and sizes. Raise ValueError if there are fewer than two domains or
    classes, if the classes of two domains differ, or if a class folder has no images.
    """
    require_extra("decoding images", "PIL")  # raise now if it is missing, not in the middle of training
    folder, size = Path(source), SIZE if size is None else size
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of domains; {DOMAIN_LAYOUT}.")
    files: dict[str, dict[str, list[Path]]] = {}
    for domain in folders_in(folder):
        files[domain.name] = by_class = {inner.name: images_in(inner) for inner in folders_in(domain)}
        if empty := next((name for name, paths in by_class.items() if not paths), None):
            endings = ", ".join(sorted(ENDINGS))
            raise ValueError(f"{domain / empty} has no images ({endings}); add some, or remove the folder.")
        if not by_class:
            raise ValueError(f"the domain {domain} has no folders of classes; {DOMAIN_LAYOUT}.")
    if len(files) < 2:
        found = f"one domain only, {next(iter(files))}" if files else "no folders"
        raise ValueError(f"{folder} has {found}; to leave one domain out, {DOMAIN_LAYOUT}.")
    first, *others = files
    for other in others:
        for has, lacks in ((first, other), (other, first)):
            if missing := sorted(files[has].keys() - files[lacks].keys()):
                raise ValueError(
                    f"{folder}: the domain {lacks} has no class {missing[0]}, which {has} has; every domain needs the same "
                    "classes."
                )
    classes = tuple(files[first])
    if len(classes) < 2:
        raise ValueError(f"{folder} has images of one class only, {classes[0]}; classification needs two.")
    count = sum(len(paths) for by_class in files.values() for paths in by_class.values())
    domains, decoded = {}, memory_for(count, size)
    for name, by_class in files.items():
        paths = [path for each in classes for path in by_class[each]]
        labels = [number for number, each in enumerate(classes) for _ in by_class[each]]
        if int(VALID_SHARE * len(paths)) < 1:
            needed = math.ceil(1 / VALID_SHARE)
            raise ValueError(f"{folder / name} has {len(paths)} images; splitting a domain needs at least {needed}.")
        domains[name] = FileImages(paths, labels, size, decoded=decoded)
    parts = (part for images in domains.values() for part in names_and_sizes(images.paths, folder))
    name = folder.resolve().name
    about = f"{count:,} images of {len(classes)} classes in {len(domains)} domains of {name}, {size} pixels per side"
    return DomainSet(name, about, classes, domains, checksum(parts))
