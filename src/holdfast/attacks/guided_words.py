"""Attacks on words that a model guides: words swapped for others of similar meaning, or misspelt, where its loss rises most.

As in TextFooler (Jin et al. 2020, arXiv:1907.11932): the importance of a word is how much the loss of a text rises when the
word is deleted. From the most important word on, each is replaced by the candidate with the highest loss, if that raises
the loss, until the prediction changes or the budget is used. A text may change in floor(rate * n + u) of the n words that an
attack may change; u, from 0 to 1, is drawn once per text or passage, so that on average the share of these words is `rate`.
TextFooler also compares parts of speech, and takes neighbours from vectors trained for synonyms; neither is done here.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from holdfast.attacks.text import (
    TYPOS,
    AttackedText,
    Span,
    Spans,
    Typo,
    WordOptions,
    Words,
    attacked_texts,
    replaced,
    typos_of,
)
from holdfast.attacks.threat import Json, check_count, derived_seed
from holdfast.errors import require_known

CANDIDATES = 20  # replacements that are tried for a word
CASES = 8  # at most so many words differ from another in capital letters only
LEAST_SIMILARITY = 0.8  # the cosine of sentence embeddings below which a candidate is not used


class Version(NamedTuple):
    """A changed text, or a passage of one. The losses of words at `changed` do not count: they are not the same words."""

    text: str
    changed: tuple[Span, ...]


class Scored(NamedTuple):
    """How successful an attack is with each version of a text."""

    loss: Tensor  # (n,): the higher, the better for the attack
    succeeded: Tensor  # (n,) bool: the prediction is wrong, and the attack on this text ends


Score = Callable[[int, Sequence[Version]], Scored]  # (number of the document, versions of it or of a passage of it)
Similarity = Callable[[str, Sequence[str]], Tensor]  # (text, versions of it) -> (n,): cosines of their embeddings
Candidates = Callable[[str, Random], Sequence[str]]  # replacements of a word, the best first


class Guide(NamedTuple):
    """What an attack tries, where, and how it judges that."""

    candidates: Candidates
    score: Score
    passages: Sequence[Sequence[Span]] | None  # of each document; None: every document is one
    similarity: Similarity | None = None
    least: float = 0.0  # similarity


def synonyms(
    texts: str | Sequence[str],
    *,
    rate: float,
    score: Score,
    neighbours: Callable[[str], Sequence[str]],
    similarity: Similarity | None = None,
    least_similarity: float = LEAST_SIMILARITY,
    candidates: int = CANDIDATES,
    seed: int = 0,
    pieces: Sequence[Spans] | None = None,
    passages: Sequence[Sequence[Span]] | None = None,
    **how: Unpack[WordOptions],
) -> AttackedText:
    """Replace words by `neighbours` of theirs where that raises the loss most; all other characters are untouched.

    score        returns the loss of versions of a text, and whether the attack has succeeded
    neighbours   the replacements of a word, the nearest first: `nearest_words` makes them from vectors
    similarity   if given, replacements are used only if the text stays as similar to the original as `least_similarity`,
                 and among those that change the prediction the most similar one is used, else the first
    candidates   how many of a word's neighbours are tried
    passages     for each document, the spans of the parts that are attacked on their own, as a model reads them; None:
                 every document is one

    The other options are those of `swap_words`.
    """
    check_count(candidates, "candidates")

    def replacements(word: str, random: Random) -> Sequence[str]:
        return neighbours(word)[:candidates]

    options: dict[str, Json] = {"candidates": candidates}
    if similarity is not None:
        options["least_similarity"] = least_similarity
    guide = Guide(replacements, score, passages, similarity, least_similarity)
    return _guided(texts, "synonyms", guide, rate=rate, seed=seed, options=options, pieces=pieces, **how)


def guided_typos(
    texts: str | Sequence[str],
    *,
    rate: float,
    score: Score,
    candidates: int = CANDIDATES,
    typos: Sequence[Typo] = TYPOS,
    inner: bool = True,
    seed: int = 0,
    passages: Sequence[Sequence[Span]] | None = None,
    **how: Unpack[WordOptions],
) -> AttackedText:
    """Put one typo of `misspell` into words where it raises the loss most: `candidates` of a word's typos are tried.

    The other options are those of `synonyms` and `misspell`.
    """
    check_count(candidates, "candidates")
    for typo in typos:
        require_known("typo", typo, TYPOS)

    def replacements(word: str, random: Random) -> Sequence[str]:
        possible = sorted({new for typo, edits in typos_of(word, inner).items() if typo in typos for new in edits} - {word})
        return random.sample(possible, min(candidates, len(possible)))

    options: dict[str, Json] = {"candidates": candidates, "typos": list(typos), "inner": inner}
    guide = Guide(replacements, score, passages)
    return _guided(texts, "guided typos", guide, rate=rate, seed=seed, options=options, **how)


def _guided(texts: str | Sequence[str], attack: str, guide: Guide, *, rate: float, seed: int, **how: Any) -> AttackedText:
    """Return the texts with words replaced by the candidates that are chosen greedily."""

    def choose(number: int, text: str, key: str, words: Words, may: Collection[Span]) -> dict[Span, str]:
        replacements = dict[Span, str]()
        for start, end in [(0, len(text))] if guide.passages is None else guide.passages[number]:
            random = Random(derived_seed(seed, attack, key, start))
            possible = {
                (first - start, last - start): some
                for word, (first, last) in words
                if start <= first and last <= end and (first, last) in may
                if (some := [new for new in guide.candidates(word, random) if new != word])
            }
            most = math.floor(rate * len(possible) + random.random())
            chosen = _greedy(guide, text[start:end], number, possible, most)
            replacements |= {(first + start, last + start): new for (first, last), new in chosen.items()}
        return replacements

    return attacked_texts(texts, attack, choose, rate=rate, seed=seed, **how)


def _greedy(guide: Guide, text: str, document: int, may: Mapping[Span, Sequence[str]], most: int) -> dict[Span, str]:
    """Return at most `most` replacements, chosen word by word, from the most important word on."""
    chosen, score, similarity = dict[Span, str](), guide.score, guide.similarity
    if not most or bool(score(document, [Version(text, ())]).succeeded[0]):
        return chosen
    for span in _by_importance(text, document, list(may), score):
        if len(chosen) == most:
            break
        tried = [chosen, *({**chosen, span: new} for new in may[span])]
        # The loss of the word itself does not count before either, so that the two can be compared.
        loss, succeeded = score(document, [_version(text, {span: text[slice(*span)], **one}) for one in tried])
        usable, order = torch.ones_like(succeeded), -torch.arange(len(tried), device=loss.device).double()
        if similarity is not None:
            order = similarity(text, [replaced(text, one)[0] for one in tried]).to(loss.device).double()
            usable = order >= guide.least
        usable[0] = False
        wins = succeeded & usable
        if wins.any():
            return tried[int(order.masked_fill(~wins, -math.inf).argmax())]
        best = int(loss.masked_fill(~usable, -math.inf).argmax())
        if usable[best] and loss[best] > loss[0]:
            chosen = tried[best]
    return chosen


def _version(text: str, replacements: Mapping[Span, str]) -> Version:
    new_text, changes = replaced(text, replacements)
    return Version(new_text, tuple(change.after for change in changes))


def _by_importance(text: str, document: int, spans: list[Span], score: Score) -> list[Span]:
    """Return the spans of words, the one first whose deletion raises the loss of the other words most."""
    without = []
    for start, end in spans:
        gap = start - 1 if start and text[start - 1] == " " else start  # with the space before it
        without.append(Version(text[:gap] + text[end:], ()))
    loss, _ = score(document, [*without, *(Version(text, (span,)) for span in spans)])
    gains = loss[: len(spans)] - loss[len(spans) :]
    return [spans[place] for place in gains.argsort(descending=True, stable=True).tolist()]


def nearest_words(words: Sequence[str], vectors: Tensor, count: int = CANDIDATES) -> Callable[[str], Sequence[str]]:
    """Return a function from a word to the `count` words whose vectors (n,d) have the highest cosines with its own.

    The word itself, in capital letters or not, is none of them. An unknown word has the neighbours of its small letters, in
    its own capitals; without these it has none.
    """
    unit = torch.nn.functional.normalize(vectors.detach().float(), dim=-1)
    places = {word: place for place, word in enumerate(words)}

    @cache
    def nearest(place: int) -> list[str]:
        order = (unit @ unit[place]).topk(min(count + CASES, len(words))).indices.tolist()
        return [words[other] for other in order if words[other].lower() != words[place].lower()][:count]

    return partial(_of_any_case, lambda word: nearest(places[word]), places)


def listed_words(table: Mapping[str, Sequence[str]]) -> Callable[[str], Sequence[str]]:
    """Return a function from a word to its words in a table; the capitals are as in `nearest_words`."""

    return partial(_of_any_case, table.__getitem__, table)


def _of_any_case(find: Callable[[str], Sequence[str]], known: Collection[str], word: str) -> Sequence[str]:
    """Return the neighbours of a word, or of its small letters with the capitals of the word."""
    if word in known:
        return find(word)
    if word.lower() not in known:
        return []
    capitals = str.upper if word.isupper() and len(word) > 1 else str.capitalize if word[:1].isupper() else str
    return [capitals(new) for new in find(word.lower())]
