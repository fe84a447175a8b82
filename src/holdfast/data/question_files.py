"""Pictures with questions, by name or path: LLaVA's dialogues for training, and four layouts of questions for tests.

    scenes              drawn here (`scenes`)
    cifar10-questions   a yes/no question on each photograph of CIFAR-10, laid out as POPE's
    a folder            dialogues in LLaVA's JSON layout

**LLaVA** (`data.source`): a folder with one .json file, or that file: a list of

    {"id": ..., "image": "coco/train2017/000000033471.jpg",
     "conversations": [{"from": "human", "value": "<image>\\nWhat ...?"}, {"from": "gpt", "value": "..."}, ...]}

Paths of pictures begin at the folder of the file. An entry without "image" is a dialogue of texts only.

**Tests** (`data.tests`): LAYOUT=PATH, with one of

    scienceqa=FOLDER    problems.json, pid_splits.json, and images/SPLIT/ID/NAME (or SPLIT/ID/NAME); the split "test" is read
    mmbench=FILE.tsv    index, question, hint, A to D, answer, category, image; pictures are in the file, in base64
    pope=FILE           JSON lines: question_id, image, text, label; pictures are beside the file, or in images/ there
    mme=FOLDER          CATEGORY/NAME.txt, with lines of a question, a tab and yes or no; the picture is CATEGORY/NAME.*, or
                        in CATEGORY/images, and the texts in CATEGORY/questions_answers_YN

These files are untrusted. A picture is read only if it is a regular file inside the folder, after all links are followed.
All pictures are decoded once before anything is trained, so that a broken one is found then, and are kept if they are not
too large.
"""

import base64
import binascii
import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from holdfast.data.datasets import DATASETS, Dataset, datasets_for, find_dataset
from holdfast.data.documents import hold_out
from holdfast.data.draws import Draws
from holdfast.data.files import checksum, json_objects, read_text, separated_table
from holdfast.data.images import ENDINGS, ArrayImages, FileImages, Images, central_square, memory_for, read_image
from holdfast.data.labelled_images import load_cifar10, require_size
from holdfast.data.questions import (
    ASK_FOR_LETTER,
    LETTERS,
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
from holdfast.data.scenes import draw_set
from holdfast.errors import unknown_name
from holdfast.files import LARGEST, MIB, read_json, require_regular


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
        require_size(name, loaded.dialogues("train").pictures, size)
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
    for split, name in enumerate(("train", "valid", "test")):
        pictures = images.images(name)
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


SIZE = 224  # pixels per side
LARGEST_PICTURE = 64 * MIB  # bytes of a file
THREADS = 4  # that decode pictures
MOST_OPTIONS = len(LETTERS)
NO_PICTURE = ArrayImages(torch.zeros(0, 3, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))

ReadTest = Callable[[Path, int], tuple[Questions, str]]


def llava_set(path: Path, size: int) -> QuestionSet:
    """Return the dialogues of a folder in LLaVA's layout; a tenth, by their pictures, is held out for validation."""
    file = _json_in(path) if path.is_dir() else path
    entries = _read(file)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{file} is not a list of dialogues, as LLaVA's JSON is.")
    names: dict[str, int] = {}  # of pictures
    dialogues = [_dialogue(entry, place, file, names) for place, entry in enumerate(entries)]
    pictures = _pictures([_inside(file.parent, name, file) for name in names], size)
    in_order = list(names)
    titles = [repr(one.turns) if one.picture is None else in_order[one.picture] for one in dialogues]
    if len(dialogues) < 2:
        raise ValueError(f"{file} has one dialogue only; two are needed, one of them for validation.")
    kept, held = hold_out(titles)
    splits = {
        name: Dialogues(pictures, [dialogues[number] for number in numbers])
        for name, numbers in (("train", kept), ("valid", held))
    }
    digest = _checksum([file], (file.parent / name for name in names))
    about = f"{len(dialogues):,} dialogues about {len(names):,} pictures in {file.name}, {size} pixels per side"
    return QuestionSet(file.stem, about, splits, {}, digest)


def _json_in(folder: Path) -> Path:
    files = sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))
    if len(files) != 1:
        found = "no .json file" if not files else f"{len(files)} .json files"
        raise ValueError(f"{folder} has {found}; put one file with dialogues in LLaVA's layout there, or name the file.")
    return files[0]


