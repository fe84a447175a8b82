"""Word swap: what it changes, and above all what it does not."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from wording import assert_refused

from holdfast.attacks import AttackedText, AttackWarning, misspell, swap_words, swappable, words_in

WIKI = (
    " = Robert <unk> = \n Robert <unk> is an English film , television and theatre actor . He had a guest @-@ starring role "
)
RUNNING = "It's  well-known, isn't it?\n\tThe “cat” (2 kg) sat on Ann\u2019s mat; 3.14 times!  "
# Letters, blanks, punctuation, brackets that make special tokens, accents, apostrophes.
TEXTS = st.text(st.sampled_from("abcAB the12 \n\t.,<>|[]'\u2019-_\u00e9\u0301\u4e2d") | st.characters(), max_size=80)


def rebuilt(clean: str, attacked: AttackedText) -> str:
    """The attacked document from the clean one and the recorded changes: only the new words are taken over."""
    pieces, done = [], 0
    for change in attacked.changes[0]:
        pieces += [clean[done : change.before[0]], attacked.texts[0][slice(*change.after)]]
        done = change.before[1]
    return "".join([*pieces, clean[done:]])


@given(text=TEXTS, seed=st.integers())
def test_a_rate_of_zero_returns_the_text_bit_for_bit(text: str, seed: int) -> None:
    for attack in (swap_words, misspell):
        attacked = attack([text], rate=0.0, seed=seed)
        assert attacked.texts == (text,) and attacked.realised == 0 and attacked.flags == ()


@pytest.mark.filterwarnings("ignore::holdfast.attacks.AttackWarning")
@given(text=TEXTS, rate=st.floats(0, 1), seed=st.integers())
def test_nothing_but_the_recorded_words_changes(text: str, rate: float, seed: int) -> None:
    for attack in (swap_words, misspell):
        attacked = attack(text, rate=rate, seed=seed)
        assert rebuilt(text, attacked) == attacked.texts[0]
        assert len(attacked.changes[0]) <= attacked.words[0]
        assert re.findall(r"\s+", attacked.texts[0]) == re.findall(r"\s+", text)


def test_every_word_that_is_no_stop_word_is_swapped_at_a_rate_of_one() -> None:
    attacked = swap_words([WIKI, RUNNING], rate=1.0)
    assert attacked.texts[0] == (" = AAA <unk> = \n AAA <unk> is an AAA AAA , AAA and AAA AAA . He had a AAA @-@ AAA AAA ")
    assert attacked.texts[1] == "It's  AAA, isn't it?\n\tThe “AAA” (AAA AAA) AAA on AAA AAA; AAA AAA!  "
    assert attacked.words == (16, 14)
    assert attacked.realised == (10 + 9) / (16 + 14)


@pytest.mark.parametrize(
    "token",
    ["<unk>", "<eos>", "</s>", "<|endoftext|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "[MASK]", "<start_of_turn>"],
)
def test_special_tokens_are_left_alone(token: str) -> None:
    assert swap_words(f"dogs {token}bark{token} loud", rate=1.0).texts == (f"AAA {token}AAA{token} AAA",)


def test_special_tokens_can_be_named() -> None:
    assert swap_words("dogs ##END## bark", rate=1.0).texts == ("AAA ##AAA## AAA",)
    assert swap_words("dogs ##END## bark", rate=1.0, special=["##END##"]).texts == ("AAA ##END## AAA",)


def test_a_word_that_is_the_token_already_does_not_count_as_swapped() -> None:
    attacked = swap_words("AAA bark", rate=1.0)
    assert attacked.texts == ("AAA AAA",) and attacked.realised == 0.5


def test_a_document_is_attacked_alike_whatever_stands_around_it() -> None:
    documents = [f"red dogs number{n} bark at green trees" for n in range(20)]
    together = swap_words(documents, rate=0.5, seed=3)
    assert len(set(together.changes)) > 5
    assert swap_words(documents[::-1], rate=0.5, seed=3).texts == together.texts[::-1]
    assert swap_words(documents[7], rate=0.5, seed=3).texts == (together.texts[7],)


def test_keys_decide_the_random_numbers_in_place_of_the_text() -> None:
    same = ["red dogs bark at green trees"] * 12
    assert len(set(swap_words(same, rate=0.5).texts)) == 1
    keyed = swap_words(same, rate=0.5, keys=[str(n) for n in range(12)])
    assert len(set(keyed.texts)) > 3
    assert_refused(r"\b1 key.*\b12\b", swap_words, same, rate=0.5, keys=["one"])


def test_seeds_differ_and_repeat() -> None:
    text = " ".join(f"word{n}" for n in range(200))
    assert swap_words(text, rate=0.3, seed=1).checksum == swap_words(text, rate=0.3, seed=1).checksum
    assert swap_words(text, rate=0.3, seed=1).checksum != swap_words(text, rate=0.3, seed=2).checksum


@pytest.mark.slow
def test_the_hash_seed_of_python_changes_nothing() -> None:
    code = (
        "from holdfast.attacks import misspell, swap_words\n"
        "text = ' '.join(f'word{n} elephant' for n in range(300))\n"
        "print(swap_words(text, rate=0.3, seed=5).checksum, misspell(text, rate=0.3, seed=5).checksum)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "77"}, check=True, capture_output=True, text=True
    ).stdout.split()
    text = " ".join(f"word{n} elephant" for n in range(300))
    assert printed == [swap_words(text, rate=0.3, seed=5).checksum, misspell(text, rate=0.3, seed=5).checksum]


@pytest.mark.parametrize("rate", [0.025, 0.2, 0.7])
def test_the_realised_rate_is_the_rate_among_words_that_may_be_swapped(rate: float) -> None:
    """Half of the words are stop words: of all words rate / 2, give or take five standard deviations."""
    text = " ".join(f"the word{n}" for n in range(10_000))
    attacked = swap_words(text, rate=rate, seed=1)
    assert attacked.words == (20_000,)
    assert abs(attacked.realised - rate / 2) < 5 * (rate * (1 - rate) / 10_000) ** 0.5 / 2
    assert attacked.realised == attacked.texts[0].split().count("AAA") / 20_000


def test_neighbours_are_swapped_independently() -> None:
    """The share of pairs swapped together is the rate squared."""
    text = " ".join(f"word{n}" for n in range(20_000))
    mask = swap_words(text, rate=0.3, seed=2).piece_mask(0)
    both = sum(a and b for a, b in pairwise(mask)) / len(mask)
    assert abs(both - 0.09) < 0.01


def test_a_higher_rate_attacks_the_same_words_and_more() -> None:
    text = " ".join(f"word{n} elephant" for n in range(500))
    for attack in (swap_words, misspell):
        changed = [{change.before for change in attack(text, rate=rate).changes[0]} for rate in (0.1, 0.3, 0.9)]
        assert changed[0] < changed[1] < changed[2]


def test_targets_left_clean_are_told_from_swapped_ones() -> None:
    attacked = swap_words("dogs, bark <unk> at the cats!", rate=1.0)
    assert attacked.texts == ("AAA, AAA <unk> at the AAA!",)
    assert attacked.piece_mask(0) == [True, True, False, False, False, True]
    assert attacked.realised_of_pieces == 3 / 6
    # Offsets as a subword tokeniser gives them: an empty one for a special token, a word in two halves, punctuation alone.
    spans = [(0, 0), (0, 1), (1, 3), (3, 4), (4, 8), (8, 14), (22, 25), (25, 26)]
    assert attacked.is_changed(0, spans).tolist() == [False, True, True, False, True, False, True, False]


def test_a_summary_holds_the_threat_model_and_is_json() -> None:
    summary = json.loads(json.dumps(swap_words([WIKI], rate=1.0, seed=9, special=["x"]).summary()))
    assert summary["rate"] == 1.0 and summary["realised"] == 10 / 16 and summary["seed"] == 9
    assert summary["options"]["token"] == "AAA" and len(summary["checksum"]) == 64


def test_a_rate_that_changes_nothing_is_flagged() -> None:
    with pytest.warns(AttackWarning, match="nothing changed"):
        attacked = swap_words("the of and", rate=0.9)
    assert [flag.kind for flag in attacked.flags] == ["nothing changed"]


@pytest.mark.parametrize("rate", [None, -0.1, 1.5, float("nan"), "0.5", True])
def test_a_rate_that_says_nothing_is_an_error(rate: float) -> None:
    assert_refused("rate", swap_words, WIKI, rate=rate)
    with pytest.raises(TypeError, match="rate"):
        swap_words(WIKI)  # type: ignore[call-arg]


def test_a_token_with_white_space_is_an_error() -> None:
    assert_refused("space", swap_words, WIKI, rate=0.1, token="A A")


def test_words_to_draw_from_replace_the_token_and_no_word_replaces_itself() -> None:
    text = "Red green blue red. Green-blue __red__ red\u2019s " * 20
    attacked = swap_words(text, rate=1.0, words=["red", "green"])
    assert attacked.changed == 20 * 7 and attacked.options["words"] == 2
    assert re.findall("red|green", attacked.texts[0])[:2] == ["green", "red"]
    for before, after in attacked.changes[0]:
        assert attacked.texts[0][slice(*after)] in {"red", "green"} - {text[slice(*before)].lower()}
    assert swap_words(text, rate=0.5, seed=1, words=["one", "two"]) == swap_words(
        text, rate=0.5, seed=1, words=["one", "two"]
    )


def test_only_whole_pieces_are_swapped_where_pieces_are_given() -> None:
    text = "red __red__ red-green blue"
    spans = np.array([match.span() for match in re.finditer(r"\w+|[^\w\s]", text)])
    assert swap_words(text, rate=1.0, pieces=[spans]).texts == ("AAA __red__ red-green AAA",)


@pytest.mark.parametrize("words", [[], ["one"], ["One", "one"], ["one", "two words"], ["one", ""]])
def test_words_that_cannot_be_swapped_in_get_one_sentence(words: list[str]) -> None:
    assert_refused(r"2|space", swap_words, "one two", rate=0.5, words=words)


def test_words_that_may_be_drawn_have_letters_only_and_are_no_stop_words() -> None:
    assert swappable(["the", "Tree", "x", "3rd", "\u00e9t\u00e9", "tree", "tree", "__init__", "."]) == [
        "Tree",
        "tree",
        "\u00e9t\u00e9",
    ]
    assert words_in(["The well-known tree,", "a tree <unk> of Ann's"]) == ["tree"]


@pytest.mark.filterwarnings("ignore::holdfast.attacks.AttackWarning")
@given(text=TEXTS, rate=st.floats(0, 1), token=st.sampled_from(["A", "longer"]))
def test_shared_tokens_are_the_untouched_characters_in_their_order(text: str, rate: float, token: str) -> None:
    attacked = swap_words(text, rate=rate, token=token)
    spans = [np.array([(at, at + 1) for at in range(len(one))]).reshape(-1, 2) for one in (text, attacked.texts[0])]
    old, new = attacked.common_tokens(0, *spans)
    assert [text[at] for at in old] == [attacked.texts[0][at] for at in new]
    assert len(old) == len(text) - sum(end - start for (start, end), _ in attacked.changes[0])
    assert (np.diff(old) > 0).all() and (np.diff(new) > 0).all()


def test_a_token_that_is_cut_otherwise_in_the_attacked_text_is_not_shared() -> None:
    attacked = swap_words("red green, blue", rate=1.0, words=["red", "green", "blue"], stop_words=("blue",))
    before = np.array([[0, 3], [4, 9], [9, 10], [11, 15], [15, 15]])
    first, second = (len(attacked.texts[0].split()[place]) for place in (0, 1))
    comma = first + second  # the comma is the last character of the second piece
    after = np.array([[0, first], [first + 1, comma], [comma, comma + 1], [comma + 2, comma + 4], [comma + 4, comma + 6]])
    old, new = attacked.common_tokens(0, before, np.concatenate([after, [[comma + 6, comma + 6]]]))
    assert (old.tolist(), new.tolist()) == ([2, 4], [2, 5])  # the comma and the end, not "blue" in two parts
