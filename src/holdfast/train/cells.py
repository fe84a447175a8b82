"""A comparison: one cell for each router and seed, each trained, scored and stored once."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.hub import save
from holdfast.train.evaluation import score
from holdfast.train.loop import train
from holdfast.train.recipe import Recipe
from holdfast.train.start import start
from holdfast.train.text_task import TextTask
from holdfast.version import VERSION
from holdfast.writing import write_whole

Progress = Callable[["Cell", int], None]  # a cell and how many of its steps are done


@dataclass(frozen=True)
class Contender:
    """A router as it enters a comparison."""

    name: str  # for people
    router: str
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int | None = None  # another number of experts than the recipe's


@dataclass(frozen=True)
class Cell:
    contender: Contender
    seed: int

    @property
    def name(self) -> str:
        return f"{self.contender.name}-seed{self.seed}"


class Comparison:
    """Routers trained side by side in a folder. Interrupted, it continues where it was; a finished cell is not run again."""

    def __init__(
        self, recipe: Recipe, contenders: Sequence[Contender], seeds: int, folder: Path, *, data: Path | None = None
    ) -> None:
        if seeds < 1:
            raise ValueError(f"seeds is {seeds}; a comparison needs at least 1.")
        names = [contender.name for contender in contenders]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"routers are {', '.join(names) or 'none'}; name each once, and at least one.")
        self.recipe, self.contenders, self.seeds, self.folder = recipe, list(contenders), seeds, folder
        self.task = TextTask(recipe, data)
        self._require_own_folder()

    @property
    def cells(self) -> list[Cell]:
        return [Cell(contender, seed) for seed in range(self.seeds) for contender in self.contenders]

    def identity(self) -> dict[str, Any]:
        """What must agree for results to be of one comparison."""
        return {
            "holdfast": VERSION,
            "recipe": self.recipe.describe(),
            "text": self.task.corpus.describe(),
            "attack": self.task.attack.summary(),
        }

    def run(self, progress: Progress | None = None) -> list[dict[str, Any]]:
        """The results of all cells, those that are there already included."""
        return [self._result(cell, progress) for cell in self.cells]

    def results(self) -> Iterator[dict[str, Any]]:
        """Those that are there already."""
        for cell in self.cells:
            if (stored := self._stored(cell)) is not None:
                yield stored

    def _require_own_folder(self) -> None:
        if not _agrees(self.folder / "run.json", self.identity()):
            raise ValueError(
                f"{self.folder} belongs to another run (recipe, text or version differ); choose another folder."
            )
        if not (self.folder / "run.json").exists() and self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty and holds no comparison; choose another folder.")

    def _claim(self, cell: Cell) -> None:
        """The folder is this run's from now on, and the cell's this router's."""
        write_json(self.folder / "run.json", self.identity())
        write_json(self._path(cell) / "router.json", asdict(cell.contender))

    def _require_own_cell(self, cell: Cell) -> None:
        """Neither a result nor a checkpoint of a router that was told otherwise is this one's."""
        if not _agrees(self._path(cell) / "router.json", asdict(cell.contender)):
            raise ValueError(
                f"{self._path(cell)} is of a {cell.contender.name} with other options; give this one another name."
            )

    def _path(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def _stored(self, cell: Cell) -> dict[str, Any] | None:
        self._require_own_cell(cell)
        path = self._path(cell) / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _result(self, cell: Cell, progress: Progress | None) -> dict[str, Any]:
        stored = self._stored(cell)
        if stored is not None:
            if progress is not None:
                progress(cell, self.recipe.training.steps)
            return stored
        contender, path, batches = cell.contender, self._path(cell), self.task.batches(cell.seed)
        model = start(
            self.recipe, contender.router, contender.options, seed=cell.seed, tokens=len(self.task.tokenizer), k=contender.k
        )
        self._claim(cell)  # only now: a mistake in the recipe leaves no folder behind
        tick = None if progress is None else lambda steps: progress(cell, steps)
        log = train(model, batches, self.recipe.training, path / "training", seed=cell.seed, tick=tick)
        result = {
            "router": contender.name,
            "seed": cell.seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "first_batch": batches.at(0).hash,
            "last_batch": batches.at(self.recipe.training.steps - 1).hash,
            "log": log,
            "clean": score(model, self.task.clean, byte_count=self.task.corpus.count_bytes("test")),
            "attacked": score(model, self.task.attacked, byte_count=self.task.attacked_bytes),
        }
        save(model, path / "model", force=True)
        write_json(path / "result.json", result)
        return result


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


def _agrees(path: Path, content: Any) -> bool:
    """Does the file say the same, or is there none?"""
    return not path.exists() or json.loads(path.read_text()) == json.loads(json.dumps(content))
