"""Word swap: words are replaced by a generic token that means nothing, or by other words."""

from collections.abc import Collection, Iterable, Sequence
from random import Random

from holdfast.attacks.stop_words import STOP_WORDS
from holdfast.attacks.text import AttackedText, Spans, change_words, words_of

GENERIC = "AAA"  # the papers' token


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
    """Replace each word of the raw text that is no stop word with probability `rate`; the rest stays bit for bit.

    By default every replacement is `token`: the attack of ACMoE (Nielsen et al. 2025), SymphonySMoE and Mutual-Inform SMoE
    on WikiText-103. Their generator swaps at least one word a line and realises about 2.0% of the tokens for a nominal
    2.5%; here nothing is forced and `realised` says what happened. Works on tokenised text (WikiText) and on running text,
    and never inside special tokens.

    To a model whose vocabulary lacks `token`, it is the unknown word, which is easy to predict: the attacked text then
    scores better than the clean one. `words` avoids this.

    texts       documents, or one document; each is attacked on its own
    words       draw each replacement from these words, all equally likely, instead of `token`; never the word itself
    pieces      for each document the spans of a tokeniser: only words that are exactly one piece are swapped, so that a
                text keeps its number of pieces
    special     further tokens to leave alone, beyond `<unk>`, `</s>`, `<|endoftext|>`, `[MASK]` and the like
    keys        names of the documents, which then decide their random numbers. By default the text itself does, so the
                same text is attacked the same way wherever it stands
    """
    for word in [token] if words is None else words:
        if not word or any(character.isspace() for character in word):
            what = "token is" if words is None else "words hold"
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
    """Return the words that a swap may draw from: of two letters or more and nothing else, no stop words, each once."""
    return sorted({word for word in words if len(word) > 1 and word.isalpha() and word.lower() not in STOP_WORDS})


def words_in(texts: Iterable[str]) -> list[str]:
    """Return what `swappable` finds among the words of texts."""
    return swappable(word.text for text in texts for word in words_of(text))
