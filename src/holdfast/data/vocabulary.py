"""Word level: numbers for the most frequent words."""

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.cuts import CUTS, END, UNKNOWN, Cut
from holdfast.data.documents import Document
from holdfast.data.tokens import Spans, Tokenizer, numbers
from holdfast.suggest import unknown

SPECIAL = (UNKNOWN, END)


@final
class Vocabulary(Tokenizer):
    """The most frequent words of the texts, ties by alphabet. All others are one unknown word, number 0; the end is 1."""

    end = SPECIAL.index(END)

    def __init__(self, texts: Iterable[str], size: int | None = None, *, cut: str = "words") -> None:
        """`size` places, the unknown word and the end among them; by default as many as there are words."""
        if size is not None and size <= len(SPECIAL):
            raise ValueError(f"a vocabulary of {size} holds no words; it needs at least {len(SPECIAL) + 1} places.")
        pieces = _cut(cut).pieces
        counts = Counter(word for text in texts for word in pieces(_lines(text)))
        for special in SPECIAL:
            del counts[special]
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self._fill([*SPECIAL, *(ranked if size is None else ranked[: size - len(SPECIAL)])], cut)

    @classmethod
    def from_words(cls, words: Iterable[str], *, cut: str) -> "Vocabulary":
        """The vocabulary with exactly these words, the special ones first."""
        vocabulary = cls((), cut=cut)
        vocabulary._fill(list(words), cut)
        if not all(isinstance(word, str) for word in vocabulary.words):
            raise ValueError("a vocabulary holds words and nothing else; this one is damaged.")
        if vocabulary.words[: len(SPECIAL)] != list(SPECIAL) or len(vocabulary._numbers) != len(vocabulary):
            raise ValueError(f"a vocabulary begins with {' and '.join(SPECIAL)} and has no word twice; this one is damaged.")
        return vocabulary

    def _fill(self, words: list[str], cut: str) -> None:
        self.name = cut
        self.words = words
        self._cut = _cut(cut)
        self._numbers = {word: number for number, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Tensor:
        """A piece of a text: with the `<eos>` of lines, without the one that ends a document."""
        return self._encode(self._cut.pieces(_lines(text))).long()

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """The words with a space between and a newline for every end. What was unknown stays unknown."""
        words = ["\n" if number == self.end else f"{self.words[number]} " for number in numbers(ids)]
        return "".join(words).replace(" \n", "\n").removesuffix(" ")

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "words": self.words}

    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        for document in documents:
            yield self._encode(itertools.chain(self._cut.pieces(document.lines()), self._cut.ends()))

    def spans(self, document: Document, *, first: bool) -> Spans:
        return np.array(list(self._cut.spans(document.lines())), dtype=np.int64).reshape(-1, 2)

    def _encode(self, words: Iterable[str]) -> Tensor:
        found = array("i", (self._numbers.get(word, 0) for word in words))  # a list would take eight times the room
        return torch.from_numpy(np.array(found, dtype=np.int32))


def _cut(name: str) -> Cut:
    if name not in CUTS:
        raise ValueError(unknown("convention for words", name, CUTS))
    return CUTS[name]


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines
