"""The record of a text source: documents in three splits, read when they are asked for."""

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from holdfast.data.checksum import checksum
from holdfast.data.cuts import CUTS, count_words
from holdfast.suggest import unknown

SPLITS = ("train", "valid", "test")


@final
@dataclass(frozen=True)
class Document:
    """A text and where it is from. The bytes are UTF-8, and bytes they stay: a byte-level model never needs the rest."""

    title: str
    data: bytes

    @property
    def text(self) -> str:
        return self._decode(self.data)

    def lines(self) -> Iterator[str]:
        """One after the other, so that a text of half a gigabyte is never held twice."""
        return map(self._decode, io.BytesIO(self.data))

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.title} is not UTF-8 text: {error}.") from error


@final
@dataclass(frozen=True)
class Lazy:
    """Documents that are read anew each time they are gone through."""

    read: Callable[[], Iterable[Document]]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.read())


@final
@dataclass(frozen=True)
class Corpus:
    """A text source: what a model trains on, is chosen by, and is tested on.

    Splits can be gone through again and again. A streamed source has more documents than anyone reads: it has no checksum
    until `head` takes a number of them.
    """

    name: str
    about: str
    splits: Mapping[str, Iterable[Document]]
    tokenizer: str = "words"  # the usual one for this text
    streamed: bool = False

    def documents(self, split: str) -> Iterable[Document]:
        if split not in self.splits:
            raise ValueError(unknown("split", split, self.splits))
        return self.splits[split]

    def head(self, documents: int) -> "Corpus":
        """The first documents of each split, read now and kept."""
        if documents < 1:
            raise ValueError(f"the first {documents} documents are none; take at least 1.")
        return replace(
            self,
            splits={name: tuple(itertools.islice(split, documents)) for name, split in self.splits.items()},
            streamed=False,
        )

    @cached_property
    def checksum(self) -> str | None:
        """Of the names of the splits, the titles and the texts, in order."""
        if self.streamed:
            return None
        return checksum(
            part
            for name, split in self.splits.items()
            for document in split
            for part in (name.encode(), document.title.encode("utf-8", "surrogatepass"), document.data)
        )

    def count_words(self, split: str) -> int:
        """What a perplexity per word divides by, whatever the tokeniser: exp(total nll / words). Ends of lines or documents
        are words too, by this text's convention.
        """
        self._check_end()
        cut = CUTS[self.tokenizer if self.tokenizer in CUTS else "words"]
        return sum(count_words(document.lines(), cut) for document in self.documents(split))

    def count_bytes(self, split: str) -> int:
        """What a number of bits per byte divides by."""
        self._check_end()
        return sum(len(document.data) for document in self.documents(split))

    def _check_end(self) -> None:
        if self.streamed:
            raise ValueError(f"{self.name} has no end to count to: take a head of it first.")

    def describe(self) -> dict[str, Any]:
        """What a result records of its text."""
        return {"name": self.name, "about": self.about, "checksum": self.checksum}
