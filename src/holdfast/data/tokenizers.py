"""Tokenisers: numbers for the pieces of a text, and back.

    Bytes          the 256 bytes of UTF-8
    Vocabulary     the most frequent words of a text, split by a convention of `documents`
    HubTokenizer   any tokeniser of Hugging Face, from a folder or the hub

`tokenizer` returns one by its name, `tokenizer_from` from what a result recorded of it.
"""

import itertools
import json
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.data.documents import END, UNKNOWN, WORD, WORD_SPLITTERS, Corpus, Document
from holdfast.data.files import checksum
from holdfast.errors import unknown_name

BATCH_DOCUMENTS, BATCH_BYTES = 1024, 2**20  # of documents that are encoded at once

Spans = npt.NDArray[np.int64]  # (T,2) characters, [start, end)


class Tokenizer(ABC):
    """Numbers for the pieces of a text (abstract). `tokenizer_from` builds the same one from the JSON of `describe`."""

    name: str
    end: int | None = None  # the token that ends a document or a line

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, (T,) int64."""
        return torch.tensor(self.ids(text), dtype=torch.int64)

    @abstractmethod
    def decode(self, ids: Iterable[int] | Tensor) -> str: ...

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...

    @abstractmethod
    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        """Yield the tokens of the documents with those between them, in parts, in a small integer type."""

    @abstractmethod
    def spans(self, documents: Iterable[Document]) -> Iterator[Spans]:
        """Yield (T,2) for each document: the characters of its tokens in `pieces`, empty for ends and joints."""

    def stream_with_spans(self, documents: Sequence[Document]) -> tuple[Tensor, list[Spans]]:
        """Return what `stream` and `spans` return, with one encoding of the texts where the tokeniser allows it."""
        return self.stream(documents), list(self.spans(documents))

    def stream(self, documents: Iterable[Document], limit: int | None = None) -> Tensor:
        """Return all documents as one sequence in a small integer type, or its first `limit` tokens without reading more."""
        parts, count = [], 0
        for piece in self.pieces(documents):
            parts.append(piece)
            count += len(piece)
            if limit is not None and count >= limit:
                break
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return tokens if limit is None else tokens[:limit]


@final
class Bytes(Tokenizer):
    """The 256 bytes of UTF-8. Documents are joined by a newline, so a text that is one document is unchanged."""

    name = "bytes"

    def __len__(self) -> int:
        return 256

    def ids(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        return bytes(_as_list(ids)).decode("utf-8", "replace")  # the tokens may begin or end inside a character

    def describe(self) -> dict[str, Any]:
        return {"kind": "bytes"}

    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        for place, document in enumerate(documents):
            if place:
                yield _byte_tensor(b"\n")
            yield _byte_tensor(document.data)

    def spans(self, documents: Iterable[Document]) -> Iterator[Spans]:
        for place, document in enumerate(documents):
            data = np.frombuffer(document.data, dtype=np.uint8)
            character = np.cumsum((data & 0xC0) != 0x80) - 1  # all bytes of a character but its first begin with the bits 10
            spans = np.stack([character, character + 1], axis=1)
            yield np.concatenate([np.zeros((1, 2), dtype=np.int64), spans]) if place else spans


def _as_list(ids: Iterable[int] | Tensor) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _byte_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


SPECIAL = (UNKNOWN, END)


@final
class Vocabulary(Tokenizer):
    """The most frequent words of the texts, ties in alphabetical order. All others are the unknown word, 0; the end is 1."""

    end = SPECIAL.index(END)

    def __init__(self, texts: Iterable[str], size: int | None = None, *, splitter: str = "words") -> None:
        """Count the words; `size` is their largest number with the unknown word and the end, by default all words."""
        if size is not None and size <= len(SPECIAL):
            raise ValueError(f"a vocabulary of {size} has no words; it needs a size of at least {len(SPECIAL) + 1}.")
        self.name, self._splitter = splitter, WORD_SPLITTERS[splitter]
        counts = Counter(word for text in texts for word in self._splitter.pieces(_lines(text)))
        for special in SPECIAL:
            del counts[special]
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self._number([*SPECIAL, *(ranked if size is None else ranked[: size - len(SPECIAL)])])

    @classmethod
    def from_words(cls, words: Iterable[str], *, splitter: str) -> "Vocabulary":
        """Return the vocabulary with exactly these words, the special ones first."""
        vocabulary, given = cls((), splitter=splitter), list(words)
        if not all(isinstance(word, str) for word in given):
            raise ValueError("a vocabulary is a list of words only; this one is damaged.")
        if given[: len(SPECIAL)] != list(SPECIAL) or len(set(given)) != len(given):
            raise ValueError(f"a vocabulary begins with {' and '.join(SPECIAL)} and has no word twice; this one is damaged.")
        vocabulary._number(given)
        return vocabulary

    def _number(self, words: list[str]) -> None:
        self.words, self._numbers = words, {word: number for number, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.words)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a part of a text: with the `<eos>` of lines, without the one that ends a document."""
        return list(map(self._numbers.get, self._splitter.pieces(_lines(text)), itertools.repeat(0)))

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Return the words joined by spaces, with a newline for every end; unknown words stay unknown."""
        words = ["\n" if number == self.end else f"{self.words[number]} " for number in _as_list(ids)]
        return "".join(words).replace(" \n", "\n").removesuffix(" ")

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "words": self.words}

    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        cut, number_of = self._splitter, self._numbers.get
        for batch in _batches(documents):
            words = (itertools.chain(cut.pieces(document.lines()), cut.ends()) for document in batch)
            # A list would need eight times the memory of an array.
            found = array("i", map(number_of, itertools.chain.from_iterable(words), itertools.repeat(0)))
            yield torch.from_numpy(np.array(found, dtype=np.int32))

    def spans(self, documents: Iterable[Document]) -> Iterator[Spans]:
        for document in documents:
            yield np.array(list(self._splitter.spans(document.lines())), dtype=np.int64).reshape(-1, 2)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in lists: a call for each of a million short texts takes minutes.

    The first lists are short, so that a reader of the first tokens does not wait for many documents.
    """
    batch, size, most = list[Document](), 0, 1
    for document in documents:
        batch.append(document)
        size += len(document.data)
        if len(batch) >= most or size >= BATCH_BYTES:
            yield batch
            batch, size, most = [], 0, min(2 * most, BATCH_DOCUMENTS)
    if batch:
        yield batch


