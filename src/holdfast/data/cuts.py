"""Word-level tokens: what a text is cut into, and numbers for the pieces."""

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

_PIECE = re.compile(r"\w+|[^\w\s]")
UNKNOWN = "<unk>"


def words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _PIECE.findall(text.lower())


class Vocabulary:
    """The `size` most frequent words of the texts, ties by alphabet; everything else is one unknown word, number 0."""

    def __init__(self, texts: Iterable[str], size: int) -> None:
        if size < 2:
            raise ValueError(f"a vocabulary of {size} holds no words; it needs at least 2 places.")
        counts = Counter(word for text in texts for word in words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.words = [UNKNOWN, *ranked[: size - 1]]
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self._numbers.get(word, 0) for word in words(text)], dtype=torch.int64)
