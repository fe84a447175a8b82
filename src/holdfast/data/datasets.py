"""The registry of datasets: what a recipe's `data.source` and `--source` may name. Paths need no registration."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from holdfast.errors import unknown_name
from holdfast.plugins import Registry, check_name, takes, watch

# The tasks that a dataset can be for, as in recipes, and what it is then called in messages.
TASKS = {
    "text": "a text",
    "labels": "a set of labelled texts",
    "images": "a set of images",
    "vision-language": "a set of pictures with questions",
}
Load = Callable[[Path | None], Any]
Function = TypeVar("Function", bound=Load)


@final
@dataclass(frozen=True)
class Dataset:
    """A named source of data. What `load` returns is described in `register_dataset`."""

    name: str
    about: str
    task: str
    load: Load  # from the folder with named sources; None: embedded or fetched

    def __post_init__(self) -> None:
        check_name(self.name, "a dataset")
        if self.task not in TASKS:
            raise ValueError(f"dataset {self.name!r}: {unknown_name('task', self.task, TASKS)}")


DATASETS: Registry[Dataset] = Registry("dataset")
watch(DATASETS)


def register_dataset(name: str, *, task: str, about: str) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a dataset: `data.source` in recipes, `--source` on the command line.

    The function is called with the folder of `--data`, or None, and returns the splits train, valid and test, the same each
    time that it is called:

    task="text"       {"train": texts, "valid": texts, "test": texts}, each a sequence of strings or of `Document`s; or a
                      `holdfast.data.Corpus`
    task="labels"     {"train": rows, ...}, each row a pair (text, label), or (text, second text, label); labels are strings
                      or whole numbers, or numbers to predict if one of them is not whole
    task="images"     {"train": (pixels, labels), ...}, pixels (N,C,H,W) as bytes or as numbers between 0 and 1, labels (N,)
                      class numbers; or a `holdfast.data.ImageSet`, which also has the names of the classes
    task="vision-language"      a `holdfast.data.QuestionSet`

    about   one line of help, stored with results

    Example:
        @holdfast.register_dataset("counting", task="text", about="numbers in order")
        def counting(folder):
            lines = [f"{n} comes before {n + 1}." for n in range(3000)]
            return {"train": lines[:2000], "valid": lines[2000:2500], "test": lines[2500:]}
    """

    def add(load: Function) -> Function:
        if not takes(load, 1):
            raise ValueError(f"dataset {name!r}: its function must take one argument, the folder of --data or None.")
        DATASETS.register(Dataset(name, about, task, load))
        return load

    return add


def datasets_for(task: str) -> dict[str, str]:
    """Return the names of the datasets of a task, each with one line of help."""
    return {dataset.name: dataset.about for dataset in DATASETS if dataset.task == task}


def find_dataset(name: str, task: str, *, installed: bool = False) -> Dataset | None:
    """Return the dataset of this name; None if there is none. Raise ValueError if it is for another task.

    installed   search also in installed packages, which are then imported
    """
    if name not in DATASETS.names() and not (installed and name in {dataset.name for dataset in DATASETS}):
        return None
    found = DATASETS[name]
    if found.task != task:
        raise ValueError(f"{name} is {TASKS[found.task]} (task: {found.task}); this needs {TASKS[task]} (task: {task}).")
    return found


def require_splits(name: str, splits: Any, expected: Collection[str], kind: str) -> None:
    """Raise ValueError unless the function of a dataset returned exactly the expected splits; `kind` says what they hold."""
    for split, held in splits.items() if isinstance(splits, dict) else ():
        if not isinstance(held, Iterable):
            raise ValueError(f"dataset {name!r}, {split} is {type(held).__name__}; expected {kind}.")
    if not isinstance(splits, dict) or set(splits) != set(expected):
        found = f"the splits {', '.join(map(str, splits)) or 'none'}" if isinstance(splits, dict) else type(splits).__name__
        raise ValueError(f"dataset {name!r} returned {found}; expected {', '.join(expected)}, each with {kind}.")