def is_bare(tokenizer: Any) -> bool:
    """Return whether a tokeniser has only special tokens: transformers makes such a one from a folder without its files."""
    special = getattr(tokenizer, "all_special_ids", None)
    return special is not None and len(tokenizer) <= len(special)


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Turn what a tokeniser raises into a one-line ValueError. A panic of its Rust part is not an `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error


@final
class HubTokenizer(Tokenizer):
    """The tokeniser of a Hugging Face model. Documents end with its end-of-text token, if it has one."""

    def __init__(self, place: str) -> None:
        from transformers import AutoTokenizer

        from holdfast.hub.folder_files import require_own_files

        local = Path(place).is_dir()
        if local:
            require_own_files(Path(place))
        with failures(f"{place} has no tokeniser that transformers can read"):
            # A tokeniser with its own code is refused: data are never executed. With a folder, nothing is fetched.
            self.tokenizer: Any = AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=local)
        if is_bare(self.tokenizer):
            raise ValueError(f"{place} has no tokeniser: transformers made one without any word.")
        self.name, self.end = place, self.tokenizer.eos_token_id
        self._failed = f"the tokeniser of {place} failed on a text"

    def __len__(self) -> int:
        return len(self.tokenizer)

    def ids(self, text: str) -> list[int]:
        with failures(self._failed):
            return self._encode([text])["input_ids"][0]

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        with failures(self._failed):
            return self.tokenizer.decode(_as_list(ids), clean_up_tokenization_spaces=False)

    def describe(self) -> dict[str, Any]:
        return {"kind": "hub", "place": self.name, "checksum": self.checksum()}

    def checksum(self) -> str:
        """Return a checksum of its content: two folders with the same tokeniser have the same."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        state = fast.to_str() if fast is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return checksum([state.encode()])

    def pieces(self, documents: Iterable[Document]) -> Iterator[Tensor]:
        return (piece for _, _, piece in self._encoded(documents))

    def spans(self, documents: Iterable[Document]) -> Iterator[Spans]:
        return (own for _, spans in self._pieces_with_spans(documents) for own in spans)

    def stream_with_spans(self, documents: Sequence[Document]) -> tuple[Tensor, list[Spans]]:
        pieces, spans = zip(*self._pieces_with_spans(documents), strict=True)
        return torch.cat(pieces), list(itertools.chain.from_iterable(spans))

    def _pieces_with_spans(self, documents: Iterable[Document]) -> Iterator[tuple[Tensor, list[Spans]]]:
        """Yield the tokens of several documents, and the spans of each."""
        if not self.tokenizer.is_fast:
            raise ValueError(f"{self.name} has a slow tokeniser, which does not give the places of its tokens in a text.")
        for texts, encoded, piece in self._encoded(documents, return_offsets_mapping=True):
            ends = [[] if self.end is None else [(len(text), len(text))] for text in texts]
            rows = zip(encoded["offset_mapping"], ends, strict=True)
            yield piece, [np.array([*row, *end], dtype=np.int64).reshape(-1, 2) for row, end in rows]

    def _encoded(self, documents: Iterable[Document], **options: Any) -> Iterator[tuple[list[str], Any, Tensor]]:
        """Yield several texts, how they are encoded, and their tokens in one sequence, each with the end of a document."""
        end = [] if self.end is None else [self.end]
        for batch in _batches(documents):
            texts = [document.text for document in batch]
            with failures(self._failed):  # also a number that is too large
                encoded = self._encode(texts, **options)
                numbers = [number for row in encoded["input_ids"] for number in (*row, *end)]
                piece = torch.tensor(numbers, dtype=torch.int32)
            yield texts, encoded, piece

    def _encode(self, texts: list[str], **options: Any) -> Any:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)


def saved_tokenizer(used: Tokenizer, special: str) -> Any:
    """Return transformers' tokeniser of the same tokens; None for bytes. To words it adds the `special` token."""
    if not isinstance(used, Vocabulary):
        return used.tokenizer if isinstance(used, HubTokenizer) else None
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Words
    from transformers import PreTrainedTokenizerFast

    has_marks = used.name == "words"  # which are words of their own, and all in lower case
    found = Words(models.WordLevel({word: number for number, word in enumerate(used.words)}, UNKNOWN))
    found.normalizer = normalizers.Lowercase() if has_marks else None
    found.pre_tokenizer = pre_tokenizers.Split(Regex(WORD.pattern if has_marks else r"\S+"), "removed", invert=True)
    found.add_special_tokens([special])
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token=UNKNOWN, eos_token=END, pad_token=END)


def tokenizers() -> dict[str, str]:
    """Return the names of the tokenisers, each with one line of help. The folder or hub name of a model works too."""
    return {**{name: splitter.about for name, splitter in WORD_SPLITTERS.items()}, "bytes": "the bytes of UTF-8"}


def tokenizer(corpus: Corpus, name: str, *, size: int | None = None) -> Tokenizer:
    """Return the tokeniser of this name.

    size        of a vocabulary of words, which are counted in the training split; by default all words
    """
    if name in WORD_SPLITTERS:
        if corpus.streamed:
            raise ValueError(f"{corpus.name} is a stream, too long to count words; use bytes, or a model's tokeniser.")
        lines = (line for document in corpus.documents("train") for line in document.lines())
        return Vocabulary(lines, size, splitter=name)
    if name == "bytes":
        return Bytes()
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ValueError(f"{name} is not a folder with a tokeniser.")
    if "/" in name or Path(name).is_dir():
        return HubTokenizer(name)
    raise ValueError(unknown_name("tokeniser", name, tokenizers()))


def tokenizer_from(description: Mapping[str, Any], *, folder: Path | None = None) -> Tokenizer:
    """Return the tokeniser of a description from `Tokenizer.describe`.

    folder      where a Hugging Face tokeniser is read, instead of the described place: the description is untrusted
    """
    kind = description.get("kind")
    if kind == "bytes":
        return Bytes()
    if isinstance(kind, str) and kind in WORD_SPLITTERS:
        return Vocabulary.from_words(description["words"], splitter=str(kind))
    if kind == "hub":
        found = HubTokenizer(str(description["place"] if folder is None else folder))
        if found.checksum() != description["checksum"]:
            raise ValueError(f"the tokeniser in {found.name} is not the one that was used: its checksum differs.")
        return found
    raise ValueError(unknown_name("kind of tokeniser", kind, [*tokenizers(), "hub"]))


def token_texts(decode: Callable[[list[int]], str], ids: Sequence[int], context: int = 8) -> list[str]:
    """Return what each token adds to the decoded text: joined, they are the text, with the spaces between its words.

    Decoded alone, a token may lose the space before it. `context` tokens before it are decoded with it. A token that ends
    inside a character adds what it is decoded to alone.
    """
    found = []
    for place in range(len(ids)):
        before = list(ids[max(0, place - context) : place])
        prefix, whole = decode(before) if before else "", decode([*before, ids[place]])
        found.append(whole[len(prefix) :] if whole.startswith(prefix) else decode([ids[place]]))
    return found
