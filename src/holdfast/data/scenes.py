"""Drawn scenes with questions and answers: shapes of several colours on a grid, the same ones in every run.

A picture is a grid of 3 x 3 cells with two to four objects, each one of `SHAPES` in one of `COLOURS`, on a dark background
with noise. Places, sizes and brightness vary a little. There is one question for each picture, of one of these kinds:

    yes/no      is there a red circle ?                     half yes; for "no", the colour and the shape are both there
    count       how many circles are there ?                0 to 4, each as often
    colour      what is the colour of the circle ?          one of six
    shape       which shape is red ?                        multiple choice: four options with letters, shuffled
    place       where is the red circle ?                   top left, top right, bottom left, bottom right, each as often
    relation    is the circle left of the square ?          half yes; left of, right of, above, below

Each question also has other words (`Question.reworded`): the same ones in another order, so that a model knows them.

**Held-out combinations.** `HELD_OUT` has a colour for each shape. No training picture has such an object and no training
question names one. The test "held-out combinations" has them only: every question is about such an object, or its picture
has one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from holdfast.data.datasets import DATASETS, Dataset
from holdfast.data.draws import Draws
from holdfast.data.images import ArrayImages, Images
from holdfast.data.questions import (
    PICTURE,
    TASK,
    YES_NO,
    Dialogue,
    Dialogues,
    Question,
    Questions,
    QuestionSet,
    as_dialogues,
    set_checksum,
)

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 50, 50),
    "green": (50, 200, 70),
    "blue": (70, 90, 240),
    "yellow": (230, 210, 50),
    "purple": (190, 70, 210),
    "white": (225, 225, 225),
}
HELD_OUT = (("circle", "red"), ("square", "yellow"), ("triangle", "blue"), ("cross", "green"))
GRID, SIZE, SMALLEST = 3, 36, 24  # cells per side; pixels per side
TRAINING, VALIDATION, TEST = 8000, 512, 1200  # pictures
FEWEST, MOST = 2, 4  # objects
SHIFT = "held-out combinations"
KINDS = ("yes/no", "count", "colour", "shape", "place", "relation")
PLACES = ("top left", "top right", "bottom left", "bottom right")
RELATIONS: dict[str, Callable[["Thing", "Thing"], int]] = {  # above 0 if it is true, below 0 if its opposite is
    "left of": lambda one, other: other.column - one.column,
    "right of": lambda one, other: one.column - other.column,
    "above": lambda one, other: other.row - one.row,
    "below": lambda one, other: one.row - other.row,
}
ABOUT = "drawn shapes with questions about colours, counts, places and relations; made here"

Pairs = Sequence[tuple[str, str]]  # shapes with colours
Asked = tuple[str, str, str, tuple[str, ...]]  # a question, the same in other words, its answer and its options


@final
@dataclass(frozen=True)
class Thing:
    """An object of a scene."""

    shape: str
    colour: str
    row: int
    column: int


def pairs(*, held_out: bool) -> list[tuple[str, str]]:
    """Return the combinations of shape and colour that are held out, or all others."""
    every = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    return [pair for pair in every if (pair in HELD_OUT) == held_out]


@final
class _Scene:
    """A scene while it is made: objects in different cells, drawn from the allowed combinations."""

    def __init__(self, draws: Draws, allowed: Pairs) -> None:
        self.draws, self.allowed, self.things = draws, allowed, list[Thing]()

    def pick(self, some: Sequence[Any]) -> Any:
        return some[self.draws.below(len(some))]

    def pair(self, *, without_shape: Sequence[str] = (), without_colour: Sequence[str] = ()) -> tuple[str, str]:
        """Return an allowed combination."""
        shape, colour = self.pick(
            [pair for pair in self.allowed if pair[0] not in without_shape and pair[1] not in without_colour]
        )
        return shape, colour

    def add(self, pair: tuple[str, str], rows: Sequence[int] = range(GRID), columns: Sequence[int] = range(GRID)) -> Thing:
        """Put an object into a free cell of these rows and columns."""
        used = {(thing.row, thing.column) for thing in self.things}
        free = [(row, column) for row in rows for column in columns if (row, column) not in used]
        self.things.append(Thing(*pair, *self.pick(free)))
        return self.things[-1]

    def fill(self, **without: Sequence[str]) -> None:
        """Add objects up to a number that is drawn."""
        for _ in range(FEWEST + self.draws.below(MOST - FEWEST + 1) - len(self.things)):
            self.add(self.pair(**without))


def _yes_no(scene: _Scene, first: tuple[str, str]) -> Asked:
    shape, colour = first
    answer = scene.pick(YES_NO)
    if answer == "yes":
        scene.add(first)
        scene.fill()
    else:  # the shape in another colour, and the colour in another shape
        scene.add(scene.pick([pair for pair in scene.allowed if pair[0] == shape and pair[1] != colour] or scene.allowed))
        scene.add(scene.pick([pair for pair in scene.allowed if pair[1] == colour and pair[0] != shape] or scene.allowed))
        allowed = scene.allowed
        scene.allowed = [pair for pair in allowed if pair != first]
        scene.fill()
        scene.allowed = allowed
    return f"is there a {colour} {shape} ?", f"is a {colour} {shape} there ?", answer, YES_NO


def _count(scene: _Scene, first: tuple[str, str]) -> Asked:
    shape, number = first[0], scene.draws.below(5)
    for place in range(number):
        scene.add(first if place == 0 else scene.pick([pair for pair in scene.allowed if pair[0] == shape]))
    scene.fill(without_shape=[shape])
    shapes = "crosses" if shape == "cross" else f"{shape}s"
    return f"how many {shapes} are there ?", f"there are how many {shapes} ?", str(number), tuple("01234")


def _colour(scene: _Scene, first: tuple[str, str]) -> Asked:
    shape, colour = first
    scene.add(first)
    scene.fill(without_shape=[shape])
    return f"what is the colour of the {shape} ?", f"the colour of the {shape} is what ?", colour, tuple(COLOURS)


def _shape(scene: _Scene, first: tuple[str, str]) -> Asked:
    shape, colour = first
    scene.add(first)
    scene.fill(without_colour=[colour])
    return f"which shape is {colour} ?", f"{colour} is which shape ?", shape, SHAPES


def _place(scene: _Scene, first: tuple[str, str]) -> Asked:
    number = scene.draws.below(len(PLACES))
    row, column = ((GRID - 1) * half for half in divmod(number, 2))
    scene.add(first, [row], [column])
    scene.fill(without_shape=[first[0]])
    return f"where is the {first[1]} {first[0]} ?", f"the {first[1]} {first[0]} is where ?", PLACES[number], PLACES


def _relation(scene: _Scene, first: tuple[str, str]) -> Asked:
    name = scene.pick(list(RELATIONS))
    one = scene.add(first)
    pair = scene.pair(without_shape=[first[0]])
    along_rows = name in ("above", "below")
    same = one.row if along_rows else one.column
    others = [place for place in range(GRID) if place != same]
    is_before = bool(scene.draws.below(2))  # on which side, as far as there are cells on it
    side = [place for place in others if (place < same) == is_before] or others
    other = scene.add(pair, *((side, range(GRID)) if along_rows else (range(GRID), side)))
    scene.fill(without_shape=[one.shape, other.shape])
    text, reworded = (f"{begun} {name} the {other.shape} ?" for begun in (f"is the {one.shape}", f"the {one.shape} is"))
    return text, reworded, YES_NO[RELATIONS[name](one, other) < 0], YES_NO


_MAKE: dict[str, Callable[[_Scene, tuple[str, str]], Asked]] = dict(
    zip(KINDS, (_yes_no, _count, _colour, _shape, _place, _relation), strict=True)
)


def scene(*key: int, held_out: bool = False) -> tuple[list[Thing], Question]:
    """Return the objects of a scene and the question about it, which follow from a key of whole numbers.

    held_out    the question is about a held-out combination; the other objects may be any
    """
    draws = Draws(*key)
    asked, others = pairs(held_out=held_out), pairs(held_out=False) + (pairs(held_out=True) if held_out else [])
    kind = KINDS[key[-1] % len(KINDS)]
    made = _Scene(draws, others)
    text, reworded, answer, options = _MAKE[kind](made, made.pick(asked))
    return made.things, Question(0, text, answer, options, kind, lettered=kind == "shape", reworded=reworded)


def caption(number: int, cells: torch.Tensor) -> Dialogue:
    """Return the dialogue that names what is in each cell (G,G,2) of a picture, row by row."""
    names = [("no", *COLOURS), ("object", *SHAPES)]
    said = [f"{names[0][colour]} {names[1][shape]}" for shape, colour in cells.flatten(0, 1).tolist()]
    return Dialogue(number, ((f"{PICTURE}\nwhat is in each place ?", " ".join(said)),))


def draw(things: Sequence[Thing], draws: Draws, size: int = SIZE) -> npt.NDArray[np.uint8]:
    """Return (3,size,size): the picture of a scene."""
    cell = size / GRID
    grid = np.arange(size) + 0.5
    noise = draws.byte_array(3, size, size).astype(np.float64) / 255
    picture = draws.uniform(10, 60) + 16 * (noise - 0.5)
    for thing in things:
        radius = cell * draws.uniform(0.36, 0.46)
        y, x = (cell * (place + 0.5 + draws.uniform(-0.08, 0.08)) for place in (thing.row, thing.column))
        inside = _inside(thing.shape, (grid - x)[None] / radius, (grid - y)[:, None] / radius)
        picture[:, inside] = 0
        picture += inside * (np.array(COLOURS[thing.colour])[:, None, None] * draws.uniform(0.8, 1.0) + 12 * (noise - 0.5))
    return picture.clip(0, 255).astype(np.uint8)


def _inside(shape: str, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which points are inside a shape of radius 1 around 0; y grows downwards."""
    if shape == "circle":
        return x**2 + y**2 <= 1
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.85
    if shape == "triangle":
        return (abs(y) <= 0.9) & (abs(x) <= (y + 0.9) / 1.8)
    return (np.minimum(abs(x), abs(y)) <= 0.3) & (np.maximum(abs(x), abs(y)) <= 1)


