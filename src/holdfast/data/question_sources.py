"""Pictures with questions, by name or path.

scenes              drawn here (`scenes`)
cifar10-questions   a yes/no question on each photograph of CIFAR-10, laid out as POPE's
a folder            dialogues in LLaVA's JSON layout (`question_files`)
"""

import os
from pathlib import Path

from holdfast.data.datasets import DATASETS, Dataset, datasets_for, find_dataset
from holdfast.data.draws import Draws
from holdfast.data.images import Images
from holdfast.data.labelled_images import load_cifar10
from holdfast.data.question_files import SIZE, llava_set
from holdfast.data.questions import TASK, YES_NO, Dialogues, Question, Questions, QuestionSet, as_dialogues, set_checksum
from holdfast.data.scenes import draw_set


def question_sets() -> dict[str, str]:
    """Return the names of the sources of pictures with questions, each with one line of help."""
    return datasets_for(TASK)


def question_set(
    name: str | Path, *, folder: Path | None = None, size: int | None = None, count: int | None = None
) -> QuestionSet:
    """Return the source of this name, or the dialogues of a folder in LLaVA's layout (`question_files`).

    folder  where named sources that are not drawn are searched for
    size    pixels per side that pictures are drawn with or scaled to
    count   how many pictures are drawn for training
    """
    path = Path(name)
    if str(name) == "scenes":
        return draw_set(size=size, count=count)
    if count is not None:
        raise ValueError(f"data.pictures is how many scenes are drawn, and data.source is {name}; leave it out.")
    is_name = isinstance(name, str) and os.sep not in name
    if is_name and (found := find_dataset(str(name), TASK, installed=not path.exists())):
        loaded = found.load(folder)
        if not isinstance(loaded, QuestionSet):
            raise ValueError(f"dataset {name!r} returned {type(loaded).__name__}; expected a holdfast.data.QuestionSet.")
        own = max(loaded.dialogues("train").pictures.shape[1:])
        if size not in (None, own):
            raise ValueError(f"{name} has pictures of {own} pixels per side and is not scaled; set data.size to {own}.")
        return loaded
    if path.is_dir() or path.suffix == ".json":
        return llava_set(path, SIZE if size is None else size)
    raise ValueError(f"there is no folder {name}; {DATASETS.unknown(str(name), question_sets())}")


ABOUT_CIFAR = "yes/no questions on the photographs of CIFAR-10, one for each, laid out as POPE's"


def cifar10_questions(folder: Path | None) -> QuestionSet:
    """Return a question for each photograph of CIFAR-10: is there a CLASS in it? Half of the answers are yes.

    The class of a "no" is drawn from the other nine.
    """
    images = load_cifar10(folder)
    found: dict[str, tuple[Images, list[Question]]] = {}
    for split, (key, name) in enumerate({"train": "train", "valid": "valid", "test": "test"}.items()):
        pictures = images.images(key)
        questions = []
        for number, label in enumerate(pictures.labels.tolist()):
            draws = Draws(split, number)
            other = (label + 1 + draws.below(len(images.classes) - 1)) % len(images.classes)
            is_there = bool(draws.below(2))
            word = images.classes[label if is_there else other]
            article = "an" if word[0] in "aeiou" else "a"
            questions.append(
                Question(number, f"Is there {article} {word} in the image?", YES_NO[not is_there], YES_NO, "yes/no")
            )
        found[name] = pictures, questions
    splits = {name: Dialogues(found[name][0], as_dialogues(found[name][1])) for name in ("train", "valid")}
    return QuestionSet("cifar10-questions", ABOUT_CIFAR, splits, {"test": Questions(*found["test"])}, set_checksum(found))


DATASETS.add(Dataset("cifar10-questions", ABOUT_CIFAR, TASK, cifar10_questions))
