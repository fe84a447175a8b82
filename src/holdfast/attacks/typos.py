"""Character typos: two letters in the wrong order, one missing, one twice, or the key next to it."""

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Literal, get_args

from holdfast.attacks.stop_words import STOP_WORDS
from holdfast.attacks.text import AttackedText, change_words
from holdfast.suggest import unknown

Typo = Literal["swap", "drop", "double", "neighbour"]
TYPOS: tuple[Typo, ...] = get_args(Typo)


def _keyboard() -> dict[str, str]:
    """The letters around each letter of a QWERTY keyboard, whose rows are shifted by about half a key."""
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
    """Each word that is no stop word gets one typo with probability `rate`; everything else stays bit for bit.

    After Pruthi et al. 2019: by default (`inner`) the first and the last letter stay, because people read past such typos,
    and a word needs at least four letters. Of the kinds in `typos` that the word allows, one is drawn, then a place for it;
    the word always changes. The other options are those of `swap_words`.
    """
    for typo in typos:
        if typo not in TYPOS:
            raise ValueError(unknown("typo", typo, TYPOS))
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
    """Where a typo may happen: at letters, and in a word of enough of them to stay recognisable."""
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