def _dialogue(entry: Any, place: int, file: Path, names: dict[str, int]) -> Dialogue:
    """Return the dialogue of an entry; a picture that is new gets the next number in `names`."""
    where = f"{file}, entry {place}"
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"{where} has no conversations, a list of turns with the keys from and value.")
    said = []
    for number, turn in enumerate(turns):
        wanted, text = ("human", "gpt")[number % 2], turn.get("value")
        if turn.get("from") != wanted:
            raise ValueError(f"{where}: turn {number} is from {turn.get('from')!r}, and {wanted} is expected.")
        if not isinstance(text, str) or not text.replace(PICTURE, "").strip():
            raise ValueError(f"{where}: turn {number} has no text.")
        if number % 2 and PICTURE in text:
            raise ValueError(f"{where}: turn {number} is an answer and has {PICTURE}, which stands in questions only.")
        said.append(text.strip())
    if len(said) % 2:
        raise ValueError(f"{where} has a question without an answer: its last turn is from human.")
    name, marks = entry.get("image"), sum(text.count(PICTURE) for text in said)
    if not (name is None or (isinstance(name, str) and name)):
        raise ValueError(f"{where}: image is {name!r}, and the path of one picture is expected.")
    if marks > 1 or (marks == 1) != (name is not None):
        has = "no picture" if name is None else "a picture"
        raise ValueError(f"{where} has {has} and {marks} times {PICTURE} in its text; one picture needs it once.")
    picture = None if name is None else names.setdefault(name, len(names))
    return Dialogue(picture, tuple(zip(said[::2], said[1::2], strict=True)))


# Tests


def read_tests(written: Sequence[str], size: int) -> dict[str, tuple[Questions, str]]:
    """Return the sets of questions of LAYOUT=PATH by their names, each with its checksum."""
    found = {}
    for one in written:
        layout, sign, place = one.partition("=")
        if not sign or not place:
            raise ValueError(f"data.tests has {one!r}; write LAYOUT=PATH, such as pope=coco/pope.json.")
        if layout not in LAYOUTS:
            raise ValueError(f"data.tests: {unknown_name('layout', layout, LAYOUTS)}")
        name = f"{layout} {Path(place).stem}"
        if name in found:
            raise ValueError(f"data.tests has two sets called {name}; rename one of them.")
        found[name] = LAYOUTS[layout](Path(place), size)
        if not found[name][0].questions:
            raise ValueError(f"{place} has no questions.")
    return found


def tested_set(written: str, size: int) -> QuestionSet:
    """Return the questions of LAYOUT=PATH as a set without dialogues, to score a model on."""
    ((name, (questions, digest)),) = read_tests([written], size).items()
    return QuestionSet(name, f"{len(questions.questions):,} questions of {name}", {}, {"test": questions}, digest)


