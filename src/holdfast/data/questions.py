"""Pictures with questions about them: what a source of them is, and how a question is put to a model.

    Dialogue        what a model is trained on: one picture or none, and turns of a person and of the model
    Question        what a model is scored on: a question, its answer, and the answers to choose among
    QuestionSet     dialogues for training and validation, and sets of questions for tests
    put             a question as the text that a model reads, and the answers that are compared there

The options of a multiple-choice question are shown with letters, in an order that a seeded draw gives for each question, so
that the right letter is uniform. The options of other questions (yes and no, numbers) are not shown.

**The answer prior** is the error of the best answer that reads neither the picture nor the question, but only its kind: the
answer that is the most frequent among the test questions of this kind. A model has learned something about questions if its
error is lower, and something about pictures only if it is also lower than its own error without them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from holdfast.data.draws import Draws
from holdfast.data.files import checksum
from holdfast.data.images import ArrayImages, Images
from holdfast.errors import require_known

PICTURE = "<image>"  # where the picture stands in the text of a turn
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ASK_FOR_LETTER = "Answer with the option's letter from the given choices directly."
YES_NO = ("yes", "no")
OPTION_SEED = 0  # of the order of options
TASK = "vision-language"


@final
@dataclass(frozen=True)
class Dialogue:
    """Turns of a person and of the model; a text with `<image>` has the picture there."""

    picture: int | None  # its number among the pictures of the split
    turns: tuple[tuple[str, str], ...]


@final
@dataclass(frozen=True)
class Question:
    """A question with its answer."""

    picture: int | None
    text: str
    answer: str  # one of `options`, if there are any
    options: tuple[str, ...] = ()  # the answers to choose among; (): any text
    kind: str = "all"  # the group that it is counted in
    lettered: bool = False  # show the options with letters
    ask: str = ""  # what follows the options
    reworded: str = ""  # the same question in other words; "": none is known


@final
@dataclass(frozen=True)
class Put:
    """A question as a model reads it."""

    text: str  # with `<image>`
    answer: str
    options: tuple[str, ...]  # texts of answers that are compared: letters, if the options have some


def put(question: Question, number: int) -> Put:
    """Return a question as a model reads it; `number` is its place in its set, which decides the order of its options."""
    text, answer, options = question.text, question.answer, question.options
    if question.lettered:
        letters = LETTERS[: len(options)]
        shown = shuffled_options(options, number)
        lines = [f"{letter}. {option}" for letter, option in zip(letters, shown, strict=True)]
        text = "\n".join(filter(None, (text, *lines, question.ask)))
        answer, options = letters[shown.index(answer)], tuple(letters)
    text = text.replace(PICTURE, "").strip()  # a question or an option may have the mark, and the picture stands once
    return Put(text if question.picture is None else f"{PICTURE}\n{text}", answer, options)


def shuffled_options(options: Sequence[str], number: int) -> list[str]:
    """Return the options in the order of a draw (Fisher and Yates)."""
    found, draws = list(options), Draws(OPTION_SEED, number)
    for last in range(len(found) - 1, 0, -1):
        other = draws.below(last + 1)
        found[last], found[other] = found[other], found[last]
    return found


def prior_error(questions: Sequence[Question]) -> float:
    """Return the error in percent of the answer prior: of the most frequent answer, as `put`, of each kind."""
    answers: dict[str, Counter[str]] = {}
    for number, question in enumerate(questions):
        answers.setdefault(question.kind, Counter())[put(question, number).answer] += 1
    right = sum(max(counts.values()) for counts in answers.values())
    return 100 * (1 - right / len(questions))


@final
@dataclass(frozen=True)
class Dialogues:
    """A split for training or validation."""

    pictures: Images
    dialogues: Sequence[Dialogue]
    # (N,G,G,2) int64 of drawn scenes: the shape and the colour in each cell of a grid over each picture, 0 for nothing
    cells: Tensor | None = None
    captions: Sequence[Dialogue] = ()  # of drawn scenes: what is in each cell, in words


@final
@dataclass(frozen=True)
class Questions:
    """A set of questions to score a model on."""

    pictures: Images
    questions: Sequence[Question]


@final
@dataclass(frozen=True)
class QuestionSet:
    """Pictures with questions: dialogues in the splits train and valid, and sets of questions for tests.

    tests       "test" is the main one; the others have names of their own
    shifts      names of tests that differ on purpose from the training data
    """

    name: str
    about: str
    splits: Mapping[str, Dialogues]
    tests: Mapping[str, Questions]
    checksum: str
    shifts: tuple[str, ...] = ()
    described: Mapping[str, str] = field(default_factory=dict)  # checksums of tests from other places

    def dialogues(self, split: str) -> Dialogues:
        require_known("split", split, self.splits)
        return self.splits[split]

    def with_tests(self, tests: Mapping[str, tuple[Questions, str]]) -> "QuestionSet":
        """Return the same set with further tests, each with its checksum; the first is the main one if there is none."""
        found, described = dict(self.tests), dict(self.described)
        for name, (questions, digest) in tests.items():
            place = name if "test" in found else "test"
            if place in found:
                raise ValueError(f"two sets of questions are called {place}; rename one of the files or folders.")
            found[place], described[name] = questions, digest
        return replace(self, tests=found, described=described)

    def describe(self) -> dict[str, Any]:
        """Return what a result records of its questions."""
        further = {"tests": dict(self.described)} if self.described else {}
        return {"name": self.name, "about": self.about, "checksum": self.checksum, **further}


def as_dialogues(questions: Sequence[Question]) -> list[Dialogue]:
    """Return questions as dialogues of one turn, to train on."""
    asked = (put(question, number) for number, question in enumerate(questions))
    return [Dialogue(one.picture, ((each.text, each.answer),)) for one, each in zip(questions, asked, strict=True)]


def set_checksum(splits: Mapping[str, tuple[Images, Sequence[Question]]]) -> str:
    """Return the checksum of pictures in memory and of the questions about them."""
    parts = []
    for name, (pictures, questions) in splits.items():
        assert isinstance(pictures, ArrayImages)
        parts += [name.encode(), pictures.values.numpy().tobytes()]
        parts += [repr((one.picture, one.text, one.answer, one.options)).encode() for one in questions]
    return checksum(parts)


def cell_targets(cells: Tensor, side: int) -> Tensor:
    """Return (N,side*side,2): what is in the cell that the centre of each of side x side patches is in."""
    along = (torch.arange(side) * 2 + 1) * cells.shape[1] // (2 * side)
    return cells[:, along][:, :, along].flatten(1, 2)
