"""Any tokeniser of Hugging Face, from a folder or the hub."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.checksum import checksum
from holdfast.data.documents import Document
from holdfast.data.tokens import Spans, Tokenizer, numbers


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

        from holdfast.hub.folder_checks import require_own_files

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