def _scienceqa(folder: Path, size: int) -> tuple[Questions, str]:
    problems, splits = folder / "problems.json", folder / "pid_splits.json"
    entries, numbers = _read(problems), _read(splits)
    chosen = numbers.get("test") if isinstance(numbers, dict) else None
    if not isinstance(entries, dict) or not isinstance(chosen, list):
        raise ValueError(
            f"{folder} is not laid out as ScienceQA: problems.json has the problems, pid_splits.json the split test."
        )
    files: dict[Path, int] = {}
    questions = []
    for number in map(str, chosen):
        where, entry = f"{problems}, problem {number}", entries.get(number)
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is missing, and pid_splits.json names it.")
        options, right = entry.get("choices"), entry.get("answer")
        if not isinstance(options, list) or not _is_index(right, len(options)):
            raise ValueError(f"{where} has a question without an answer: answer is {right!r}, of {options!r}.")
        place = None
        if (name := entry.get("image")) is not None:
            at = f"{entry.get('split', 'test')}/{number}/{name}"
            path = _inside(folder / "images" if (folder / "images").is_dir() else folder, at, problems, root=folder)
            place = files.setdefault(path, len(files))
        text = "\n".join(filter(None, (_text(entry.get("hint") or "", where), _text(entry.get("question"), where))))
        questions.append(_choice(place, text, options, right, str(entry.get("subject") or "all"), where))
    return Questions(_pictures(list(files), size), questions), _checksum([problems, splits], files)


def _mmbench(file: Path, size: int) -> tuple[Questions, str]:
    values, questions = list[torch.Tensor](), list[Question]()
    encoded, places = dict[str, int](), dict[str, int]()  # of pictures, by their base64 and by the index of their row
    table = separated_table(file, quoted_tabs=True)
    if missing := [name for name in ("question", "A", "B", "answer", "image") if name not in table.columns]:
        raise ValueError(f"{file} is not laid out as MMBench: it has no column {missing[0]}.")
    for line, row in table.rows:
        where = f"{file}, line {line}"
        letters = [letter for letter in LETTERS[:MOST_OPTIONS] if str(row.get(letter) or "nan").strip() not in ("", "nan")]
        letters = letters[: next((n for n, letter in enumerate(letters) if letter != LETTERS[n]), len(letters))]
        if row["answer"] not in letters or not row["answer"]:
            raise ValueError(
                f"{where} has a question without an answer: answer is {row['answer']!r}, of {', '.join(letters)}."
            )
        image = str(row["image"])
        if len(image) < 64 and image in places:  # the index of the row that has this picture
            number = places[image]
        else:
            number = encoded.setdefault(image, len(encoded))
            if number == len(values):
                values.append(_from_base64(image, size, where))
        places[str(row.get("index", line))] = number
        hint = str(row.get("hint") or "").strip()
        text = "\n".join(part for part in (hint, _text(row["question"], where)) if part not in ("", "nan"))
        options = [str(row[letter]) for letter in letters]
        right = letters.index(row["answer"])
        questions.append(_choice(number, text, options, right, str(row.get("category") or "all"), where))
    pictures = ArrayImages(torch.stack(values), torch.zeros(len(values), dtype=torch.int64)) if values else NO_PICTURE
    return Questions(pictures, questions), checksum([read_text(file)])


