"""Word level: what a text is cut into. Two conventions, and the words of both count the same whatever model reads them."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

_PIECE = re.compile(r"\w+|[^\w\s]")
UNKNOWN = "<unk>"
END = "<eos>"


def words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _PIECE.findall(text.lower())


@final
@dataclass(frozen=True)
class Cut:
    """A convention. No piece spans two lines, so a text may be cut line by line."""

    name: str
    about: str
    line: Callable[[str], list[str]]
    end_of_line: bool  # `<eos>` after every line, or after every document

    def pieces(self, lines: Iterable[str]) -> Iterator[str]:
        """The words of lines, without the end of a document."""
        for line in lines:
            yield from self.line(line)
            if self.end_of_line:
                yield END

    def ends(self) -> tuple[str, ...]:
        """What follows the last line of a document."""
        return () if self.end_of_line else (END,)


CUTS = {
    cut.name: cut
    for cut in (
        Cut("words", "words and punctuation marks in lower case, <eos> after a document", words, end_of_line=False),
        Cut("lines", "what lies between spaces, <eos> after every line: WikiText's convention", str.split, end_of_line=True),
    )
}


def count_words(lines: Iterable[str], cut: Cut) -> int:
    """The words of a document, its ends included: exactly the tokens that a word-level model has to predict."""
    per_line = int(cut.end_of_line)
    return sum(len(cut.line(line)) + per_line for line in lines) + len(cut.ends())
