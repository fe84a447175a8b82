"""Typos: one a word, of the kinds asked for."""

import pytest
from wording import assert_refused

from holdfast.attacks import misspell
from holdfast.attacks.text import KEYBOARD, TYPOS, Typo

WORDS = ["elephant", "Keyboard", "MOUSE", "quickly", "banana", "jazz-band", "o\u2019clock"] * 40


def all_typos(word: str, kind: Typo) -> set[str]:
    """By brute force: every word that one typo of this kind makes."""
    places = range(len(word))
    letters = "abcdefghijklmnopqrstuvwxyz"
    if kind == "swap":
        return {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]}
    if kind == "drop":
        return {word[:i] + word[i + 1 :] for i in places}
    if kind == "double":
        return {word[:i] + word[i] * 2 + word[i + 1 :] for i in places}
    return {word[:i] + letter + word[i + 1 :] for i in places for letter in letters + letters.upper()}


@pytest.mark.parametrize("kind", TYPOS)
@pytest.mark.parametrize("inner", [True, False])
def test_a_typo_is_one_edit_of_its_kind(kind: Typo, inner: bool) -> None:
    attacked = misspell(" ".join(WORDS), rate=1.0, typos=[kind], inner=inner, seed=1)
    results = attacked.texts[0].split(" ")
    for word, result in zip(WORDS, results, strict=True):
        assert result != word and result in all_typos(word, kind)
        if inner:
            assert (result[0], result[-1]) == (word[0], word[-1])
    assert attacked.realised == 1
    assert len(set(results)) > 15  # places vary


def test_a_wrong_key_is_next_to_the_right_one_and_keeps_its_case() -> None:
    words = ["KEYBOARD", "elephant"] * 50
    results = misspell(" ".join(words), rate=1.0, typos=["neighbour"]).texts[0].split()
    for word, result in zip(words, results, strict=True):
        (place,) = [n for n in range(len(word)) if word[n] != result[n]]
        assert result[place].lower() in KEYBOARD[word[place].lower()] and result[place].isupper() == word[place].isupper()


def test_the_keyboard_is_symmetric_and_known_in_places() -> None:
    assert all(letter in KEYBOARD[near] for letter, nears in KEYBOARD.items() for near in nears)
    assert set(KEYBOARD["g"]) == set("fhtyvb") and set(KEYBOARD["q"]) == set("wa") and set(KEYBOARD["p"]) == set("ol")


def test_all_kinds_are_drawn_about_equally_often() -> None:
    words = ["elephant"] * 4000
    counts = dict.fromkeys(TYPOS, 0)
    possible = {kind: all_typos("elephant", kind) for kind in TYPOS}
    for result in misspell(" ".join(words), rate=1.0).texts[0].split():
        sure = [kind for kind in TYPOS if result in possible[kind]]
        counts[sure[0]] += 1
    assert all(850 < count < 1150 for count in counts.values()), counts


def test_short_words_and_stop_words_keep_their_letters() -> None:
    text = "the cat sat 1984 because <unk> yourselves"
    with pytest.warns(UserWarning, match="nothing changed"):
        assert misspell(text, rate=1.0).texts == (text,)


def test_an_unknown_typo_gets_the_nearest_name() -> None:
    assert_refused("'double'", misspell, "elephant", rate=1.0, typos=["doubel"])
    assert_refused("at least one", misspell, "elephant", rate=1.0, typos=[])