def _from_base64(written: str, size: int, where: str) -> torch.Tensor:
    try:
        data = base64.b64decode(written, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{where}: its picture is not base64.") from None
    picture = central_square(read_image(io.BytesIO(data), f"the picture in {where}"), size)
    return torch.from_numpy(picture).permute(2, 0, 1).contiguous()


def _pope(file: Path, size: int) -> tuple[Questions, str]:
    folder = file.parent / "images" if (file.parent / "images").is_dir() else file.parent
    files: dict[Path, int] = {}
    questions = []
    for line, row in json_objects(file):
        where = f"{file}, line {line}"
        label = str(row.get("label") or "").strip().lower()
        if label not in YES_NO:
            raise ValueError(f"{where} has a question without an answer: label is {row.get('label')!r}, not yes or no.")
        path = _inside(folder, _text(row.get("image"), where, "image"), file, root=file.parent)
        place = files.setdefault(path, len(files))
        questions.append(Question(place, _text(row.get("text"), where), label, YES_NO, "yes/no"))
    return Questions(_pictures(list(files), size), questions), _checksum([file], files)


def _mme(folder: Path, size: int) -> tuple[Questions, str]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; MME's layout is CATEGORY/NAME.txt beside CATEGORY/NAME.jpg.")
    texts = sorted(path for path in folder.glob("*/**/*.txt") if not path.name.startswith("."))
    files: dict[Path, int] = {}
    questions = []
    for text in texts:
        category = text.relative_to(folder).parts[0]
        places = (
            [text.parent]
            if text.parent.name != "questions_answers_YN"
            else [text.parent.parent / "images", text.parent.parent]
        )
        pictures = (place / f"{text.stem}{ending}" for place in places for ending in sorted(ENDINGS))
        found = next((path for path in pictures if path.is_file()), None)
        if found is None:
            raise ValueError(f"{text} has questions and no picture {text.stem}.jpg or .png beside it.")
        require_regular(text, limit=MIB, inside=folder)
        place = files.setdefault(_inside(folder, found.relative_to(folder).as_posix(), text), len(files))
        for number, line in enumerate(filter(str.strip, read_text(text).decode().split("\n")), 1):
            asked, sign, answer = line.strip("\r").rpartition("\t")
            if not sign or answer.strip().lower() not in YES_NO or not asked.strip():
                raise ValueError(
                    f"{text}, line {number} has a question without an answer: expected QUESTION, a tab, yes or no."
                )
            questions.append(Question(place, asked.strip(), answer.strip().lower(), YES_NO, category))
    return Questions(_pictures(list(files), size), questions), _checksum(texts, files)


LAYOUTS: dict[str, ReadTest] = {"scienceqa": _scienceqa, "mmbench": _mmbench, "pope": _pope, "mme": _mme}


def _choice(picture: int | None, text: str, options: Sequence[Any], right: Any, kind: str, where: str) -> Question:
    """Return a question with lettered options; equal options could not be told apart."""
    texts = [str(option).strip() for option in options]
    if not 2 <= len(texts) <= MOST_OPTIONS or len(set(texts)) < len(texts) or not all(texts):
        raise ValueError(f"{where} has the options {texts}; it needs 2 to {MOST_OPTIONS} different ones.")
    return Question(picture, text, texts[right], tuple(texts), kind, lettered=True, ask=ASK_FOR_LETTER)


# Files


def _read(path: Path) -> Any:
    try:
        return read_json(path, limit=LARGEST)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None


def _text(value: Any, where: str, key: str = "the question") -> str:
    if not isinstance(value, str) or (key != "the question" and not value.strip()):
        raise ValueError(f"{where}: {key} is {value!r}, and a text is expected.")
    return value.replace(PICTURE, "").strip()


def _is_index(value: Any, count: int) -> bool:
    return type(value) is int and 0 <= value < count


def _inside(folder: Path, name: str, file: Path, root: Path | None = None) -> Path:
    """Return the path of a picture that a file names; raise ValueError unless it is a regular file inside the folder."""
    if "\x00" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{file} names the picture {name!r}, which is not a path inside {folder}.")
    path = folder / name
    try:
        name.encode()
        require_regular(path, limit=LARGEST_PICTURE, inside=root or folder)
    except UnicodeEncodeError:
        raise ValueError(f"{file} names the picture {name!r}, which is not Unicode text.") from None
    except FileNotFoundError:
        raise ValueError(f"{file} names the picture {name}, and there is no {path}.") from None
    return path


def _pictures(paths: Sequence[Path], size: int) -> Images:
    """Return the pictures in files, each decoded once now: a broken one raises ValueError."""
    if not paths:
        return NO_PICTURE
    images = FileImages(paths, [0] * len(paths), size, decoded=memory_for(len(paths), size))
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(images.read, paths):
            pass
    return images


def _checksum(files: Iterable[Path], pictures: Iterable[Path]) -> str:
    """Return a checksum of the files, and of the sizes of the pictures that they name."""
    sizes = (f"{path.name} {path.stat().st_size}".encode() for path in pictures)
    return checksum([*(path.read_bytes() for path in files), *sizes])
