"""The record of a picture source: labelled pictures in three splits, decoded when they are asked for."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from holdfast.suggest import unknown


class Images(ABC):
    """Pictures of one shape (channels, height, width), with labels (N,) int64."""

    labels: Tensor
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        """The pictures of these numbers: (B,C,H,W) float32 between 0 and 1."""


@final
class ArrayImages(Images):
    """Pictures held as small integers, where `top` is white."""

    def __init__(self, values: Tensor, labels: Tensor, top: int = 255) -> None:
        assert values.dim() == 4 and values.dtype == torch.uint8 and len(values) == len(labels)
        self.values, self.labels, self.top = values, labels, top
        self.shape = (values.shape[1], values.shape[2], values.shape[3])

    def pixels(self, numbers: Iterable[int] | Tensor) -> Tensor:
        return self.values[as_index(numbers)].float() / self.top

    def only(self, numbers: Iterable[int]) -> "ArrayImages":
        chosen = as_index(numbers)
        return ArrayImages(self.values[chosen], self.labels[chosen], self.top)


@final
@dataclass(frozen=True)
class ImageSet:
    """A picture source, to be classified."""

    name: str
    about: str
    classes: tuple[str, ...]
    splits: Mapping[str, Images]
    checksum: str

    def images(self, split: str) -> Images:
        if split not in self.splits:
            raise ValueError(unknown("split", split, self.splits))
        return self.splits[split]

    def describe(self) -> dict[str, Any]:
        """What a result records of its pictures."""
        return {"name": self.name, "about": self.about, "checksum": self.checksum}


def as_index(numbers: Iterable[int] | Tensor) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers), dtype=torch.int64)
