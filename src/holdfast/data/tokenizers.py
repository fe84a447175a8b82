"""What a model reads: numbers for the pieces of a text, and back. One interface; bytes are the simplest case.

Word level: numbers for the most frequent words.

Any tokeniser of Hugging Face, from a folder or the hub.

Tokenisers by name, and again from what a result recorded of them.
"""

import itertools
import json
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.data.documents import CUTS, END, UNKNOWN, Corpus, Cut, Document
from holdfast.data.files import checksum
from holdfast.errors import unknown

Spans = npt.NDArray[np.int64]  # (T,2) characters, [start, end)


class Tokenizer(ABC):
    """Numbers for the pieces of a text. `describe` is JSON from which `tokenizer_from` builds the same one again."""

    name: str
    end: int | None = None  # the number of the token that ends a document or a line

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """(T,) int64."""

    @abstractmethod
    def decode(self, ids: Iterable[int] | Tensor) -> str: ...

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...

    @abstractmethod
    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        """The tokens of the documents with what stands between them, piece by piece, in a small integer type."""

    @abstractmethod
    def spans(self, document: Document, *, first: bool) -> Spans:
        """(T,2): the characters of each token that `pieces` gives for the document, empty for what stands between documents.

        Whether it is the first of them matters to a tokeniser that puts something in between.
        """

    def stream(self, documents: Iterable[Document], limit: int | None = None) -> Tensor:
        """All documents as one sequence, or its first `limit` tokens: no further document is read. A small integer type."""
        kept, count = [], 0
        for piece in self.pieces(documents):
            kept.append(piece)
            count += len(piece)
            if limit is not None and count >= limit:
                break
        tokens = kept[0] if len(kept) == 1 else torch.cat(kept) if kept else torch.empty(0, dtype=torch.uint8)
        return tokens if limit is None else tokens[:limit]


