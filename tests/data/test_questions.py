"""Drawn scenes with questions, questions on CIFAR-10, and how a question is put to a model."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from wording import assert_refused

from holdfast.data import Question, QuestionSet, question_set
from holdfast.data.draws import Draws
from holdfast.data.questions import cell_targets, prior_error, put
from holdfast.data.scenes import COLOURS, HELD_OUT, KINDS, SHAPES, SHIFT, Thing, draw, draw_set, scene


@pytest.fixture(scope="module")
def scenes() -> QuestionSet:
    return draw_set(count=600)


def answer_of(things: list[Thing], question: Question) -> str:
    """Return the answer that is read from the objects of a scene and the words of the question alone."""
    words = question.text.split()
    shapes = {"crosses": "cross", **{f"{shape}s": shape for shape in SHAPES}, **{shape: shape for shape in SHAPES}}
    named = [shapes[word] for word in words if word in shapes]
    colours = [word for word in words if word in COLOURS]
    fitting = [one for one in things if (not named or one.shape == named[0]) and (not colours or one.colour == colours[0])]
    if question.kind == "yes/no":
        return "yes" if fitting else "no"
    if question.kind == "count":
        return str(len(fitting))
    if question.kind in ("colour", "shape"):
        (found,) = fitting
        return found.colour if question.kind == "colour" else found.shape
    if question.kind == "place":
        (found,) = fitting
        return f"{'top' if found.row == 0 else 'bottom'} {'left' if found.column == 0 else 'right'}"
    (one,), (other,) = ([thing for thing in things if thing.shape == name] for name in named)
    is_true = {
        "left": one.column < other.column,
        "right": one.column > other.column,
        "above": one.row < other.row,
        "below": one.row > other.row,
    }
    return "yes" if next(is_true[word] for word in words if word in is_true) else "no"


@pytest.mark.parametrize("held_out", [False, True])
def test_every_answer_is_what_the_objects_of_the_scene_say(held_out: bool) -> None:
    for number in range(600):
        things, question = scene(3, 1, number, held_out=held_out)
        assert question.answer == answer_of(things, question), (question, things)
        assert len({(one.row, one.column) for one in things}) == len(things)
        assert question.answer in question.options and len(set(question.options)) == len(question.options)


def test_a_reworded_question_has_the_same_words_in_another_order_and_the_same_answer() -> None:
    for number in range(60):
        things, question = scene(3, 1, number)
        assert question.reworded != question.text
        assert sorted(question.reworded.split()) == sorted(question.text.split())
        assert answer_of(things, replace(question, text=question.reworded)) == question.answer


def test_no_training_scene_and_no_training_question_has_a_held_out_combination() -> None:
    for number in range(600):
        things, question = scene(0, 0, number)
        assert not {(one.shape, one.colour) for one in things} & set(HELD_OUT)
        assert not any(f"{colour} {shape}" in question.text for shape, colour in HELD_OUT)


def test_every_question_of_the_shift_is_about_a_held_out_combination(scenes: QuestionSet) -> None:
    for number in range(300):
        things, question = scene(0, 3, number, held_out=True)
        is_named = any(f"{colour} {shape}" in question.text for shape, colour in HELD_OUT)
        is_shown = bool({(one.shape, one.colour) for one in things} & set(HELD_OUT))
        assert is_named or is_shown or (question.kind == "count" and question.answer == "0")
    assert scenes.shifts == (SHIFT,)


def test_a_patch_shows_the_colour_of_the_object_in_its_cell(scenes: QuestionSet) -> None:
    """A triangle leaves much of its cell free, so the brightest point is compared."""
    part = scenes.dialogues("train")
    assert part.cells is not None
    pixels = part.pictures.pixels(range(60))
    patches = pixels.unfold(2, 12, 12).unfold(3, 12, 12)  # (N,3,3,3,12,12)
    brightness = patches.mean(1).flatten(3).amax(-1)
    occupied = part.cells[:60, :, :, 0] > 0
    assert brightness[occupied].min() > brightness[~occupied].median()
    things, _ = scene(0, 0, 5)
    picture = draw(things, Draws(1), 36).astype(float)
    for one in things:
        middle = picture[:, one.row * 12 + 5 : one.row * 12 + 8, one.column * 12 + 5 : one.column * 12 + 8].mean((1, 2))
        near = {name: np.linalg.norm(middle / middle.max() - np.array(rgb) / max(rgb)) for name, rgb in COLOURS.items()}
        assert min(near, key=lambda name: near[name]) == one.colour


def test_patches_smaller_than_a_cell_have_what_is_in_the_cell() -> None:
    cells = torch.arange(16).view(1, 4, 4, 1).expand(1, 4, 4, 2)
    assert cell_targets(cells, 4)[0, :, 0].tolist() == list(range(16))
    fine = cell_targets(cells, 8)[0, :, 0].view(8, 8)
    assert fine[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and fine[:, 7].tolist() == [3, 3, 7, 7, 11, 11, 15, 15]


def test_scenes_depend_on_the_seed_only_and_those_of_tests_not_on_their_number(scenes: QuestionSet) -> None:
    again, more = draw_set(count=600), draw_set(count=30)
    assert again.checksum == scenes.checksum != more.checksum
    for one, other in ((scenes, again), (scenes, more)):
        assert torch.equal(one.tests["test"].pictures.pixels(range(9)), other.tests["test"].pictures.pixels(range(9)))
    assert draw_set(count=1, size=48).tests["test"].pictures.shape == (3, 48, 48)
    assert_refused("data.size is 8", draw_set, size=8)


def test_answers_are_balanced_so_that_the_prior_is_low(scenes: QuestionSet) -> None:
    for test in scenes.tests.values():
        assert Counter(one.kind for one in test.questions) == dict.fromkeys(KINDS, 200)
    test = scenes.tests["test"]
    # Two kinds with two answers, two with four, one with five and one with six: 100 (1 - (1 + 1/2 + 1/5 + 1/6) / 6) = 68.9.
    assert 62 < prior_error(test.questions) < 68.9


def test_the_prior_is_the_most_frequent_answer_of_each_kind() -> None:
    answers = [("a", "yes"), ("a", "yes"), ("a", "no"), ("b", "no")]
    questions = [Question(0, "?", answer, ("yes", "no"), kind) for kind, answer in answers]
    assert prior_error(questions) == 25  # three of four


def test_options_are_shuffled_by_a_draw_and_the_letter_follows_the_answer() -> None:
    question = Question(0, "which ?", "dog", ("cat", "dog", "cow", "hen"), lettered=True)
    letters = Counter[str]()
    for number in range(400):
        asked = put(question, number)
        shown = dict(line.split(". ") for line in asked.text.split("\n")[2:6])
        assert set(shown.values()) == set(question.options) and shown[asked.answer] == "dog"
        assert asked.options == ("A", "B", "C", "D") and asked == put(question, number)
        letters[asked.answer] += 1
    assert set(letters) == set("ABCD") and max(letters.values()) < 130
    plain = put(Question(None, "is it ?", "yes", ("yes", "no")), 0)
    assert plain.text == "is it ?" and plain.options == ("yes", "no")  # without a picture and without letters


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, None])
def test_a_question_has_its_picture_once_whatever_its_text_and_options_say(number: int | None) -> None:
    asked = Question(number, "see <image>", "the <image>", ("the <image>", "b"), lettered=True)
    text = put(asked, 0).text
    assert text.count("<image>") == (number is not None) and text.startswith("<image>\nsee" if number == 0 else "see")


@pytest.mark.slow
def test_questions_on_photographs_are_about_the_class_of_the_photograph(shared: Path) -> None:
    if not (shared / "cifar10").is_dir():
        pytest.skip("there is no cifar10 in ../shared/data")
    found = question_set("cifar10-questions", folder=shared)
    test = found.tests["test"]
    from holdfast.data import load_cifar10

    images = load_cifar10(shared).images("test")
    classes = load_cifar10(shared).classes
    for one in test.questions[:2000]:
        name = next(name for name in classes if f" {name} " in one.text)
        assert (one.answer == "yes") == (classes[int(images.labels[one.picture])] == name)
    share = sum(one.answer == "yes" for one in test.questions) / len(test.questions)
    assert abs(share - 0.5) < 0.02 and abs(prior_error(test.questions) - 50) < 2
    assert [len(found.dialogues(split).dialogues) for split in ("train", "valid")] == [45_000, 5_000]


def test_a_source_that_does_not_exist_is_refused_with_one_sentence(tmp_path: Path) -> None:
    assert_refused("did you mean 'scenes'", question_set, "scene")
    assert_refused("is a set of images", question_set, "cifar10", folder=tmp_path)
    assert_refused("cifar10 is not in", question_set, "cifar10-questions", folder=tmp_path)
    assert_refused("data.pictures", question_set, "cifar10-questions", count=3)
