"""A sequence of tokens cut into blocks, so that every token is predicted exactly once.

T = tokens of the sequence, B = blocks of a batch, L = tokens of a block.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

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
