"""The answers of a vision-language model to questions: by likelihood and by generation.

likelihood  the option o with the largest sum_j log p(o_j | picture, question, o_1 ... o_{j-1}) over its tokens, as log
            p is in float32. The sum is not divided by the number of tokens. If an option begins with another one, such as
            "top" and "top left", the end token is a token of each option of the question: without it the shorter one
            would always have the larger sum. Options that have the same first tokens share a row, so that options of one
            token, such as letters, cost one row for a question
generation  greedy: the likeliest token, again and again, up to the end token or one token more than the longest option. The
            answer is the longest option that the text begins with, whatever its case; a text that begins with none is wrong

Rows of similar length are in one batch, padded on the right. No KV cache is used, so that a router which reads other tokens
routes as in training.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from holdfast.data.encoded_texts import QuestionEncoder, Row
from holdfast.data.questions import Put, Question, put
from holdfast.train.task import Inputs, forward

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65536}  # when scoring; at least one row
BELOW_ALL = 50.0  # nats: a share of e^-50 of the likelihood changes no float32
LOGITS_PER_BATCH = 2**28  # at most: 1 GiB of float32

Read = Callable[[Sequence[int], Tensor, Tensor], None]  # of numbers of rows, their logits and last places
Pictures = Callable[[Sequence[int]], Tensor]  # from numbers of pictures to pixels as the model reads them


@final
@dataclass(frozen=True)
class Asked:
    """A question as token ids."""

    picture: int | None
    put: Put
    row: Row
    options: list[Row]

    @property
    def right(self) -> int:
        return self.put.options.index(self.put.answer)


def encode(questions: Sequence[Question], encoder: QuestionEncoder, numbers: Sequence[int] | None = None) -> list[Asked]:
    """Return questions as token ids; `numbers` are their places in their set, which decide the order of their options."""
    found = []
    for number, question in zip(range(len(questions)) if numbers is None else numbers, questions, strict=True):
        asked = put(question, number)
        found.append(Asked(question.picture, asked, encoder.question(asked.text), _option_rows(asked, encoder)))
    return found


def _option_rows(asked: Put, encoder: QuestionEncoder) -> list[Row]:
    """Return the tokens of the options of a question; raise ValueError if two of them have the same."""
    rows = [encoder.answer(option) for option in asked.options]
    first: dict[tuple[int, ...], str] = {}
    for row, option in zip(rows, asked.options, strict=True):
        same = first.setdefault(tuple(row), option)
        if same != option:
            raise ValueError(
                f"the tokeniser {encoder.tokenizer.name} makes the same tokens of the options {same!r} and {option!r}, "
                "so that they cannot be compared; use a model whose tokeniser knows these words."
            )
    begins = any(len(row) < len(other) and other[: len(row)] == row for row in rows for other in rows)
    return [[*row, encoder.end] for row in rows] if begins else rows


@torch.no_grad()
def log_likelihoods(model: Any, asked: Sequence[Asked], pictures: Pictures, encoder: QuestionEncoder) -> list[Tensor]:
    """Return for each question (options,): the log-likelihood of each of its options, on the CPU."""
    rows: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # the options that share each row
    for number, one in enumerate(asked):
        for place, option in enumerate(one.options):
            rows.setdefault((number, tuple(option[:-1])), []).append(place)
    keys = list(rows)
    found = [torch.zeros(len(one.options), dtype=torch.float64) for one in asked]
    whole = [[*asked[number].row, *begun] for number, begun in keys]

    def read(chosen: Sequence[int], logits: Tensor, ends: Tensor) -> None:
        for at, key in enumerate(chosen):
            number, begun = keys[key]
            last = int(ends[at])
            scored = logits[at, last - len(begun) : last + 1].float().log_softmax(-1)
            for place in rows[keys[key]]:
                option = torch.tensor(asked[number].options[place], device=scored.device)
                found[number][place] = scored.gather(1, option[:, None]).double().sum().cpu()

    _run(model, whole, [asked[number].picture for number, _ in keys], pictures, encoder, read)
    return found


def option_scores(
    model: Any, asked: Sequence[Asked], scaling: Callable[[Tensor], Tensor], encoder: QuestionEncoder
) -> Callable[[Tensor], Tensor]:
    """Return the function from pixels (questions,C,H,W), between 0 and 1, to (questions,options), for attacks on pixels.

    It returns the log-likelihoods of the options, with gradients. Questions with fewer options than others are filled up
    with scores that are `BELOW_ALL` below those of their own options, so that these are never chosen. All questions have a
    picture.
    """
    most = max(len(one.options) for one in asked)
    rows: dict[tuple[int, tuple[int, ...]], int] = {}  # the row of a question with the tokens before the last of an option
    places = []  # of each token of each option: its row, its place there, its id, and its option among all
    for number, one in enumerate(asked):
        for place, option in enumerate(one.options):
            row = rows.setdefault((number, tuple(option[:-1])), len(rows))
            before = encoder.width(one.row) - 1
            places += [(row, before + at, token, number * most + place) for at, token in enumerate(option)]
    inputs = encoder.batch([[*asked[number].row, *begun] for number, begun in rows])
    owners = torch.tensor([number for number, _ in rows])
    row, at, token, option = torch.tensor(places).T
    missing = torch.tensor([[place >= len(one.options) for place in range(most)] for one in asked])

    def scores(pixels: Tensor) -> Tensor:
        if len(pixels) != len(asked):
            raise ValueError(f"there are {len(pixels)} pictures for {len(asked)} questions; ask all questions at once.")
        device = pixels.device
        shown = scaling(pixels)[owners.to(device)]
        logits = forward(model, {**inputs, "pixel_values": shown}).logits[row.to(device), at.to(device)]
        each = logits.float().log_softmax(-1).gather(1, token.to(device).unsqueeze(1)).squeeze(1)
        found = each.new_zeros(len(asked) * most).index_add(0, option.to(device), each).view(len(asked), most)
        none = missing.to(device)
        lowest = found.detach().amin(1, keepdim=True) - BELOW_ALL  # the sum of no token is 0, the highest
        return torch.where(none, lowest, found)

    return scores


@torch.no_grad()
def generate(model: Any, asked: Sequence[Asked], pictures: Pictures, encoder: QuestionEncoder) -> list[Row]:
    """Return the tokens of greedy answers, each without the end."""
    most = [1 + max(map(len, one.options), default=1) for one in asked]
    found: list[Row] = [[] for _ in asked]
    going = list(range(len(asked)))
    while going:
        following: dict[int, int] = {}

        def read(chosen: Sequence[int], logits: Tensor, ends: Tensor) -> None:
            last = logits[torch.arange(len(chosen)), ends]
            last[:, encoder.picture] = -math.inf  # a new token of a picture would have none
            best = last.argmax(-1).tolist()
            following.update({going[key]: token for key, token in zip(chosen, best, strict=True)})  # noqa: B023

        whole = [[*asked[number].row, *found[number]] for number in going]
        _run(model, whole, [asked[number].picture for number in going], pictures, encoder, read)
        for number, token in following.items():
            if token != encoder.end:
                found[number].append(token)
        going = [number for number in going if following[number] != encoder.end and len(found[number]) < most[number]]
    return found


def chosen_option(text: str, options: Sequence[str]) -> int | None:
    """Return the longest option that a generated text begins with as whole words; None if there is none."""
    fitting = [
        place for place, option in enumerate(options) if re.match(rf"\s*{re.escape(option)}(?!\w)", text, re.IGNORECASE)
    ]
    return max(fitting, key=lambda place: len(options[place]), default=None)


def chosen_by_likelihood(likelihoods: Sequence[Tensor]) -> Tensor:
    """Return (questions,): the number of the option that is chosen, the first of equal ones; -1 if one is NaN."""
    return torch.tensor([-1 if bool(scores.isnan().any()) else int(scores.argmax()) for scores in likelihoods])


def wrong_by_likelihood(likelihoods: Sequence[Tensor], asked: Sequence[Asked]) -> Tensor:
    """Return (questions,) bool: which answers are wrong; one that is not known (`chosen_by_likelihood`) is."""
    return chosen_by_likelihood(likelihoods) != right_options(asked)


def right_options(asked: Sequence[Asked]) -> Tensor:
    """Return (questions,): the number of the right option."""
    return torch.tensor([one.right for one in asked])


def wrong_by_generation(answers: Sequence[Row], asked: Sequence[Asked], encoder: QuestionEncoder) -> Tensor:
    """Return (questions,) bool: which generated answers are wrong."""
    pairs = zip(answers, asked, strict=True)
    return torch.tensor([chosen_option(encoder.decode(answer), one.put.options) != one.right for answer, one in pairs])


def _run(
    model: Any, rows: Sequence[Row], shown: Sequence[int | None], pictures: Pictures, encoder: QuestionEncoder, read: Read
) -> None:
    """Run the model on rows with their pictures; call `read` with the numbers of rows, their logits and last places."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    budget = min(TOKENS_PER_BATCH.get(model.device.type, TOKENS_PER_BATCH["cpu"]), LOGITS_PER_BATCH // vocabulary)
    widths = [encoder.width(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: (-widths[number], number))
    start = 0
    while start < len(order):
        chosen = order[start : start + max(1, budget // widths[order[start]])]
        inputs = encoder.batch([rows[number] for number in chosen])
        ends = inputs["attention_mask"].sum(1) - 1
        logits = forward(model, with_pictures(inputs, [shown[number] for number in chosen], pictures)).logits
        read(chosen, logits, ends)
        start += len(chosen)


def with_pictures(inputs: Inputs, shown: Sequence[int | None], pictures: Pictures) -> Inputs:
    """Return inputs with the pictures of the rows that have one, in the order of the rows."""
    numbers = [number for number in shown if number is not None]
    return {**inputs, "pixel_values": pictures(numbers)} if numbers else inputs
