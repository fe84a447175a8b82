"""The batches of an audit: from texts, from labelled texts (for models that classify them), or from a model's inputs.

Data are read one batch at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from holdfast.attacks.text import Spans
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, TextEncoder, check_size, next_tokens
from holdfast.data import LabelledText
from holdfast.data.labelled_texts import flat_texts


def audit_batches(
    given: Iterable[Any], audited: AuditedModel, encoder: TextEncoder | None, *, batch: int, length: int, tokens: int | None
) -> Iterator[AuditBatch]:
    """Yield batches of the given texts or inputs until there are `tokens` tokens."""
    check_size("batch", batch)
    check_size("length", length, 2)  # one token has no next one
    check_size("tokens", 1 if tokens is None else tokens)
    if isinstance(given, str | Mapping):
        raise ValueError(f"the texts or inputs are one {type(given).__name__}; give a list of strings or a list of batches.")
    everything = iter(given)
    first = next(everything, None)
    if first is None:
        raise ValueError("there are no data: give at least one text or batch.")
    rest = chain([first], everything)
    if isinstance(first, str):
        if encoder is None:
            raise ValueError("texts need the model's tokenizer: audit(model, texts, tokenizer=...).")
        found = from_texts(rest, encoder, batch=batch, length=length)
    elif isinstance(first, LabelledText):
        if encoder is None or encoder.is_holdfast:
            raise ValueError("labelled texts need the model's tokenizer: audit(model, texts, tokenizer=...).")
        found = from_labelled(rest, audited, encoder, batch=batch, length=length)
    else:
        found = from_batches(rest, audited)
    seen = 0
    for sample in found:
        yield sample
        seen += sample.tokens
        if tokens is not None and seen >= tokens:
            return
    if seen == 0 and isinstance(first, str):
        raise ValueError("there are no data: every text is empty.")


def from_texts(texts: Iterable[str], encoder: TextEncoder, *, batch: int, length: int) -> Iterator[AuditBatch]:
    """Yield batches of texts; long texts are cut into several sequences, empty ones are skipped."""
    waiting: list[str] = []
    number = 0
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"one of the texts is a {type(text).__name__}; give strings only, or batches only.")
        for piece in encoder.pieces(text, length) if text.strip() else ():
            waiting.append(piece)
            if len(waiting) == batch:
                yield encoder.batch(number, waiting, length)
                waiting, number = [], number + 1
    if waiting:
        yield encoder.batch(number, waiting, length)


def from_batches(batches: Iterable[Any], audited: AuditedModel) -> Iterator[AuditBatch]:
    """Yield batches from dicts for the model's forward. Labels are removed and scored here, without router losses."""
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
        yield AuditBatch(number, tensors, labels if shifted is None else shifted)


def from_labelled(
    examples: Iterable[LabelledText], audited: AuditedModel, encoder: TextEncoder, *, batch: int, length: int
) -> Iterator[AuditBatch]:
    """Yield batches of labelled texts or pairs."""
    for number, some in enumerate(batched(examples, batch)):
        wrong = next((one for one in some if not isinstance(one, LabelledText)), None)
        if wrong is not None:
            raise ValueError(f"one of the labelled texts is a {type(wrong).__name__}; give LabelledText only.")
        yield labelled_batch(encoder, number, some, length, classes=audited.classes)


def batched(things: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` things; the last one may be shorter."""
    rest = iter(things)
    while some := list(islice(rest, size)):
        yield some


def labelled_batch(
    encoder: TextEncoder, number: int, examples: Sequence[LabelledText], length: int | None, *, classes: int
) -> AuditBatch:
    """Return labelled texts or pairs as one batch, encoded and cut as a classifier reads them.

    The texts of the batch are those of `flat_texts`: the second texts of pairs follow. `classes` is 0 if the model does not
    classify: then labels are not scored.
    """
    cut = {} if length is None else {"truncation": True, "max_length": length}
    spans: list[Spans] = []
    spans_of_second: list[Spans] = []
    rows, types = [], []
    for one in examples:
        found = encoder.tokenizer(one.text, one.pair, verbose=False, return_offsets_mapping=encoder.has_spans, **cut)
        rows.append(torch.tensor(found["input_ids"], dtype=torch.int64))
        types.append(torch.tensor(found.get("token_type_ids", [0] * len(rows[-1])), dtype=torch.int64))
        if encoder.has_spans:
            of_pair = _in_second_text(found, len(rows[-1]))[:, None]
            offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
            spans.append(offsets * ~of_pair)
            if one.pair is not None:
                spans_of_second.append(offsets * of_pair)
    ids = pad_sequence(rows, batch_first=True, padding_value=encoder.pad)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if any(one.pair is not None for one in examples) and "token_type_ids" in found:
        inputs["token_type_ids"] = pad_sequence(types, batch_first=True)
    labels = torch.tensor([int(one.label) for one in examples]) if classes else None
    spans += spans_of_second
    return AuditBatch(number, inputs, labels, tuple(flat_texts(examples)), tuple(spans) or None, tuple(examples))


def _in_second_text(found: Any, count: int) -> Any:
    """Return (T,) bool: which tokens of an encoded pair belong to its second text."""
    numbers = found.sequence_ids(0) if hasattr(found, "sequence_ids") else found.get("sequence_ids", [0] * count)
    return np.array([number == 1 for number in numbers], dtype=bool)
