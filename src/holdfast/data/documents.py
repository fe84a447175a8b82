"""Word level: what a text is cut into. Two conventions, and the words of both count the same whatever model reads them.

The record of a text source: documents in three splits, read when they are asked for.

Which document is for training and which for testing: by the hash of its title, or by its place in a text.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from holdfast.data.files import checksum, title_hash
from holdfast.errors import unknown

Span = tuple[int, int]  # characters, [start, end)

_PIECE = re.compile(r"\w+|[^\w\s]")
UNKNOWN = "<unk>"
END = "<eos>"


def words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _PIECE.findall(text.lower())


def _word_spans(text: str) -> list[Span]:
    lower = text.lower()
    spans = [match.span() for match in _PIECE.finditer(lower)]
    if len(lower) == len(text):
        return spans
    # One letter may become two, a dotted capital I for example: back to where each is from.
    origin = [place for place, letter in enumerate(text) for _ in letter.lower()]
    return [(origin[start], origin[end - 1] + 1) for start, end in spans]


def _gap_spans(text: str) -> list[Span]:
    return [match.span() for match in re.finditer(r"\S+", text)]


@final
@dataclass(frozen=True)
class Cut:
    """A convention. No piece spans two lines, so a text may be cut line by line."""

    name: str
    about: str
    line: Callable[[str], list[str]]
    spans_of_line: Callable[[str], list[Span]]  # of what `line` gives
    end_of_line: bool  # `<eos>` after every line, or after every document

    def pieces(self, lines: Iterable[str]) -> Iterator[str]:
        """The words of lines, without the end of a document."""
        for line in lines:
            yield from self.line(line)
            if self.end_of_line:
                yield END

    def spans(self, lines: Iterable[str]) -> Iterator[Span]:
        """Where each of these words is in the text that the lines make up; ends of lines and documents are nowhere."""
        start = 0
        for line in lines:
            yield from ((start + first, start + last) for first, last in self.spans_of_line(line))
            start += len(line)
            if self.end_of_line:
                yield start, start
        yield from ((start, start) for _ in self.ends())

    def ends(self) -> tuple[str, ...]:
        """What follows the last line of a document."""
        return () if self.end_of_line else (END,)


CUTS = {
    cut.name: cut
    for cut in (
        Cut(
            "words",
            "words and punctuation marks in lower case, <eos> after a document",
            words,
            _word_spans,
            end_of_line=False,
        ),
        Cut(
            "lines",
            "what lies between spaces, <eos> after every line: WikiText's convention",
            str.split,
            _gap_spans,
            end_of_line=True,
        ),
    )
}


def count_words(lines: Iterable[str], cut: Cut) -> int:
    """The words of a document, its ends included: exactly the tokens that a word-level model has to predict."""
    per_line = int(cut.end_of_line)
    return sum(len(cut.line(line)) + per_line for line in lines) + len(cut.ends())


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


HELD_OUT = 0.1  # of a text, for each of valid and test
_PARAGRAPH = re.compile(rb"\n[ \t\r]*\n")
_LINE = re.compile(rb"\n")


def by_title(sizes: Mapping[str, int]) -> dict[str, str]:
    """The split of each title. In the order of their hashes, titles fill the test split, then valid, then train."""
    if len(sizes) < 3:
        raise ValueError(f"{len(sizes)} documents do not make three splits; there must be at least 3.")
    wanted = HELD_OUT * sum(sizes.values())
    order = sorted(sizes, key=title_hash)
    splits, filled = {}, 0
    remaining = ["test", "valid"]
    for place, title in enumerate(order):
        splits[title] = remaining[0] if remaining else "train"
        filled += sizes[title]
        if remaining and (filled >= wanted or len(order) - place - 1 == len(remaining)):
            remaining, filled = remaining[1:], 0
    return splits


def by_position(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Four fifths, a tenth and a tenth, cut after a paragraph or else a line; None where that leaves a part empty."""
    places = [round((1 - 2 * HELD_OUT) * len(data)), round((1 - HELD_OUT) * len(data)), len(data)]
    first, second = (_border(data, place, limit) for place, limit in itertools.pairwise(places))
    if first is None or second is None:
        return None
    parts = data[:first], data[first:second], data[second:]
    return parts if all(part.strip() for part in parts) else None


def _border(data: bytes, place: int, limit: int) -> int | None:
    for border in (_PARAGRAPH, _LINE):
        if found := border.search(data, place, limit):
            return found.end()
    return None


def hold_out(keys: Sequence[str], share: float = HELD_OUT) -> tuple[list[int], list[int]]:
    """Numbers of the keys that stay and of those held out, at least one each, both in the order given."""
    if len(keys) < 2:
        raise ValueError(f"of {len(keys)} examples none can be held out; there must be at least 2.")
    order = sorted(range(len(keys)), key=lambda number: (title_hash(keys[number]), number))
    held = min(max(1, round(share * len(keys))), len(keys) - 1)
    return sorted(order[held:]), sorted(order[:held])
