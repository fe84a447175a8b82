"""Attacks on words that losses guide: against all replacements, within the budget, and with tables and vectors of words."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from wording import assert_refused

from holdfast.attacks import (
    STOP_WORDS,
    AttackedText,
    Scored,
    Version,
    attack_texts,
    find_attack,
    listed_words,
    nearest_words,
    synonyms,
    words_in,
)
from holdfast.attacks.text import words_of
from holdfast.train.text_guides import read_synonyms

NEAR = {"good": ["fine", "decent"], "great": ["big", "large"], "happy": ["content", "pleased"], "movie": ["film", "picture"]}
TEXTS = ["a good movie and a great , happy ending", "the movie was not good", "nothing here", "great movie , great end !"]


def near() -> Any:
    """The neighbours, as a function that the registry calls when they are needed."""
    return listed_words(NEAR)


class Bag:
    """A loss that is a sum over words, and has succeeded above a threshold. It counts the versions that it scores."""

    def __init__(self, seed: int = 0, threshold: float = math.inf, positive: Sequence[str] = tuple(NEAR)) -> None:
        self.random, self.weights, self.threshold, self.scored = Random(seed), dict[str, float](), threshold, 0
        # The more a word matters, the more its replacements raise the loss, so that greedy choices are the best ones.
        for word in positive:
            value = self.random.random()
            others = NEAR.get(word, [])
            self.weights |= {word: -value, **{new: value * (place + 1) for place, new in enumerate(others)}}

    def loss(self, text: str) -> float:
        return sum(self.weights.get(word, 0.0) for word, _ in words_of(text))

    def __call__(self, document: int, versions: Sequence[Version]) -> Scored:
        self.scored += len(versions)
        found = torch.tensor([self.loss(version.text) for version in versions], dtype=torch.float64)
        return Scored(found, found > self.threshold)


def best_by_brute_force(text: str, most: int, bag: Bag) -> float:
    """The highest loss of all texts with at most `most` words replaced."""
    pieces = text.split(" ")
    ways = [[piece, *NEAR.get(piece, [])] for piece in pieces]
    tried = itertools.product(*ways)
    return max(
        bag.loss(" ".join(new)) for new in tried if sum(old != one for old, one in zip(pieces, new, strict=True)) <= most
    )


def within(attacked: AttackedText, texts: Sequence[str], rate: float) -> bool:
    """Whether no text has more changes than its budget: rate times the words that may change, rounded up."""
    counts = [sum(word in NEAR for word, _ in words_of(text)) for text in texts]
    return all(len(own) <= math.ceil(rate * count) for own, count in zip(attacked.changes, counts, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_synonyms_find_what_a_search_of_all_replacements_finds(seed: int) -> None:
    for rate in (0.25, 0.5, 1.0):
        bag = Bag(seed)
        found = attack_texts(
            find_attack("synonyms"),
            TEXTS,
            rate=rate,
            seed=seed,
            score=lambda bag=bag: bag,
            neighbours=near,
        )
        for text, new, changes in zip(TEXTS, found.texts, found.changes, strict=True):
            assert bag.loss(new) == pytest.approx(best_by_brute_force(text, len(changes), bag))
        assert within(found, TEXTS, rate) and found.changed > 0
    assert found.changed == 9 and found.realised == 9 / sum(found.words)  # all that may change, at rate 1


def test_the_budget_is_the_rate_on_average_and_never_more_than_the_next_whole_number() -> None:
    texts = [f"good number{n} movie" for n in range(400)]
    found = synonyms(texts, rate=0.3, score=Bag(), neighbours=listed_words(NEAR), seed=1)
    assert within(found, texts, 0.3) and 0.26 < found.changed / 800 < 0.34
    more = synonyms(texts, rate=0.5, score=Bag(), neighbours=listed_words(NEAR), seed=1)
    assert all(set(few) <= set(many) for few, many in zip(found.changes, more.changes, strict=True))
    assert synonyms(texts, rate=0.3, score=Bag(), neighbours=listed_words(NEAR), seed=1) == found
    assert synonyms(texts, rate=0.3, score=Bag(), neighbours=listed_words(NEAR), seed=2) != found


def test_an_attack_ends_where_the_prediction_changes_and_leaves_wrong_ones_alone() -> None:
    bag = Bag(3)
    bag.threshold = bag.loss(TEXTS[0]) + 1e-9  # any replacement succeeds
    found = synonyms([TEXTS[0], "good", "fine great big"], rate=1.0, score=bag, neighbours=listed_words(NEAR))
    wrong = bag.loss("fine great big") > bag.threshold
    assert len(found.changes[0]) == 1 and wrong and found.changes[2] == ()


def test_of_replacements_that_succeed_the_most_similar_text_is_used() -> None:
    bag = Bag(0)
    bag.threshold = bag.loss("great day") + 1e-9

    def similarity(text: str, versions: Sequence[str]) -> torch.Tensor:
        return torch.tensor([{"great": 1.0, "big": 0.85, "large": 0.9}[version.split()[0]] for version in versions])

    how: dict[str, Any] = {"rate": 1.0, "score": bag, "neighbours": listed_words(NEAR)}
    assert synonyms("great day", **how).texts == ("big day",)  # the first, which is the nearest
    assert synonyms("great day", **how, similarity=similarity).texts == ("large day",)
    with pytest.warns(UserWarning, match="nothing changed"):
        synonyms("great day", **how, similarity=similarity, least_similarity=0.95)


def test_passages_are_attacked_on_their_own_and_put_together_again() -> None:
    text = "good movie. great movie."
    cuts = [(0, 11), (11, len(text))]
    seen = list[str]()

    def score(document: int, versions: Sequence[Version]) -> Scored:
        seen.extend(version.text for version in versions)
        return Bag()(document, versions)

    how: dict[str, Any] = {"rate": 1.0, "seed": 0, "neighbours": near}
    whole = attack_texts(find_attack("synonyms"), [text], score=lambda: Bag(), passages=None, **how)
    parts = attack_texts(find_attack("synonyms"), [text], score=lambda: score, passages=lambda: [cuts], **how)
    assert parts == whole and parts.changed == 4 and not any("good" in one and "great" in one for one in seen)


def test_words_keep_their_capitals_and_stop_words_stay() -> None:
    find = listed_words({**NEAR, "the": ["a"]})
    assert find("Good") == ["Fine", "Decent"] and find("GREAT") == ["BIG", "LARGE"] and find("unknown") == []
    found = synonyms("The good , THE good", rate=1.0, score=Bag(), neighbours=find)
    assert found.texts == ("The decent , THE decent",) and "the" in STOP_WORDS


def test_nearest_words_have_the_highest_cosines() -> None:
    generator = torch.Generator().manual_seed(0)
    words = [f"word{letter}" for letter in "abcdefghij"] + ["Worda"]
    vectors = torch.randn(len(words), 5, generator=generator)
    find = nearest_words(words, vectors, 3)
    for place, word in enumerate(words):
        cosines = torch.cosine_similarity(vectors, vectors[place : place + 1], dim=-1)
        ranked = [words[n] for n in cosines.argsort(descending=True).tolist() if words[n].lower() != word.lower()]
        assert find(word) == ranked[:3]
    assert find("WORDB") == [word.upper() for word in find("wordb")] and find("other") == []


def test_guided_typos_are_typos_that_raise_the_loss_most() -> None:
    text = "wonderful acting and dreadful music"

    def score(document: int, versions: Sequence[Version]) -> Scored:
        """Every word that is not as written costs its length."""
        known = {word for word, _ in words_of(text)}
        lost = [float(sum(len(word) for word, _ in words_of(one.text) if word not in known)) for one in versions]
        return Scored(torch.tensor(lost), torch.zeros(len(lost), dtype=torch.bool))

    attacked = attack_texts(find_attack("guided-typos"), [text], rate=1.0, seed=0, score=lambda: score)
    assert attacked.changed == 4 and words_in([text]) != words_in(attacked.texts)
    longest = [word for word in attacked.texts[0].split() if word not in text.split()]
    assert [len(word) for word in longest] == [10, 7, 9, 6]  # a doubled letter costs most


def test_tables_of_synonyms_are_read_from_json_and_from_lines(tmp_path: Path) -> None:
    lines, js = tmp_path / "table.tsv", tmp_path / "table.json"
    lines.write_text("good\tfine\tdecent\nalone\nbig\tlarge\n")
    js.write_text('{"good": ["fine", "decent"], "big": ["large"], "alone": []}')
    for path in (lines, js):
        find = read_synonyms(path)
        assert (find("good"), find("Big"), find("alone")) == (["fine", "decent"], ["Large"], [])
    for content, said in (("good", "no synonyms"), ("good\tvery fine", "not one word")):
        lines.write_text(content)
        assert_refused(said, read_synonyms, lines)
    for content, said in (("[1]", "an object from words"), ('{"a": [1]}', "not one word"), ("{", "JSON")):
        js.write_text(content)
        assert_refused(said, read_synonyms, js)


def test_a_comparison_refuses_an_attack_that_reads_its_model() -> None:
    from holdfast.train import load_recipe

    assert_refused("holdfast attack MODEL synonyms", load_recipe, "tiny", {"attack.name": "synonyms"})
