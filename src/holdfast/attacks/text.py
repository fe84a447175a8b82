"""Attacks on words: swap them for a generic token or for other words, or misspell them.

A text changes only inside the words that the result lists; all other characters are untouched. Stop words, English words
that carry grammar rather than meaning, are never changed. A typo is two letters in the wrong order, a missing letter, a
doubled letter, or the key next to the right one.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple, TypedDict, Unpack, get_args

import numpy as np
import numpy.typing as npt

from holdfast.attacks.flags import AttackResult, Flag, warn
from holdfast.attacks.threat import Json, check_rate, check_seed, derived_seed
from holdfast.errors import require_known

Span = tuple[int, int]  # characters, [start, end)
Spans = npt.NDArray[np.int64]  # (T,2)
Places = npt.NDArray[np.intp]
Words = Sequence[tuple[str, Span]]

_LETTERS = r"(?:[^\W_]|[\u0300-\u036f])+"  # with combining accents, which belong to their letter
_WORD = rf"{_LETTERS}(?:(?:['\u2019_-]|(?<=\d)[.,](?=\d)){_LETTERS})*"
_SPECIAL = r"<[|\uff5c][^<>\s]*[|\uff5c]>|</?\w+>|\[(?:CLS|SEP|MASK|PAD|UNK|BOS|EOS|INST|/INST)\]"
_PIECE = re.compile(r"\S+")


class Change(NamedTuple):
    """One changed word: its span in the clean text, and the span of its replacement in the attacked text."""

    before: Span
    after: Span


@dataclass(frozen=True)
class AttackedText(AttackResult):
    """The attacked documents, and which of their words changed."""

    stored = ("attack", "rate", "realised", "realised_of_pieces", "seed", "changed", "checksum", "options", "flags")
    attack: str
    texts: tuple[str, ...]
    changes: tuple[tuple[Change, ...], ...]  # of each document, in order
    words: tuple[int, ...]  # number of words of each document, with stop words, without special tokens
    rate: float  # nominal: the probability that a word is changed if it may be
    seed: int
    options: Mapping[str, Json] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()

    @property
    def changed(self) -> int:
        """The number of changed words."""
        return sum(map(len, self.changes))

    @property
    def realised(self) -> float:
        """Changed words / all words. Stop words and special tokens are never changed, so it is below the nominal rate."""
        return self.changed / max(sum(self.words), 1)

    @property
    def realised_of_pieces(self) -> float:
        """Changed pieces / all pieces, where white space separates pieces: the tokens of WikiText, with punctuation."""
        pieces = [changed for document in range(len(self.texts)) for changed in self.piece_mask(document)]
        return sum(pieces) / max(len(pieces), 1)

    @property
    def checksum(self) -> str:
        """SHA-256 of the attacked texts, each after its length in bytes."""
        digest = hashlib.sha256()
        for text in self.texts:
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()

    def is_changed(self, document: int, spans: Sequence[Span] | Spans, *, clean: bool = False) -> npt.NDArray[np.bool_]:
        """Return which spans (for example a tokeniser's offsets) overlap a changed word.

        The spans are those of the attacked document, or with `clean` of the clean one. An empty span overlaps nothing.
        Perplexity over untouched words counts the targets whose span is not changed.
        """
        changed = np.array([change.before if clean else change.after for change in self.changes[document]], dtype=np.int64)
        changed, wanted = changed.reshape(-1, 2), np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        starts, ends = wanted[:, 0], wanted[:, 1]
        first = np.searchsorted(changed[:, 1], starts, side="right")  # the first change that ends after the start
        begins = np.append(changed[:, 0], np.iinfo(np.int64).max)[first]
        found: npt.NDArray[np.bool_] = (starts < ends) & (begins < ends)
        return found

    def common_tokens(self, document: int, before: Spans, after: Spans) -> tuple[Places, Places]:
        """Return the indices of tokens that both texts have: the same untouched characters, in the same order.

        `before` and `after` are a tokeniser's spans of the clean and of the attacked document. A token with an empty span,
        such as the end of a line or document, is common too.
        """
        old = np.flatnonzero(~self.is_changed(document, before, clean=True))
        new = np.flatnonzero(~self.is_changed(document, after))
        shifted = self.shifted_spans(document, before[old])
        if np.array_equal(shifted, after[new]):  # the usual case, and sorting takes a while
            return old, new
        keys = [_numbered(shifted), _numbered(after[new])]
        both, counts = np.unique(np.concatenate(keys), axis=0, return_inverse=True)[1], len(keys[0])
        _, first, second = np.intersect1d(both[:counts], both[counts:], assume_unique=True, return_indices=True)
        return old[np.sort(first)], new[second[np.argsort(first)]]

    def shifted_spans(self, document: int, spans: Spans) -> Spans:
        """Return spans of the clean text as spans of the attacked text, shifted by the length changes before them."""
        changes = self.changes[document]
        ends = np.array([change.before[1] for change in changes], dtype=np.int64)
        gained = np.array([0, *(change.after[1] - change.before[1] for change in changes)], dtype=np.int64)
        found: Spans = spans + gained[np.searchsorted(ends, spans[:, :1], side="right")]
        return found

    def piece_mask(self, document: int) -> list[bool]:
        """Return for each white-space separated piece of the attacked document whether it has a changed word."""
        spans = [match.span() for match in _PIECE.finditer(self.texts[document])]
        return [bool(changed) for changed in self.is_changed(document, spans)]

    def summary(self) -> dict[str, Json]:
        """Return what to store as JSON: not the texts, which follow from the seed."""
        return {**super().summary(), "documents": len(self.texts), "words": sum(self.words)}


def _numbered(spans: Spans) -> npt.NDArray[np.int64]:
    """Return (T,3): spans, and the number of equal spans before each. All bytes of one character have the same span."""
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    ranked = spans[order]
    new = np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1)) if len(ranked) else np.empty(0, dtype=bool)
    begin = np.maximum.accumulate(np.where(new, np.arange(len(ranked)), 0))
    count = np.empty(len(spans), dtype=np.int64)
    count[order] = np.arange(len(ranked)) - begin
    return np.concatenate([spans, count[:, None]], axis=1)


def words_of(text: str, special: Collection[str] = ()) -> Iterator[tuple[str, Span]]:
    """Yield the words of a text, with their spans.

    A word is letters and digits joined by apostrophes, hyphens and underscores, or a number with points.

    Special tokens (`<unk>`, `</s>`, `<|endoftext|>`, `[MASK]`, and those named in `special`) are not words, nor is
    any part of them.
    """
    named = [re.escape(token) for token in sorted(special, key=len, reverse=True) if token]
    for match in re.finditer(f"{'|'.join([*named, _SPECIAL])}|(?P<word>{_WORD})", text):
        if match["word"]:
            yield match["word"], match.span()


class WordOptions(TypedDict, total=False):
    """The keywords of all attacks on words: words that never change, further special tokens, and names of the documents."""

    stop_words: Collection[str]
    special: Collection[str]
    keys: Sequence[str] | None


def change_words(
    texts: str | Sequence[str],
    attack: str,
    replace: Callable[[str, Random], str | None],
    *,
    rate: float,
    seed: int,
    options: Mapping[str, Json] | None = None,
    pieces: Sequence[Spans] | None = None,
    **how: Unpack[WordOptions],
) -> AttackedText:
    """Replace each word that is no stop word with probability `rate`; `replace` returns None if it cannot replace a word.

    replace      a function of a word and of a `random.Random` of its own, from which it draws all its random numbers
    options      what the result records of the attack, beside the words that it leaves alone
    pieces       the spans of each document's tokens: then only words that are exactly one token are replaced
    how          `stop_words`, `special` and `keys`, as for `swap_words`

    A document's random numbers depend only on the seed and on its key, by default its own text, and every word takes the
    same number of them. So other documents do not matter, and a higher rate changes the same words and more.
    """

    def choose(number: int, text: str, key: str, words: Words, may: Collection[Span]) -> dict[Span, str]:
        random, chosen = Random(derived_seed(seed, attack, key)), dict[Span, str]()
        for word, span in words:
            is_drawn = random.random() < rate
            own = Random(int(random.random() * 2**53))  # so that `replace` may draw any number of random numbers
            if is_drawn and span in may and (new := replace(word, own)) is not None and new != word:
                chosen[span] = new
        return chosen

    return attacked_texts(texts, attack, choose, rate=rate, seed=seed, options=options or {}, pieces=pieces, **how)


def attacked_texts(
    texts: str | Sequence[str],
    attack: str,
    choose: Callable[[int, str, str, Words, Collection[Span]], Mapping[Span, str]],
    *,
    rate: float,
    seed: int,
    options: Mapping[str, Json],
    pieces: Sequence[Spans] | None = None,
    stop_words: Collection[str] | None = None,
    special: Collection[str] = (),
    keys: Sequence[str] | None = None,
) -> AttackedText:
    """Return the texts with the words that `choose` returns, by span, in the place of others.

    choose      gets the number of a document, its text, its key, its words, and the spans of those that may change

    The other options are those of `change_words`.
    """
    check_rate(rate)
    check_seed(seed)
    stops = STOP_WORDS if stop_words is None else frozenset(stop_words)
    documents = [texts] if isinstance(texts, str) else list(texts)
    if keys is not None and len(keys) != len(documents):
        raise ValueError(f"{len(keys)} keys for {len(documents)} documents; expected one key per document.")
    attacked, changes, counts = list[str](), list[tuple[Change, ...]](), list[int]()
    for number, (text, key) in enumerate(zip(documents, documents if keys is None else keys, strict=True)):
        words = list(words_of(text, special))
        may = {span for word, span in words if word.lower().replace("\u2019", "'") not in stops}
        if pieces is not None:
            may &= set(map(tuple, pieces[number].tolist()))
        new_text, changed = replaced(text, choose(number, text, key, words, may))
        attacked.append(new_text)
        changes.append(changed)
        counts.append(len(words))
    flags = warn(*unchanged_flag(rate, changes))
    recorded = {**options, "stop_words": len(stops), "special": sorted(special)}
    return AttackedText(attack, tuple(attacked), tuple(changes), tuple(counts), rate, seed, recorded, flags)


def replaced(text: str, replacements: Mapping[Span, str]) -> tuple[str, tuple[Change, ...]]:
    """Return the text with what is at each span replaced, and the changes, in order."""
    parts, changed = list[str](), list[Change]()
    done = length = 0
    for (start, end), new in sorted(replacements.items()):
        parts += [text[done:start], new]
        length += start - done
        changed.append(Change((start, end), (length, length + len(new))))
        done, length = end, length + len(new)
    return "".join([*parts, text[done:]]), tuple(changed)


def unchanged_flag(rate: float, changes: Iterable[Sequence[Change]]) -> tuple[Flag, ...]:
    """Return a flag if no word of any document was changed."""
    if rate == 0 or any(changes):
        return ()
    detail = f"the rate was {rate:g}, but no word was changed: the text is short, or no word may change."
    return (Flag("nothing changed", detail),)


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
"""  # the last line: the parts of don't and we'll in tokenised text, "don 't" and "we 'll"

STOP_WORDS = frozenset(_WORDS.split())

GENERIC = "AAA"  # the papers' replacement


def swap_words(
    texts: str | Sequence[str],
    *,
    rate: float,
    seed: int = 0,
    token: str = GENERIC,
    words: Sequence[str] | None = None,
    pieces: Sequence[Spans] | None = None,
    **how: Unpack[WordOptions],
) -> AttackedText:
    """Replace each word that is no stop word with probability `rate`; all other characters are untouched.

    By default every replacement is `token`: the attack of ACMoE (Nielsen et al. 2025), SymphonySMoE and Mutual-Inform SMoE
    on WikiText-103. Their generator swaps at least one word per line and realises about 2.0% of the tokens for a
    nominal 2.5%; here no swap is forced, and `realised` has the real share. It works on tokenised text (WikiText) and on
    running text, and never changes special tokens.

    For a model whose vocabulary lacks `token`, it is the unknown word, which is easy to predict: the attacked text then
    has a lower perplexity than the clean one. Pass `words` to avoid this.

    texts       documents, or one document; each is attacked on its own
    words       draw each replacement from these words, all equally likely, instead of `token`; never the word itself
    pieces      a tokeniser's spans of each document: swap only words that are exactly one token, so that a text keeps its
                number of tokens
    stop_words  words that are never replaced; by default `STOP_WORDS`
    special     further tokens that must stay untouched, beyond `<unk>`, `</s>`, `<|endoftext|>`, `[MASK]` and the like
    keys        names of the documents, from which their random numbers are drawn. By default this is the text itself, so
                that the same text is attacked the same way in any set
    """
    for word in [token] if words is None else words:
        if not word or any(character.isspace() for character in word):
            what = "token is" if words is None else "words contain"
            raise ValueError(f"{what} {word!r}; expected a word without white space: a text keeps its number of words.")
    if words is not None and len(different := {word.lower() for word in words}) < 2:
        raise ValueError(f"{len(different)} words to draw from; a swap needs 2, because no word replaces itself.")

    def replace(word: str, random: Random) -> str:
        if words is None:
            return token
        place = int(random.random() * len(words))
        while words[place].lower() == word.lower():
            place = (place + 1) % len(words)
        return words[place]

    source: dict[str, Json] = {"token": token} if words is None else {"words": len(words)}
    return change_words(texts, "word swap", replace, rate=rate, seed=seed, options=source, pieces=pieces, **how)


def swappable(words: Iterable[str]) -> list[str]:
    """Return the words that a swap may draw from: two letters or more, letters only, no stop words, each once."""
    return sorted({word for word in words if len(word) > 1 and word.isalpha() and word.lower() not in STOP_WORDS})


def words_in(texts: Iterable[str]) -> list[str]:
    """Return the `swappable` words of some texts."""
    return swappable(word for text in texts for word, _ in words_of(text))


Typo = Literal["swap", "drop", "double", "neighbour"]
TYPOS: tuple[Typo, ...] = get_args(Typo)


def _keyboard() -> dict[str, str]:
    """Return the neighbours of each letter on a QWERTY keyboard, whose rows are shifted by about half a key."""
    rows = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
    place = {letter: (row, column) for row, letters in enumerate(rows) for column, letter in enumerate(letters)}
    shifts = ((0, -1), (0, 1), (-1, 0), (-1, 1), (1, -1), (1, 0))
    letters = {where: letter for letter, where in place.items()}
    around = {letter: [(row + down, column + right) for down, right in shifts] for letter, (row, column) in place.items()}
    return {letter: "".join(letters[where] for where in near if where in letters) for letter, near in around.items()}


KEYBOARD = _keyboard()


def misspell(
    texts: str | Sequence[str],
    *,
    rate: float,
    seed: int = 0,
    typos: Sequence[Typo] = TYPOS,
    inner: bool = True,
    **how: Unpack[WordOptions],
) -> AttackedText:
    """Put one typo into each word that is no stop word with probability `rate`; all other characters are untouched.

    As in Pruthi et al. 2019, by default (`inner`) the first and the last letter stay, because people read past such typos,
    and a word needs at least four letters. One kind is drawn from those in `typos` that are possible in the word, then a
    position; the word always changes. The other options are those of `swap_words`.
    """
    for typo in typos:
        require_known("typo", typo, TYPOS)
    if not typos:
        raise ValueError(f"typos is empty; name at least one of {', '.join(TYPOS)}.")

    def replace(word: str, random: Random) -> str | None:
        edits = typos_of(word, inner)
        possible = [edits[typo] for typo in TYPOS if typo in typos and edits[typo]]
        if not possible:
            return None
        ways = possible[int(random.random() * len(possible))]
        return ways[int(random.random() * len(ways))]

    return change_words(texts, "typos", replace, rate=rate, seed=seed, options={"typos": list(typos), "inner": inner}, **how)


def _places(word: str, inner: bool) -> list[int]:
    """Return the positions where a typo may be: at letters, in a word that is long enough to stay recognisable."""
    letters = [place for place, character in enumerate(word) if character.isalpha()]
    fewest, places = (4, letters[1:-1]) if inner else (2, letters)
    return places if len(letters) >= fewest else []


def typos_of(word: str, inner: bool) -> dict[Typo, list[str]]:
    """Return what the word can become by a typo of each kind; `inner` is that of `misspell`."""
    places = _places(word, inner)
    pairs = [place for place in places if place + 1 in places and word[place] != word[place + 1]]
    near = [(place, key) for place in places for key in KEYBOARD.get(word[place].lower(), "")]
    return {
        "swap": [word[:place] + word[place + 1] + word[place] + word[place + 2 :] for place in pairs],
        "drop": [word[:place] + word[place + 1 :] for place in places],
        "double": [word[: place + 1] + word[place:] for place in places],
        "neighbour": [
            word[:place] + (key.upper() if word[place].isupper() else key) + word[place + 1 :] for place, key in near
        ],
    }
