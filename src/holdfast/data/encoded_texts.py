"""Texts as models read them: blocks of one long sequence of tokens, texts and pairs of texts, dialogues about pictures.

A language model reads blocks (`Blocks`), in which every token is predicted exactly once.

T = tokens of the sequence, B = blocks of a batch, L = tokens of a block.

A classifier reads texts and pairs (`PairEncoder`): token ids, cut to a length, padded on the right in batches. Tokenisers of
Hugging Face encode a text or a pair with their special tokens and token types. The other tokenisers have none: the two texts
of a pair are separated by the end token of a vocabulary, or by a newline between bytes. Too long pairs lose tokens of the
longer text first, as in transformers (`longest_first`).

A vision-language model of LLaVA's structure reads dialogues and questions (`QuestionEncoder`), written as

    USER: <image>\\nQUESTION ASSISTANT: ANSWER<end> USER: QUESTION ASSISTANT: ANSWER<end>

where the picture has one token for each of its patches, all with the same id. Labels are those of the answers and of the
ends after them; all other tokens have the label -100. A row here has one token for the picture; `batch` repeats it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from holdfast.data.documents import Document
from holdfast.data.questions import PICTURE, Dialogue
from holdfast.data.tokenizers import HubTokenizer, Tokenizer, Vocabulary, failures

IGNORED = -100  # the label that cross entropy skips
NEWLINE = 10  # the byte


@final
@dataclass(frozen=True)
class Batch:
    """The inputs of a model and its target at each place: the next token, already shifted."""

    inputs: Tensor  # (B,L) int64
    labels: Tensor  # (B,L) int64, for cross entropy: `shift_labels` in Hugging Face, where `labels` are not yet shifted
    mask: Tensor  # (B,L) bool, False for padding


@final
class Blocks:
    """Blocks that do not overlap. Block i reads tokens iL to iL+L-1 and predicts the token after each of them.

    So every token but the first of the sequence is predicted once. The last block is padded with 0.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        if len(tokens) < 2:
            raise ValueError(f"a sequence of {len(tokens)} tokens has nothing to predict; it needs at least 2.")
        self.tokens, self.length = tokens, length

    @property
    def scored(self) -> int:
        """The number of tokens that are predicted: the sum of all masks."""
        return len(self.tokens) - 1

    @property
    def whole(self) -> int:
        """The number of blocks without padding; they come first."""
        return self.scored // self.length

    def __len__(self) -> int:
        return -(-self.scored // self.length)

    def batch(self, numbers: Iterable[int] | Tensor) -> Batch:
        """Return the blocks of these numbers as a batch."""
        chosen = numbers if isinstance(numbers, Tensor) else torch.tensor(list(numbers), dtype=torch.int64)
        place = chosen[:, None] * self.length + torch.arange(self.length + 1)
        mask = place[:, 1:] <= self.scored
        found = self.tokens[place.clamp_max(self.scored)].long()
        return Batch(found[:, :-1].masked_fill(~mask, 0), found[:, 1:].masked_fill(~mask, IGNORED), mask)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all blocks in order, for an evaluation; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))


