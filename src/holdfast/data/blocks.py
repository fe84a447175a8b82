"""Blocks of a token sequence, in which every token is predicted exactly once, and the order of training examples.

T = tokens of the sequence, B = blocks of a batch, L = tokens of a block.

The examples of a training step depend only on the seed and the step. So an interrupted run resumes with the batches that it
would have had, and every router of a comparison is trained on the same ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORED = -100  # the label that cross entropy skips


@final
@dataclass(frozen=True)
class Batch:
    """The inputs of a model and its target at each place: the next token, already shifted."""

    inputs: Tensor  # (B,L) int64
    targets: Tensor  # (B,L) int64
    mask: Tensor  # (B,L) bool, False for padding

    @property
    def labels(self) -> Tensor:
        """The targets for cross entropy, `shift_labels` in Hugging Face (where `labels` are not yet shifted)."""
        return self.targets.masked_fill(~self.mask, IGNORED)


@final
class Blocks:
    """Blocks that do not overlap. Block i reads tokens iL to iL+L-1 and predicts the token after each of them.

    So every token but the first of the sequence is predicted once; with `first`, a token that is read before the sequence,
    the first one is predicted too. The last block is padded.
    """

    def __init__(self, tokens: Tensor, length: int, *, first: int | None = None, pad: int = 0) -> None:
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be one sequence of whole numbers, (T,), not {tuple(tokens.shape)} {tokens.dtype}."
            )
        if length < 1:
            raise ValueError(f"a block of {length} tokens is empty; it needs at least 1.")
        if first is not None:
            tokens = tokens if 0 <= first <= torch.iinfo(tokens.dtype).max else tokens.long()
            tokens = torch.cat([tokens.new_tensor([first]), tokens])
        if len(tokens) < 2:
            raise ValueError(f"a sequence of {len(tokens)} tokens has nothing to predict; it needs at least 2.")
        self.tokens, self.length, self.pad = tokens, length, pad

    @property
    def scored(self) -> int:
        """The number of tokens that are predicted: the sum of all masks."""
        return len(self.tokens) - 1

    @property
    def whole(self) -> int:
        """The number of blocks without padding; they come first."""
        return self.scored // self.length

    def __len__(self) -> int:
        return -(-self.scored // self.length)

    def batch(self, numbers: Iterable[int] | Tensor) -> Batch:
        """Return the blocks of these numbers as a batch."""
        chosen = numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers), dtype=torch.int64)
        if not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) >= len(self):
            raise ValueError(f"blocks {chosen.tolist()} are not all among the {len(self)} blocks, 0 to {len(self) - 1}.")
        place = chosen[:, None] * self.length + torch.arange(self.length + 1)
        mask = place[:, 1:] <= self.scored
        found = self.tokens[place.clamp_max(self.scored)].long()
        inputs, targets = (part.masked_fill(~mask, self.pad) for part in (found[:, :-1], found[:, 1:]))
        return Batch(inputs, targets, mask)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all blocks in order, for an evaluation; the last batch may be smaller."""
        if size < 1:
            raise ValueError(f"a batch of {size} blocks is empty; it needs at least 1.")
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))


def shuffled(count: int, *, seed: int, epoch: int) -> Tensor:
    """Return 0 to count-1, sorted by pseudo-random keys: SplitMix64, written out so that no library release changes it."""
    start = _split_mix(_split_mix(_as_uint64(seed)) ^ _as_uint64(epoch))
    keys = _split_mix(np.arange(count, dtype=np.uint64) + start)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def _as_uint64(number: int) -> npt.NDArray[np.uint64]:
    return np.array([number % 2**64], dtype=np.uint64)  # an array, because arrays overflow without a warning


def _split_mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class ExampleOrder(Protocol):
    """The examples in the batch of every step: `Order`, or `DomainOrder`, whose batches have as many of each domain."""

    count: int  # all examples
    size: int  # of a batch

    def numbers(self, step: int) -> Tensor:
        """Return (size,) int64: the examples of a step."""

    def at(self, places: Iterable[int]) -> Tensor:
        """Return the examples at these places of the endless sequence; the first example of the first step has place 0."""


@final
class Order:
    """The examples, out of `count`, in the batch of every step. Each epoch has every example once.

    A batch may begin in one epoch and end in the next, so that all batches have the same size.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"batches of {size} from {count} examples are empty; both numbers must be at least 1.")
        self.count, self.size, self.seed = count, size, seed
        self._epochs: dict[int, Tensor] = {}

    def numbers(self, step: int) -> Tensor:
        """Return (size,) int64: the examples of a step."""
        if step < 0:
            raise ValueError(f"there is no step {step}; the first is 0.")
        return self.at(range(step * self.size, (step + 1) * self.size))

    def at(self, places: Iterable[int]) -> Tensor:
        """Return the examples at these places of the endless sequence; the first example of the first step has place 0."""
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
