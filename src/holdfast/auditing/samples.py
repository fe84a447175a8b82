"""What a model is audited on: texts cut into sequences, or batches that are there already, one at a time."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.attacks.text import Spans
from holdfast.auditing.subject import Audited
from holdfast.data import Document, Tokenizer, Vocabulary
from holdfast.data.hub_tokenizer import is_bare
from holdfast.metrics.likelihood import IGNORED


@final
@dataclass(frozen=True)
class Sample:
    """One batch. `labels` are what is to be predicted at each place, already shifted; -100 where nothing is."""

    number: int
    inputs: dict[str, Tensor]
    labels: Tensor | None
    texts: tuple[str, ...] | None = None
    spans: tuple[Spans, ...] | None = None  # of each text's tokens

    @property
    def ids(self) -> Tensor | None:
        return self.inputs.get("input_ids")

    @property
    def size(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def tokens(self) -> int:
        """Real ones; pictures have none that could be counted here."""
        mask = self.inputs.get("attention_mask")
        return int(mask.sum()) if mask is not None else 0 if self.ids is None else self.ids.numel()

    def digest(self, into: Any) -> None:
        for name, tensor in sorted(self.inputs.items()):
            into.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            into.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


@final
class Reader:
    """A tokeniser, of Hugging Face or of ours, as far as an audit needs one: numbers with their places in the text."""

    def __init__(self, tokenizer: Any, pad: int = 0) -> None:
        if not isinstance(tokenizer, Tokenizer) and not callable(tokenizer):
            raise ValueError(f"a {type(tokenizer).__name__} is no tokenizer; take that of the model, AutoTokenizer's.")
        if is_bare(tokenizer):
            raise ValueError("the tokenizer knows special tokens and no words: its files were not where it was loaded from.")
        self.tokenizer, self.ours = tokenizer, isinstance(tokenizer, Tokenizer)
        own = None if self.ours else getattr(tokenizer, "pad_token_id", None)
        self.pad = pad if own is None else int(own)

    @property
    def has_spans(self) -> bool:
        if self.ours:
            inner = getattr(self.tokenizer, "tokenizer", None)
            return inner is None or bool(inner.is_fast)
        return bool(getattr(self.tokenizer, "is_fast", False))

    def encode(self, text: str) -> tuple[list[int], Spans | None]:
        if self.ours:
            document = Document("text", text.encode("utf-8", "replace"))
            ids = [int(number) for piece in self.tokenizer.pieces([document]) for number in piece]
            return ids, self.tokenizer.spans(document, first=True) if self.has_spans else None
        found = self.tokenizer(text, verbose=False, **({"return_offsets_mapping": True} if self.has_spans else {}))
        spans = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2) if self.has_spans else None
        return list(found["input_ids"]), spans

    def knows(self, word: str) -> bool:
        """Whether the word has tokens of its own, and is not the unknown word."""
        inner = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        unknown = 0 if isinstance(inner, Vocabulary) else getattr(inner, "unk_token_id", None)
        ids = self.tokenizer.encode(word).tolist() if self.ours else inner(word, add_special_tokens=False)["input_ids"]
        return unknown not in ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def batch(self, number: int, texts: Sequence[str], length: int | None) -> Sample:
        """Texts as one batch, padded on the right; what goes beyond `length` tokens is left out."""
        read = [self.encode(text) for text in texts]
        rows = [torch.tensor(ids[:length], dtype=torch.int64) for ids, _ in read]
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        spans = None if not self.has_spans else tuple(found[:length] for _, found in read if found is not None)
        return Sample(number, {"input_ids": ids, "attention_mask": mask}, next_tokens(ids, mask), tuple(texts), spans)

    def pieces(self, text: str, length: int) -> Iterator[str]:
        """A text as texts of at most about `length` tokens, cut between tokens."""
        ids, spans = self.encode(text)
        if spans is None or len(ids) <= length:
            yield text
            return
        places = spans[spans[:, 0] < spans[:, 1]]  # without what the tokeniser adds
        for start in range(0, len(places), length):
            part = places[start : start + length]
            piece = text[int(part[0, 0]) : int(part[-1, 1])]
            if piece.strip():
                yield piece


def next_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """(B,N): at each place the token that follows; -100 at the end and where either is padding."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]
    if mask is not None:
        real = mask.bool()
        labels[:, :-1] = labels[:, :-1].masked_fill(~(real[:, 1:] & real[:, :-1]), IGNORED)
    return labels


def from_texts(texts: Iterable[str], reader: Reader, *, batch: int, length: int) -> Iterator[Sample]:
    """Batches of texts; a text that is too long is cut into several, an empty one is passed over."""
    waiting: list[str] = []
    number = 0
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"among the texts is a {type(text).__name__}; give strings only, or batches only.")
        for piece in reader.pieces(text, length) if text.strip() else ():
            waiting.append(piece)
            if len(waiting) == batch:
                yield reader.batch(number, waiting, length)
                waiting, number = [], number + 1
    if waiting:
        yield reader.batch(number, waiting, length)


def from_batches(batches: Iterable[Any], audited: Audited) -> Iterator[Sample]:
    """Dicts for the model's forward; their labels are taken out and scored here, so that nothing else enters the loss."""
    for number, given in enumerate(batches):
        if not isinstance(given, Mapping):
            raise ValueError(f"batch {number} is a {type(given).__name__}; expected a dict for the model's forward.")
        tensors = {str(name): tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        labels, shifted = tensors.pop("labels", None), tensors.pop("shift_labels", None)
        ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
        if not tensors or not len(next(iter(tensors.values()))):
            raise ValueError(f"batch {number} is empty; expected input_ids or pixel_values.")
        if ids is not None and audited.predicts_next and shifted is None:
            shifted = next_tokens(ids if labels is None else labels, None if mask is None or mask.dim() != 2 else mask)
        yield Sample(number, tensors, labels if shifted is None else shifted)


def check_size(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least {least}.")


def samples(
    given: Iterable[Any], audited: Audited, reader: Reader | None, *, batch: int, length: int, tokens: int | None
) -> Iterator[Sample]:
    """Whatever was given, as samples, until there are so many tokens."""
    check_size("batch", batch)
    check_size("length", length, 2)  # one token has no next one
    check_size("tokens", 1 if tokens is None else tokens)
    if isinstance(given, str | Mapping):
        raise ValueError(f"the texts or inputs are one {type(given).__name__}; give a list of strings or of batches.")
    everything = iter(given)
    first = next(everything, None)
    if first is None:
        raise ValueError("there is nothing to audit the model on: no text, no batch.")
    rest = chain([first], everything)
    if isinstance(first, str):
        if reader is None:
            raise ValueError("texts need the model's tokenizer: audit(model, texts, tokenizer=...).")
        found = from_texts(rest, reader, batch=batch, length=length)
    else:
        found = from_batches(rest, audited)
    seen = 0
    for sample in found:
        yield sample
        seen += sample.tokens
        if tokens is not None and seen >= tokens:
            return
    if seen == 0 and isinstance(first, str):
        raise ValueError("there is nothing to audit the model on: every text is empty.")


@final
class Checksum:
    """SHA-256 of everything that was seen."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, sample: Sample) -> None:
        sample.digest(self._digest)

    def __str__(self) -> str:
        return str(self._digest.hexdigest())
