"""What a model reads: numbers for the pieces of a text, and back. One interface; bytes are the simplest case."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.data.documents import Document

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
