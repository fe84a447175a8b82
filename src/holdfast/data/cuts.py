"""Word level: what a text is cut into. Two conventions, and the words of both count the same whatever model reads them."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

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
