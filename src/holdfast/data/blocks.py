"""A sequence of tokens cut into blocks, so that every token is predicted exactly once.

T = tokens of the sequence, B = blocks of a batch, L = tokens of a block.


The order in which training sees its blocks: a function of the seed and the step and of nothing else.

So an interrupted run goes on with the batches it would have seen, and every router of a comparison sees the same ones.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORED = -100  # the label that cross entropy passes over


@final
@dataclass(frozen=True)
class Batch:
    """What a model reads and what it is to predict at each place: the next token, already shifted."""

    inputs: Tensor  # (B,L) int64
    targets: Tensor  # (B,L) int64
    mask: Tensor  # (B,L) bool, True where there is something to read and to predict; the rest is padding

    @property
    def labels(self) -> Tensor:
        """The targets as cross entropy takes them. Hugging Face calls these `shift_labels`: its own `labels` it shifts."""
        return self.targets.masked_fill(~self.mask, IGNORED)

    @property
    def hash(self) -> str:
        """Two batches with one hash are the same batch."""
        digest = hashlib.sha256(repr(tuple(self.inputs.shape)).encode())
        for part in (self.inputs, self.targets, self.mask):
            digest.update(part.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


@final
class Blocks:
    """Blocks that do not overlap. Block i reads tokens iL to iL+L-1 and predicts those after each, so every token but the
    sequence's first is predicted once; with `first`, a token read before it, that one is too. The last block is padded.
    """

    def __init__(self, tokens: Tensor, length: int, *, first: int | None = None, pad: int = 0) -> None:
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise ValueError(
                f"blocks are cut from one sequence of token numbers, not from {tuple(tokens.shape)} {tokens.dtype}."
            )
        if length < 1:
            raise ValueError(f"a block of {length} tokens reads nothing; it needs at least 1.")
        if first is not None:
            tokens = tokens if 0 <= first <= torch.iinfo(tokens.dtype).max else tokens.long()
            tokens = torch.cat([tokens.new_tensor([first]), tokens])
        if len(tokens) < 2:
            raise ValueError(f"a sequence of {len(tokens)} tokens leaves nothing to predict.")
        self.tokens, self.length, self.pad = tokens, length, pad

    @property
    def scored(self) -> int:
        """How many tokens are predicted: the sum of all masks."""
        return len(self.tokens) - 1

    @property
    def whole(self) -> int:
        """How many blocks have no padding; they come first."""
        return self.scored // self.length

    def __len__(self) -> int:
        return -(-self.scored // self.length)

    def batch(self, numbers: Iterable[int] | Tensor) -> Batch:
        """The blocks of these numbers."""
        chosen = numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers), dtype=torch.int64)
        if not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) >= len(self):
            raise ValueError(f"blocks {chosen.tolist()} are not among the {len(self)} there are.")
        place = chosen[:, None] * self.length + torch.arange(self.length + 1)
        mask = place[:, 1:] <= self.scored
        found = self.tokens[place.clamp_max(self.scored)].long()
        inputs, targets = (part.masked_fill(~mask, self.pad) for part in (found[:, :-1], found[:, 1:]))
        return Batch(inputs, targets, mask)

    def batches(self, size: int) -> Iterator[Batch]:
        """All blocks in order, for an evaluation; the last batch may be smaller."""
        if size < 1:
            raise ValueError(f"a batch of {size} blocks holds nothing; it needs at least 1.")
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))


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
