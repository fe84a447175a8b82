"""Word swap: words are replaced by a generic token that means nothing."""

from collections.abc import Collection, Sequence
from random import Random

from holdfast.attacks.stop_words import STOP_WORDS
from holdfast.attacks.text import AttackedText, change_words


def swap_words(
    texts: str | Sequence[str],
    *,
    rate: float,
    seed: int = 0,
    token: str = "AAA",
    stop_words: Collection[str] = STOP_WORDS,
    special: Collection[str] = (),
    keys: Sequence[str] | None = None,
) -> AttackedText:
    """Each word of the raw text that is no stop word becomes `token` with probability `rate`; the rest stays bit for bit.

    The attack of ACMoE (Nielsen et al. 2025), SymphonySMoE and Mutual-Inform SMoE on WikiText-103. Their generator
    swaps at least one word a line and realises about 2.0% of the tokens for a nominal 2.5%; here nothing is forced and
    `realised` says what happened. Works on tokenised text (WikiText) and on running text, and never inside special tokens.

    texts       documents, or one document; each is attacked on its own
    special     further tokens to leave alone, beyond `<unk>`, `</s>`, `<|endoftext|>`, `[MASK]` and the like
    keys        names of the documents, which then decide their random numbers. By default the text itself does, so the
                same text is attacked the same way wherever it stands
    """
    if not token or any(character.isspace() for character in token):
        raise ValueError(f"token is {token!r}; expected a word without white space: a text keeps its number of words.")

    def replace(word: str, random: Random) -> str:
        return token

    return change_words(
        texts,
        "word swap",
        replace,
        rate=rate,
        seed=seed,
        stop_words=frozenset(stop_words),
        special=special,
        keys=keys,
        options={"token": token, "stop_words": len(stop_words), "special": sorted(special)},
    )
