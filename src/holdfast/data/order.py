"""The order in which training sees its blocks: a function of the seed and the step and of nothing else.

So an interrupted run goes on with the batches it would have seen, and every router of a comparison sees the same ones.
"""

from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.data.blocks import Batch, Blocks


def shuffled(count: int, *, seed: int, epoch: int) -> Tensor:
    """0 to count-1 in the order of pseudo-random keys: SplitMix64, written out so that no library's release moves them."""
    start = _mixed(_mixed(_word(seed)) ^ _word(epoch))
    keys = _mixed(np.arange(count, dtype=np.uint64) + start)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def _word(number: int) -> npt.NDArray[np.uint64]:
    return np.array([number % 2**64], dtype=np.uint64)  # an array, because arrays overflow without a warning


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@final
class Order:
    """Which of `count` examples are in the batch of every step, for ever. Epochs follow one another without a seam: each
    shows every example once, and a batch may begin in one and end in the next.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"batches of {size} from {count} examples hold nothing; both are at least 1.")
        self.count, self.size, self.seed = count, size, seed
        self._epochs: dict[int, Tensor] = {}

    def epoch(self, step: int) -> float:
        """How often every example has been seen when the step begins."""
        return step * self.size / self.count

    def numbers(self, step: int) -> Tensor:
        """(size,) int64: the examples of a step."""
        if step < 0:
            raise ValueError(f"there is no step {step}; the first is 0.")
        return self.at(range(step * self.size, (step + 1) * self.size))

    def at(self, places: Iterable[int]) -> Tensor:
        """The examples at these places of the endless sequence, counted from the first example of the first step."""
        place = torch.tensor(list(places), dtype=torch.int64)
        epoch = place // self.count
        found = torch.empty_like(place)
        for number in epoch.unique().tolist():
            there = epoch == number
            found[there] = self._shuffled(number)[place[there] % self.count]
        return found

    def _shuffled(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            self._epochs = {epoch: shuffled(self.count, seed=self.seed, epoch=epoch)}
        return self._epochs[epoch]


@final
class TrainingBatches:
    """The blocks of a text in that order. The padded block at the end of the text is left out."""

    def __init__(self, blocks: Blocks, size: int, seed: int) -> None:
        if not blocks.whole:
            raise ValueError(f"a text of {len(blocks.tokens)} tokens does not fill one block of {blocks.length}.")
        self.blocks, self.order = blocks, Order(blocks.whole, size, seed)

    def at(self, step: int) -> Batch:
        return self.blocks.batch(self.order.numbers(step))

    def since(self, step: int) -> Iterator[Batch]:
        """The batches from a step on, without an end."""
        while True:
            yield self.at(step)
            step += 1
