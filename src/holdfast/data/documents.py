"""Documents: text sources in three splits, how a document is split into words, and which split a document belongs to.

Two conventions split a text into words, `words` and `lines` (WikiText's). The words of a text are counted by its convention,
whatever tokeniser a model has, so that perplexities per word can be compared.

The split of a document depends on the hash of its title, or on its position in a text; never on a random seed.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from holdfast.data.files import checksum, title_hash
from holdfast.errors import unknown_name

SPLITS = ("train", "valid", "test")
HELD_OUT = 0.1  # share of a text in each of valid and test
UNKNOWN = "<unk>"
END = "<eos>"

Span = tuple[int, int]  # characters, [start, end)

_WORD = re.compile(r"\w+|[^\w\s]")
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

    A streamed source has no end: it has no checksum until `head` takes its first documents.
    """

    name: str
    about: str
    splits: Mapping[str, Iterable[Document]]
    tokenizer: str = "words"  # the usual one for this text
    streamed: bool = False

    def documents(self, split: str) -> Iterable[Document]:
        if split not in self.splits:
            raise ValueError(unknown_name("split", split, self.splits))
        return self.splits[split]

    def head(self, documents: int) -> "Corpus":
        """Return a corpus of the first documents of each split, read now."""
        if documents < 1:
            raise ValueError(f"documents is {documents}; take at least 1.")
        return replace(
            self,
            splits={name: tuple(itertools.islice(split, documents)) for name, split in self.splits.items()},
            streamed=False,
        )

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

    def count_words(self, split: str) -> int:
        """Return the divisor of a perplexity per word, exp(total nll / words), whatever the tokeniser.

        Ends of lines or documents are words too, by the convention of this text.
        """
        self._require_end()
        splitter = WORD_SPLITTERS[self.tokenizer if self.tokenizer in WORD_SPLITTERS else "words"]
        return sum(splitter.count(document.lines()) for document in self.documents(split))

    def count_bytes(self, split: str) -> int:
        """Return the divisor of a number of bits per byte."""
        self._require_end()
        return sum(len(document.data) for document in self.documents(split))

    def _require_end(self) -> None:
        if self.streamed:
            raise ValueError(
                f"{self.name} is a stream without an end; take its first documents with head() before counting."
            )

    def describe(self) -> dict[str, Any]:
        """Return what a result records of its text."""
        return {"name": self.name, "about": self.about, "checksum": self.checksum}


@final
@dataclass(frozen=True)
class WordSplitter:
    """A convention that splits a text into words. No word spans two lines, so a text may be split line by line."""

    name: str
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

    def count(self, lines: Iterable[str]) -> int:
        """Return the number of words of a document with its ends: the tokens that a word-level model predicts."""
        per_line = int(self.end_of_line)
        return sum(len(self.line(line)) + per_line for line in lines) + len(self.ends())


def words(text: str) -> list[str]:
    """Return words and punctuation marks, in lower case."""
    return _WORD.findall(text.lower())


def _word_spans(text: str) -> list[Span]:
    lower = text.lower()
    spans = [match.span() for match in _WORD.finditer(lower)]
    if len(lower) == len(text):
        return spans
    # Lower case may have more letters, for example of a dotted capital I: map each of them back to its origin.
    origin = [place for place, letter in enumerate(text) for _ in letter.lower()]
    return [(origin[start], origin[end - 1] + 1) for start, end in spans]


def _spans_between_spaces(text: str) -> list[Span]:
    return [match.span() for match in re.finditer(r"\S+", text)]


WORD_SPLITTERS = {
    splitter.name: splitter
    for splitter in (
        WordSplitter(
            "words",
            "words and punctuation marks in lower case, <eos> after a document",
            words,
            _word_spans,
            end_of_line=False,
        ),
        WordSplitter(
            "lines",
            "what is between spaces, <eos> after every line: WikiText's convention",
            str.split,
            _spans_between_spaces,
            end_of_line=True,
        ),
    )
}


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
    first, second = (_next_end(data, place, limit) for place, limit in itertools.pairwise(places))
    if first is None or second is None:
        return None
    parts = data[:first], data[first:second], data[second:]
    return parts if all(part.strip() for part in parts) else None


def _next_end(data: bytes, place: int, limit: int) -> int | None:
    for pattern in (_PARAGRAPH_END, _LINE_END):
        if found := pattern.search(data, place, limit):
            return found.end()
    return None


def hold_out(keys: Sequence[str], share: float = HELD_OUT) -> tuple[list[int], list[int]]:
    """Return the numbers of the keys that stay and of those held out, at least one each, both in the order given."""
    if len(keys) < 2:
        raise ValueError(f"of {len(keys)} examples none can be held out; there must be at least 2.")
    order = sorted(range(len(keys)), key=lambda number: (title_hash(keys[number]), number))
    held = min(max(1, round(share * len(keys))), len(keys) - 1)
    return sorted(order[held:]), sorted(order[:held])
