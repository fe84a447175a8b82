"""What an attack on text returns, and what counts as a word. A text is only ever changed inside the words it names.

English words that carry grammar rather than meaning; attacks on words leave them alone.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.attacks.flags import Flag, nothing_changed, warn
from holdfast.attacks.threat import Json, check_rate, check_seed, mixed
from holdfast.files import write_whole

Span = tuple[int, int]  # characters, [start, end)
Spans = npt.NDArray[np.int64]  # (T,2)
Places = npt.NDArray[np.intp]

_LETTERS = r"(?:[^\W_]|[\u0300-\u036f])+"  # the accents, so that a decomposed letter stays whole
_WORD = rf"{_LETTERS}(?:(?:['\u2019_-]|(?<=\d)[.,](?=\d)){_LETTERS})*"
_SPECIAL = r"<[|\uff5c][^<>\s]*[|\uff5c]>|</?\w+>|\[(?:CLS|SEP|MASK|PAD|UNK|BOS|EOS|INST|/INST)\]"
_PIECE = re.compile(r"\S+")


class Change(NamedTuple):
    """One changed word: where it was in the clean text, and where its replacement is in the attacked one."""

    before: Span
    after: Span


class Word(NamedTuple):
    text: str
    span: Span


@dataclass(frozen=True)
class AttackedText:
    """The attacked documents, how much of them really changed, and where."""

    attack: str
    texts: tuple[str, ...]
    changes: tuple[tuple[Change, ...], ...]  # of each document, in order
    words: tuple[int, ...]  # how many words each document has, stop words included, special tokens not
    rate: float  # nominal: the probability with which a word that may be attacked is
    seed: int
    options: Mapping[str, Json] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()

    @property
    def changed(self) -> int:
        return sum(map(len, self.changes))

    @property
    def realised(self) -> float:
        """Changed words / all words. Stop words and special tokens are never changed, so it is below the nominal rate."""
        return self.changed / max(sum(self.words), 1)

    @property
    def realised_of_pieces(self) -> float:
        """The same over pieces between white space, which are the tokens of WikiText, punctuation included."""
        pieces = [touched for document in range(len(self.texts)) for touched in self.piece_mask(document)]
        return sum(pieces) / max(len(pieces), 1)

    @property
    def checksum(self) -> str:
        """SHA-256 of the attacked texts, each after its length in bytes."""
        digest = hashlib.sha256()
        for text in self.texts:
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()

    def touched(self, document: int, spans: Sequence[Span] | Spans, *, clean: bool = False) -> npt.NDArray[np.bool_]:
        """Which spans of the attacked document overlap a changed word, or of the clean one; a tokeniser's offsets, say.

        A target that was not touched is what perplexity over the targets left clean counts. Empty spans are not touched.
        """
        changed = np.array([change.before if clean else change.after for change in self.changes[document]], dtype=np.int64)
        changed, wanted = changed.reshape(-1, 2), np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        starts, ends = wanted[:, 0], wanted[:, 1]
        first = np.searchsorted(changed[:, 1], starts, side="right")  # the first change that ends behind the start
        begins = np.append(changed[:, 0], np.iinfo(np.int64).max)[first]
        found: npt.NDArray[np.bool_] = (starts < ends) & (begins < ends)
        return found

    def shared(self, document: int, before: Spans, after: Spans) -> tuple[Places, Places]:
        """Return the places of tokens that both texts have: the same untouched characters, in the same order.

        `before` and `after` are the spans of a tokeniser in the clean document and in the attacked one. What ends a
        document or a line, an empty span, is shared too.
        """
        old = np.flatnonzero(~self.touched(document, before, clean=True))
        new = np.flatnonzero(~self.touched(document, after))
        keys = [_numbered(self.moved(document, before[old])), _numbered(after[new])]
        if np.array_equal(keys[0], keys[1]):  # the usual case, and sorting millions of rows takes a while
            return old, new
        both, counts = np.unique(np.concatenate(keys), axis=0, return_inverse=True)[1], len(keys[0])
        _, first, second = np.intersect1d(both[:counts], both[counts:], assume_unique=True, return_indices=True)
        return old[np.sort(first)], new[second[np.argsort(first)]]

    def moved(self, document: int, spans: Spans) -> Spans:
        """Return spans of the clean text as spans of the attacked one: moved by what words before them gained or lost."""
        changes = self.changes[document]
        ends = np.array([change.before[1] for change in changes], dtype=np.int64)
        gained = np.array([0, *(change.after[1] - change.before[1] for change in changes)], dtype=np.int64)
        found: Spans = spans + gained[np.searchsorted(ends, spans[:, :1], side="right")]
        return found

    def piece_mask(self, document: int) -> list[bool]:
        """For each piece between white space of the attacked document, whether it holds a changed word."""
        spans = [match.span() for match in _PIECE.finditer(self.texts[document])]
        return [bool(touched) for touched in self.touched(document, spans)]

    def summary(self) -> dict[str, Json]:
        """What to store with a result; the texts themselves are `save`d."""
        return {
            "attack": self.attack,
            "rate": self.rate,
            "realised": self.realised,
            "realised_of_pieces": self.realised_of_pieces,
            "seed": self.seed,
            "documents": len(self.texts),
            "words": sum(self.words),
            "changed": self.changed,
            "checksum": self.checksum,
            "options": dict(self.options),
            "flags": [flag.summary() for flag in self.flags],
        }

    def save(self, path: str | Path) -> None:
        """Write once: a file that holds another attacked set is not overwritten."""
        path = Path(path)
        if path.exists() and load_text(path).checksum != self.checksum:
            raise ValueError(f"{path} holds a different attacked set; choose another name, or delete it.")
        changes = [[[*change.before, *change.after] for change in document] for document in self.changes]
        stored = {**self.summary(), "words": list(self.words), "changes": changes, "texts": list(self.texts)}
        write_whole(path, json.dumps(stored))


def _numbered(spans: Spans) -> npt.NDArray[np.int64]:
    """(T,3): spans, and how many spans before are the same. The bytes of one character have one span."""
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    ranked = spans[order]
    new = np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1)) if len(ranked) else np.empty(0, dtype=bool)
    begin = np.maximum.accumulate(np.where(new, np.arange(len(ranked)), 0))
    count = np.empty(len(spans), dtype=np.int64)
    count[order] = np.arange(len(ranked)) - begin
    return np.concatenate([spans, count[:, None]], axis=1)


def load_text(path: str | Path) -> AttackedText:
    """An attacked set that was `save`d; a file that does not match its checksum is an error."""
    stored: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    attacked = AttackedText(
        attack=stored["attack"],
        texts=tuple(stored["texts"]),
        changes=tuple(tuple(Change((a, b), (c, d)) for a, b, c, d in document) for document in stored["changes"]),
        words=tuple(stored["words"]),
        rate=stored["rate"],
        seed=stored["seed"],
        options=stored["options"],
        flags=tuple(Flag(flag["kind"], flag["detail"]) for flag in stored["flags"]),
    )
    if attacked.checksum != stored["checksum"]:
        raise ValueError(f"{path} does not match its checksum; it was changed after it was written.")
    return attacked


def words_of(text: str, special: Collection[str] = ()) -> Iterator[Word]:
    """The words of a text: letters and digits held together by apostrophes, hyphens and underscores; numbers with points.

    Special tokens (`<unk>`, `</s>`, `<|endoftext|>`, `[MASK]`, and those named in `special`) are not words, nor is
    anything inside them.
    """
    for match in _pattern(special).finditer(text):
        if match["word"]:
            yield Word(match["word"], match.span())


def _pattern(special: Collection[str]) -> re.Pattern[str]:
    named = [re.escape(token) for token in sorted(special, key=len, reverse=True) if token]
    return re.compile(f"{'|'.join([*named, _SPECIAL])}|(?P<word>{_WORD})")


def change_words(
    texts: str | Sequence[str],
    attack: str,
    replace: Callable[[str, Random], str | None],
    *,
    rate: float,
    seed: int,
    stop_words: Collection[str],
    special: Collection[str],
    keys: Sequence[str] | None,
    options: Mapping[str, Json],
    pieces: Sequence[Spans] | None = None,
) -> AttackedText:
    """Each word that is no stop word is replaced with probability `rate`; `replace` gives None where it cannot.

    With `pieces`, the spans of each document's tokens, a word that is not exactly one of them is left alone.

    A document's random numbers depend on the seed and its key only, by default its own text, and every word takes the same
    number of them: other documents change nothing, and a higher rate attacks the same words and more.
    """
    check_rate(rate)
    check_seed(seed)
    documents = [texts] if isinstance(texts, str) else list(texts)
    if keys is not None and len(keys) != len(documents):
        raise ValueError(f"{len(keys)} keys for {len(documents)} documents; expected one each.")
    results = []
    for number, (text, key) in enumerate(zip(documents, documents if keys is None else keys, strict=True)):
        whole = None if pieces is None else frozenset(map(tuple, pieces[number].tolist()))
        results.append(_change(text, Random(mixed(seed, attack, key)), replace, rate, stop_words, special, whole))
    changed = sum(len(changes) for _, changes, _ in results)
    return AttackedText(
        attack=attack,
        texts=tuple(text for text, _, _ in results),
        changes=tuple(tuple(changes) for _, changes, _ in results),
        words=tuple(words for _, _, words in results),
        rate=rate,
        seed=seed,
        options=options,
        flags=warn(*nothing_changed(rate, changed, "word")),
    )


def _change(
    text: str,
    random: Random,
    replace: Callable[[str, Random], str | None],
    rate: float,
    stop_words: Collection[str],
    special: Collection[str],
    whole: Collection[Span] | None,
) -> tuple[str, list[Change], int]:
    pieces: list[str] = []
    changes: list[Change] = []
    count = done = length = 0
    for word, (start, end) in words_of(text, special):
        count += 1
        chosen = random.random() < rate
        own = int(random.random() * 2**53)  # a seed, so that a replacement may draw as it likes
        if not chosen or word.lower().replace("\u2019", "'") in stop_words:
            continue
        if whole is not None and (start, end) not in whole:
            continue
        new = replace(word, Random(own))
        if new is None or new == word:
            continue
        pieces += [text[done:start], new]
        length += start - done
        changes.append(Change((start, end), (length, length + len(new))))
        done, length = end, length + len(new)
    return "".join([*pieces, text[done:]]), changes, count


_WORDS = """
    a about above after again against all also am an and any are as at be because been before being below between both but
    by can cannot could did do does doing down during each either else ever few for from further had has have having he
    her here hers herself him himself his how however i if in into is it its itself just let may me might mine more most
    must my myself neither no nor not now of off on once only onto or other our ours ourselves out over own per quite
    rather same shall she should since so some such than that the their theirs them themselves then there these they this
    those though through thus to too toward towards under until unto up upon us very was we were what whatever when
    where whether which while who whom whose why will with within without would yet you your yours yourself yourselves
    aren't can't couldn't didn't doesn't don't hadn't hasn't haven't he'd he'll he's i'd i'll i'm i've isn't it's let's
    mustn't shan't she'd she'll she's shouldn't that's there's they'd they'll they're they've wasn't we'd we'll we're we've
    weren't what's won't wouldn't you'd you'll you're you've
    d ll m re s t ve aren couldn didn doesn don hadn hasn haven isn mustn shan shouldn wasn weren won wouldn
"""  # the last line: what tokenised text makes of don't and we'll, "don 't" and "we 'll"

STOP_WORDS = frozenset(_WORDS.split())
