"""Dialogues and questions as token ids: what a vision-language model of LLaVA's structure reads.

A dialogue is written as

    USER: <image>\\nQUESTION ASSISTANT: ANSWER<end> USER: QUESTION ASSISTANT: ANSWER<end>

where the picture has one token for each of its patches, all with the same id. Labels are those of the answers and of the
ends after them; all other tokens have the label -100. A row here has one token for the picture; `batch` repeats it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from holdfast.data.questions import PICTURE, Dialogue
from holdfast.data.tokenizers import HubTokenizer, Tokenizer

USER, ASSISTANT = "USER:", "ASSISTANT:"
IGNORED = -100

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
        ids = torch.full((len(rows), width), self.pad, dtype=torch.int64, device="cpu")
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for place, row in enumerate(expanded):
            ids[place, : len(row)] = torch.tensor(row, device="cpu")
            mask[place, : len(row)] = 1
            if learned is not None:
                kept = torch.tensor(self._expand(learned[place], rows[place]), dtype=torch.bool, device="cpu")
                labels[place, : len(row)][kept] = ids[place, : len(row)][kept]
        found = {"input_ids": ids, "attention_mask": mask}
        return found if learned is None else {**found, "labels": labels}

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