@final
@dataclass(frozen=True)
class EncodedTexts:
    """The tokens of many texts, one after the other."""

    tokens: Tensor  # (T,) int32
    types: Tensor | None  # (T,) uint8: 0 for tokens of the first text of a pair, 1 for those of the second
    ends: Tensor  # (n,) int64: where each text ends; on the CPU, also where a model is built on another device
    pad: int

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Tensor:
        """(n,) int64: the number of tokens of each text."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))

    def batch(self, numbers: Sequence[int] | Tensor, width: int | None = None) -> dict[str, Tensor]:
        """Return some texts as inputs of a model, padded to `width` tokens, by default to the longest of them."""
        chosen = torch.as_tensor(numbers, dtype=torch.int64, device="cpu")
        lengths = self.lengths[chosen]
        columns = torch.arange(int(lengths.max()) if width is None else width, device="cpu")
        mask = columns < lengths.unsqueeze(1)
        places = torch.where(mask, (self.ends[chosen] - lengths).unsqueeze(1) + columns, 0)
        found = {"input_ids": torch.where(mask, self.tokens[places].long(), self.pad), "attention_mask": mask.long()}
        if self.types is not None:
            found["token_type_ids"] = torch.where(mask, self.types[places].long(), 0)
        return found


@final
class PairEncoder:
    """Encodes texts and pairs with a tokeniser of `data.tokenizers`.

    length  most tokens of a text or pair, with special tokens
    types   whether the model reads token types
    """

    is_fast = True  # it gives the places of tokens in a text; with `__call__`, an audit uses it like one of transformers

    def __init__(self, tokenizer: Tokenizer, length: int, *, pad: int, types: bool = False) -> None:
        self.tokens, self.length, self.pad, self.types = tokenizer, length, pad, types
        self.pad_token_id = pad

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> EncodedTexts:
        """Return the tokens of all texts, or of all pairs."""
        types: list[list[int]] | None = None
        if isinstance(self.tokens, HubTokenizer):
            with failures(f"the tokeniser of {self.tokens.name} failed on a text"):
                encoded = self.tokens.tokenizer(
                    list(texts),
                    None if pairs is None else list(pairs),
                    truncation=True,
                    max_length=self.length,
                    return_token_type_ids=self.types,
                    verbose=False,
                )
            rows: list[list[int]] = encoded["input_ids"]
            if not all(rows):
                raise ValueError(f"the tokeniser of {self.tokens.name} makes no tokens from {texts[rows.index([])]!r}.")
            types = encoded["token_type_ids"] if self.types else None
        else:
            seconds = [None] * len(texts) if pairs is None else [self.tokens.ids(pair) for pair in pairs]
            rows = [self._joined(self.tokens.ids(text), second) for text, second in zip(texts, seconds, strict=True)]
        ends = torch.from_numpy(np.cumsum([len(row) for row in rows], dtype=np.int64))
        return EncodedTexts(_flat(rows, torch.int32), None if types is None else _flat(types, torch.uint8), ends, self.pad)

    def _joined(self, first: list[int], second: list[int] | None, length: int | None = None) -> list[int]:
        """Return the tokens of a text, or of a pair with a separator, cut to the length."""
        most = self.length if length is None else min(length, self.length)
        end = self.tokens.end
        first = _without_end(first, end)
        if second is None:
            return first[:most]
        second = _without_end(second, end)
        room = most - 1
        while len(first) + len(second) > room:
            surplus = len(first) + len(second) - room
            longer = first if len(first) > len(second) else second
            del longer[-min(surplus, max(1, abs(len(first) - len(second)))) :]
        return [*first, NEWLINE if end is None else end, *second]

    def __call__(self, text: str, pair: str | None = None, **options: Any) -> dict[str, Any]:
        """Return the token ids of one text or pair, as a tokeniser of transformers does, with spans and `sequence_ids`.

        `sequence_ids` are 0 for tokens of the first text and 1 for those of the second; the separator has None.
        Of the `options` of transformers' tokenisers, only `max_length` has an effect: there are no special tokens.
        """
        numbers: list[int | None]
        first, second = self.tokens.ids(text), None if pair is None else self.tokens.ids(pair)
        row = self._joined(first, second, options.get("max_length"))
        count = min(len(first), len(row))  # `first` and `second` lost what was cut from a pair
        spans, numbers = self._spans(text, count), [0] * count
        if pair is not None and second is not None:
            spans += [(0, 0), *self._spans(pair, len(second))]
            numbers += [None, *[1] * len(second)]
        return {"input_ids": row, "offset_mapping": spans, "sequence_ids": numbers}

    def _spans(self, text: str, count: int) -> list[tuple[int, int]]:
        """Return the characters of the first `count` tokens of a text; the ends of a text are not tokens here."""
        (found,) = self.tokens.spans([Document("text", text.encode("utf-8", "replace"))])
        found = found[found[:, 0] < found[:, 1]] if isinstance(self.tokens, Vocabulary) else found
        spans = [(start, end) for start, end in found[:count].tolist()]
        return spans + [(0, 0)] * (count - len(spans))

    @property
    def unk_token_id(self) -> int | None:
        return 0 if isinstance(self.tokens, Vocabulary) else None

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokens.decode(list(ids))


def _without_end(tokens: list[int], end: int | None) -> list[int]:
    """Remove the end tokens after a text, in place: a vocabulary of lines puts one after every line."""
    while tokens and tokens[-1] == end:
        tokens.pop()
    return tokens


def _flat(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    joined = np.fromiter((number for row in rows for number in row), dtype=np.int64)
    return torch.from_numpy(joined).to(dtype)


USER, ASSISTANT = "USER:", "ASSISTANT:"

Row = list[int]  # token ids, with one for the picture
Value = TypeVar("Value")


@final
@dataclass(frozen=True)
class QuestionEncoder:
    """Encodes dialogues.

    end         the token after an answer
    picture     the token id of the picture
    patches     how many tokens a picture has
    pad         the token that rows are filled up with
    """

    tokenizer: Tokenizer
    end: int
    picture: int
    patches: int
    pad: int

    def question(self, text: str, *, first: bool = True) -> Row:
        """Return the tokens up to the place of the answer; `first` in a dialogue."""
        before, mark, after = text.partition(PICTURE)
        row = self._start() if first else []
        row += self._ids(f"{USER} {before}".strip())
        row += [self.picture] if mark else []
        return row + self._ids(f"{after}\n{ASSISTANT}" if mark else f"\n{ASSISTANT}")

    def answer(self, text: str) -> Row:
        """Return the tokens of an answer, as they follow `ASSISTANT:`, without the end."""
        stem, whole = self._ids(ASSISTANT), self._ids(f"{ASSISTANT} {text}")
        if whole[: len(stem)] != stem or len(whole) == len(stem):
            raise ValueError(f"the tokeniser {self.tokenizer.name} makes no tokens of its own from the answer {text!r}.")
        return whole[len(stem) :]

    def dialogue(self, dialogue: Dialogue, length: int | None = None) -> tuple[Row, list[bool]]:
        """Return the tokens of a dialogue, cut to a length, and which of them are to be learned."""
        row, learned = Row(), list[bool]()
        for number, (text, answer) in enumerate(dialogue.turns):
            asked, said = self.question(text, first=number == 0), [*self.answer(answer), self.end]
            row += [*asked, *said]
            learned += [False] * len(asked) + [True] * len(said)
        return row[:length], learned[:length]

    def batch(
        self, rows: Sequence[Row], width: int | None = None, learned: Sequence[list[bool]] | None = None
    ) -> dict[str, Tensor]:
        """Return rows as inputs of a model, padded on the right to `width` tokens, with `labels` if some are learned."""
        expanded = [self._expand(row, row) for row in rows]
        width = max(map(len, expanded)) if width is None else width

        def padded(values: Sequence[Row], fill: int) -> Tensor:
            return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], device="cpu")

        found = {"input_ids": padded(expanded, self.pad), "attention_mask": padded([[1] * len(row) for row in expanded], 0)}
        if learned is None:
            return found
        kept = [self._expand(one, row) for one, row in zip(learned, rows, strict=True)]
        pairs = zip(expanded, kept, strict=True)
        labels = [[token if own else IGNORED for token, own in zip(row, one, strict=True)] for row, one in pairs]
        return {**found, "labels": padded(labels, IGNORED)}

    def width(self, row: Row) -> int:
        """Return the number of tokens of a row with all those of its picture."""
        return len(row) + (self.patches - 1) * row.count(self.picture)

    def decode(self, row: Row) -> str:
        return self.tokenizer.decode(row)

    def _expand(self, values: list[Value], row: Row) -> list[Value]:
        """Return the values of the tokens of a row, with that of the picture once for each of its patches."""
        if self.picture not in row:
            return values
        place = row.index(self.picture)
        return [*values[:place], *[values[place]] * self.patches, *values[place + 1 :]]

    def _ids(self, text: str) -> Row:
        """Return the tokens of a text: without ends, as a vocabulary of lines ends each line, and without pictures."""
        return [number for number in self.tokenizer.ids(text) if number not in (self.end, self.picture)]

    def _start(self) -> Row:
        """Return the token that begins a text, if the tokeniser puts one there."""
        if not isinstance(self.tokenizer, HubTokenizer):
            return []
        own, first = self.tokenizer.tokenizer, self.tokenizer.tokenizer.bos_token_id
        return [first] if first is not None and own("a")["input_ids"][:1] == [first] else []