def draw_set(*, size: int | None = None, count: int | None = None, seed: int = 0) -> QuestionSet:
    """Return drawn scenes with questions: `count` for training, and always the same ones for validation and tests.

    size    pixels per side
    """
    size, count = SIZE if size is None else size, TRAINING if count is None else count
    if size < SMALLEST:
        raise ValueError(f"data.size is {size}; scenes of fewer than {SMALLEST} pixels per side cannot be told apart.")
    numbers = {"train": count, "valid": VALIDATION, "test": TEST, SHIFT: TEST}
    found: dict[str, tuple[Images, list[Question]]] = {}
    cells = {}
    for part, (name, wanted) in enumerate(numbers.items()):
        pictures, questions = np.empty((wanted, 3, size, size), dtype=np.uint8), []
        cells[name] = torch.zeros(wanted, GRID, GRID, 2, dtype=torch.int64)
        for number in range(wanted):
            things, question = scene(seed, part, number, held_out=name == SHIFT)
            pictures[number] = draw(things, Draws(seed, len(numbers) + part, number), size)
            questions.append(replace(question, picture=number))
            for thing in things:
                place = torch.tensor([1 + SHAPES.index(thing.shape), 1 + list(COLOURS).index(thing.colour)])
                cells[name][number, thing.row, thing.column] = place
        found[name] = ArrayImages(torch.from_numpy(pictures), torch.zeros(wanted, dtype=torch.int64)), questions
    splits = {}
    for name in ("train", "valid"):
        captions = [caption(number, one) for number, one in enumerate(cells[name])]
        splits[name] = Dialogues(found[name][0], as_dialogues(found[name][1]), cells[name], captions)
    tests = {name: Questions(*found[name]) for name in ("test", SHIFT)}
    return QuestionSet("scenes", f"{count:,} {ABOUT}", splits, tests, set_checksum(found), shifts=(SHIFT,))


DATASETS.add(Dataset("scenes", ABOUT, TASK, lambda _: draw_set()))