@final
class Bytes(Tokenizer):
    """The 256 bytes of UTF-8. Documents are joined by a newline, so a text that is one document is left as it is."""

    name = "bytes"

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> Tensor:
        return _tensor(text.encode()).long()

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        return bytes(numbers(ids)).decode("utf-8", "replace")  # a cut may fall into the middle of a character

    def describe(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        for place, document in enumerate(documents):
            if place:
                yield _tensor(b"\n")
            yield _tensor(document.data)

    def spans(self, document: Document, *, first: bool) -> Spans:
        data = np.frombuffer(document.data, dtype=np.uint8)
        character = np.cumsum((data & 0xC0) != 0x80) - 1  # all bytes of a character but its first begin with the bits 10
        spans = np.stack([character, character + 1], axis=1)
        return spans if first else np.concatenate([np.zeros((1, 2), dtype=np.int64), spans])


def numbers(ids: Iterable[int] | Tensor) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


SPECIAL = (UNKNOWN, END)


@final
class Vocabulary(Tokenizer):
    """The most frequent words of the texts, ties by alphabet. All others are one unknown word, number 0; the end is 1."""

    end = SPECIAL.index(END)

    def __init__(self, texts: Iterable[str], size: int | None = None, *, cut: str = "words") -> None:
        """`size` places, the unknown word and the end among them; by default as many as there are words."""
        if size is not None and size <= len(SPECIAL):
            raise ValueError(f"a vocabulary of {size} holds no words; it needs at least {len(SPECIAL) + 1} places.")
        pieces = _cut(cut).pieces
        counts = Counter(word for text in texts for word in pieces(_lines(text)))
        for special in SPECIAL:
            del counts[special]
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self._fill([*SPECIAL, *(ranked if size is None else ranked[: size - len(SPECIAL)])], cut)

    @classmethod
    def from_words(cls, words: Iterable[str], *, cut: str) -> "Vocabulary":
        """The vocabulary with exactly these words, the special ones first."""
        vocabulary = cls((), cut=cut)
        vocabulary._fill(list(words), cut)
        if not all(isinstance(word, str) for word in vocabulary.words):
            raise ValueError("a vocabulary holds words and nothing else; this one is damaged.")
        if vocabulary.words[: len(SPECIAL)] != list(SPECIAL) or len(vocabulary._numbers) != len(vocabulary):
            raise ValueError(f"a vocabulary begins with {' and '.join(SPECIAL)} and has no word twice; this one is damaged.")
        return vocabulary

    def _fill(self, words: list[str], cut: str) -> None:
        self.name = cut
        self.words = words
        self._cut = _cut(cut)
        self._numbers = {word: number for number, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Tensor:
        """A piece of a text: with the `<eos>` of lines, without the one that ends a document."""
        return self._encode(self._cut.pieces(_lines(text))).long()

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """The words with a space between and a newline for every end. What was unknown stays unknown."""
        words = ["\n" if number == self.end else f"{self.words[number]} " for number in numbers(ids)]
        return "".join(words).replace(" \n", "\n").removesuffix(" ")

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "words": self.words}

    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        for document in documents:
            yield self._encode(itertools.chain(self._cut.pieces(document.lines()), self._cut.ends()))

    def spans(self, document: Document, *, first: bool) -> Spans:
        return np.array(list(self._cut.spans(document.lines())), dtype=np.int64).reshape(-1, 2)

    def _encode(self, words: Iterable[str]) -> Tensor:
        found = array("i", (self._numbers.get(word, 0) for word in words))  # a list would take eight times the room
        return torch.from_numpy(np.array(found, dtype=np.int32))


def _cut(name: str) -> Cut:
    if name not in CUTS:
        raise ValueError(unknown("convention for words", name, CUTS))
    return CUTS[name]


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines


def is_bare(tokenizer: Any) -> bool:
    """Has it special tokens only? Of several families transformers makes one where there are no files at all."""
    special = getattr(tokenizer, "all_special_ids", None)
    return special is not None and len(tokenizer) <= len(special)


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn what a tokeniser raises into one sentence. A panic of its Rust part is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error


@final
class HubTokenizer(Tokenizer):
    """A tokeniser that belongs to a model. Documents end with its end-of-text token, where it has one."""

    def __init__(self, place: str) -> None:
        from transformers import AutoTokenizer

        from holdfast.hub.folder_files import require_own_files

        local = Path(place).is_dir()
        if local:
            require_own_files(Path(place))
        with _failures(f"{place} holds no tokeniser that transformers can read"):
            # A tokeniser with code of its own is refused: data is not run. A folder fetches nothing.
            self.tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=local)
        if is_bare(self.tokenizer):
            raise ValueError(f"{place} holds no tokeniser: transformers made one without a single word.")
        self.name = place
        self.end = self.tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str) -> Tensor:
        found = self._encode(text)
        with _failures(self._failed):
            return torch.tensor(found, dtype=torch.int64)

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        with _failures(self._failed):
            text: str = self.tokenizer.decode(numbers(ids), clean_up_tokenization_spaces=False)
        return text

    def describe(self) -> dict[str, Any]:
        return {"kind": "hub", "place": self.name, "checksum": self.checksum()}

    def checksum(self) -> str:
        """Of what it does: two folders with the same tokeniser have the same."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        state = fast.to_str() if fast is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return checksum([state.encode()])

    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        end = [] if self.end is None else [self.end]
        for document in documents:
            found = self._encode(document.text)
            with _failures(self._failed):  # a number may be too large
                piece = torch.tensor([*found, *end], dtype=torch.int32)
            yield piece

    def spans(self, document: Document, *, first: bool) -> Spans:
        if not self.tokenizer.is_fast:
            raise ValueError(f"{self.name} has a slow tokeniser, which does not say where its tokens are in a text.")
        text = document.text
        with _failures(self._failed):
            found = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        end = [] if self.end is None else [(len(text), len(text))]
        return np.array([*found["offset_mapping"], *end], dtype=np.int64).reshape(-1, 2)

    def _encode(self, text: str) -> list[int]:
        with _failures(self._failed):
            found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    @property
    def _failed(self) -> str:
        return f"the tokeniser of {self.name} failed on a text"


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
