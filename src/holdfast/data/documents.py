"""Documents: text sources in three splits, how a document is split into words, and which split a document belongs to.

Two conventions split a text into words, `words` and `lines` (WikiText's).

The split of a document depends on the hash of its title, or on its position in a text; never on a random seed.
"""

import hashlib
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from holdfast.data.files import checksum
from holdfast.errors import require_known

SPLITS = ("train", "valid", "test")
HELD_OUT = 0.1  # share of a text in each of valid and test
UNKNOWN = "<unk>"
END = "<eos>"

Span = tuple[int, int]  # characters, [start, end)

WORD = re.compile(r"\w+|[^\w\s]")
_PARAGRAPH_END = re.compile(rb"\n[ \t\r]*\n")
_LINE_END = re.compile(rb"\n")


@final
@dataclass(frozen=True)
class Document:
    """A text and its title. The data are UTF-8 bytes, decoded only when needed: a byte-level model reads them directly."""

    title: str
    data: bytes

    @property
    def text(self) -> str:
        return self._decode(self.data)

    def lines(self) -> Iterator[str]:
        """Yield the lines one by one, so that a text of half a gigabyte is not in memory twice."""
        return map(self._decode, io.BytesIO(self.data))

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.title} is not UTF-8 text: {error}.") from error


@final
@dataclass(frozen=True)
class LazyDocuments:
    """Documents that are read again in every iteration."""

    read: Callable[[], Iterable[Document]]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.read())


@final
@dataclass(frozen=True)
class Corpus:
    """A text source with the splits train, valid and test, each of which can be iterated over several times.

    A streamed source has no end, and so no checksum.
    """

    name: str
    about: str
    splits: Mapping[str, Iterable[Document]]
    streamed: bool = False

    def documents(self, split: str) -> Iterable[Document]:
        require_known("split", split, self.splits)
        return self.splits[split]

    @cached_property
    def checksum(self) -> str | None:
        """The checksum of the split names, the titles and the texts, in order."""
        if self.streamed:
            return None
        return checksum(
            part
            for name, split in self.splits.items()
            for document in split
            for part in (name.encode(), document.title.encode("utf-8", "surrogatepass"), document.data)
        )

    def describe(self) -> dict[str, Any]:
        """Return what a result records of its text."""
        return {"name": self.name, "about": self.about, "checksum": self.checksum}


@final
@dataclass(frozen=True)
class WordSplitter:
    """A convention that splits a text into words. No word spans two lines, so a text may be split line by line."""

    about: str
    line: Callable[[str], list[str]]  # the words of a line
    spans_of_line: Callable[[str], list[Span]]  # the characters of each of these words
    end_of_line: bool  # whether `<eos>` follows every line, or every document

    def pieces(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the words of lines, without the end of a document."""
        for line in lines:
            yield from self.line(line)
            if self.end_of_line:
                yield END

    def spans(self, lines: Iterable[str]) -> Iterator[Span]:
        """Yield the characters of each word in the joined lines of a document; the spans of ends are empty."""
        start = 0
        for line in lines:
            yield from ((start + first, start + last) for first, last in self.spans_of_line(line))
            start += len(line)
            if self.end_of_line:
                yield start, start
        yield from ((start, start) for _ in self.ends())

    def ends(self) -> tuple[str, ...]:
        """Return the words that follow the last line of a document."""
        return () if self.end_of_line else (END,)


def words(text: str) -> list[str]:
    """Return words and punctuation marks, in lower case."""
    return WORD.findall(text.lower())


def _word_spans(text: str) -> list[Span]:
    lower = text.lower()
    spans = [match.span() for match in WORD.finditer(lower)]
    if len(lower) == len(text):
        return spans
    # Lower case may have more letters, for example of a dotted capital I: map each of them back to its origin.
    origin = [place for place, letter in enumerate(text) for _ in letter.lower()]
    return [(origin[start], origin[end - 1] + 1) for start, end in spans]


WORD_SPLITTERS = {
    "words": WordSplitter("words and punctuation marks in lower case, <eos> after a document", words, _word_spans, False),
    "lines": WordSplitter(
        "what is between spaces, <eos> after every line: WikiText's convention",
        str.split,
        lambda text: [match.span() for match in re.finditer(r"\S+", text)],
        True,
    ),
}


def title_hash(title: str) -> bytes:
    """Return a hash that decides the split of a document, independent of the seed of Python's `hash`."""
    return hashlib.sha256(title.encode("utf-8", "surrogatepass")).digest()


def split_by_title(sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the split of each title: in the order of their hashes, titles fill the test split, then valid, then train."""
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


def split_by_position(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return four fifths, a tenth and a tenth, each ending after a paragraph or else a line; None if a part is empty."""
    places = [round((1 - 2 * HELD_OUT) * len(data)), round((1 - HELD_OUT) * len(data)), len(data)]
    ends = []
    for place, limit in itertools.pairwise(places):
        end = _PARAGRAPH_END.search(data, place, limit) or _LINE_END.search(data, place, limit)
        if end is None:
            return None
        ends.append(end.end())
    parts = data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] :]
    return parts if all(part.strip() for part in parts) else None


def hold_out(keys: Sequence[str], share: float = HELD_OUT) -> tuple[list[int], list[int]]:
    """Return the numbers of the keys that stay and of those held out, at least one each, both in the order given."""
    if len(keys) < 2:
        raise ValueError(f"of {len(keys)} examples none can be held out; there must be at least 2.")
    order = sorted(range(len(keys)), key=lambda number: (title_hash(keys[number]), number))
    held = min(max(1, round(share * len(keys))), len(keys) - 1)
    return sorted(order[held:]), sorted(order[:held])
