"""Attacks on words: swap them for a generic token or for other words, or misspell them.

A typo is two letters in the wrong order, a missing letter, a doubled letter, or the key next to the right one.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from typing import Literal, get_args

from holdfast.attacks.text import STOP_WORDS, AttackedText, Spans, change_words, words_of
from holdfast.errors import unknown_name

GENERIC = "AAA"  # the papers' replacement


def swap_words(
    texts: str | Sequence[str],
    *,
    rate: float,
    seed: int = 0,
    token: str = GENERIC,
    words: Sequence[str] | None = None,
    pieces: Sequence[Spans] | None = None,
    stop_words: Collection[str] = STOP_WORDS,
    special: Collection[str] = (),
    keys: Sequence[str] | None = None,
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

    source = {"token": token} if words is None else {"words": len(words)}
    return change_words(
        texts,
        "word swap",
        replace,
        rate=rate,
        seed=seed,
        stop_words=frozenset(stop_words),
        special=special,
        keys=keys,
        pieces=pieces,
        options={**source, "stop_words": len(stop_words), "special": sorted(special)},
    )


def swappable(words: Iterable[str]) -> list[str]:
    """Return the words that a swap may draw from: two letters or more, letters only, no stop words, each once."""
    return sorted({word for word in words if len(word) > 1 and word.isalpha() and word.lower() not in STOP_WORDS})


def words_in(texts: Iterable[str]) -> list[str]:
    """Return the `swappable` words of some texts."""
    return swappable(word.text for text in texts for word in words_of(text))


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
    stop_words: Collection[str] = STOP_WORDS,
    special: Collection[str] = (),
    keys: Sequence[str] | None = None,
) -> AttackedText:
    """Put one typo into each word that is no stop word with probability `rate`; all other characters are untouched.

    As in Pruthi et al. 2019, by default (`inner`) the first and the last letter stay, because people read past such typos,
    and a word needs at least four letters. One kind is drawn from those in `typos` that are possible in the word, then a
    position; the word always changes. The other options are those of `swap_words`.
    """
    for typo in typos:
        if typo not in TYPOS:
            raise ValueError(unknown_name("typo", typo, TYPOS))
    if not typos:
        raise ValueError(f"typos is empty; name at least one of {', '.join(TYPOS)}.")

    def replace(word: str, random: Random) -> str | None:
        possible = {typo: ways for typo in TYPOS if typo in typos and (ways := _EDITS[typo](word, _places(word, inner)))}
        if not possible:
            return None
        ways = list(possible.values())[int(random.random() * len(possible))]
        return ways[int(random.random() * len(ways))]

    return change_words(
        texts,
        "typos",
        replace,
        rate=rate,
        seed=seed,
        stop_words=frozenset(stop_words),
        special=special,
        keys=keys,
        options={"typos": list(typos), "inner": inner, "stop_words": len(stop_words), "special": sorted(special)},
    )


def _places(word: str, inner: bool) -> list[int]:
    """Return the positions where a typo may be: at letters, in a word that is long enough to stay recognisable."""
    letters = [place for place, character in enumerate(word) if character.isalpha()]
    if inner:
        return letters[1:-1] if len(letters) >= 4 else []
    return letters if len(letters) >= 2 else []


def _swaps(word: str, places: list[int]) -> list[str]:
    pairs = [place for place in places if place + 1 in places and word[place] != word[place + 1]]
    return [word[:place] + word[place + 1] + word[place] + word[place + 2 :] for place in pairs]


def _drops(word: str, places: list[int]) -> list[str]:
    return [word[:place] + word[place + 1 :] for place in places]


def _doubles(word: str, places: list[int]) -> list[str]:
    return [word[: place + 1] + word[place:] for place in places]


def _neighbours(word: str, places: list[int]) -> list[str]:
    found = []
    for place in places:
        for key in KEYBOARD.get(word[place].lower(), ""):
            found.append(word[:place] + (key.upper() if word[place].isupper() else key) + word[place + 1 :])
    return found


_EDITS: dict[Typo, Callable[[str, list[int]], list[str]]] = {
    "swap": _swaps,
    "drop": _drops,
    "double": _doubles,
    "neighbour": _neighbours,
}
