"""Tokenisers by name, and again from what a result recorded of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.data.cuts import CUTS
from holdfast.data.documents import Corpus
from holdfast.data.hub_tokenizer import HubTokenizer
from holdfast.data.tokens import Bytes, Tokenizer
from holdfast.data.vocabulary import Vocabulary
from holdfast.suggest import unknown


def tokenizers() -> dict[str, str]:
    """Names of the tokenisers, with one line each. The folder or hub name (owner/name) of a model works too."""
    return {**{name: cut.about for name, cut in CUTS.items()}, "bytes": "the bytes of UTF-8"}


def tokenizer(corpus: Corpus, name: str | Path | None = None, *, size: int | None = None) -> Tokenizer:
    """The tokeniser of this name, by default the text's usual one. Words are counted in the text's training split.

    `size` is the number of places in a vocabulary of words; by default every word has one.
    """
    name = corpus.tokenizer if name is None else str(name)
    if name in CUTS:
        if corpus.streamed:
            raise ValueError(f"{corpus.name} has no end to count words to: take a head of it first, or use bytes.")
        lines = (line for document in corpus.documents("train") for line in document.lines())
        return Vocabulary(lines, size, cut=name)
    if size is not None:
        raise ValueError(f"the size of a tokeniser can be chosen for {' and '.join(CUTS)} only, not for {name}.")
    if name == "bytes":
        return Bytes()
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ValueError(f"{name} is not a folder with a tokeniser.")
    if "/" in name or Path(name).is_dir():
        return HubTokenizer(name)
    raise ValueError(unknown("tokeniser", name, tokenizers()))


def tokenizer_from(description: Mapping[str, Any], *, folder: Path | None = None) -> Tokenizer:
    """Return the tokeniser that this describes.

    folder      where a Hugging Face tokeniser is read, whatever place is described: the description may be hostile
    """
    kind = description.get("kind")
    if kind == "bytes":
        return Bytes()
    if isinstance(kind, str) and kind in CUTS:
        return Vocabulary.from_words(description["words"], cut=str(kind))
    if kind == "hub":
        found = HubTokenizer(str(description["place"] if folder is None else folder))
        if found.checksum() != description["checksum"]:
            raise ValueError(f"the tokeniser in {found.name} is not the one that was used: its checksum differs.")
        return found
    raise ValueError(unknown("kind of tokeniser", kind, [*tokenizers(), "hub"]))
