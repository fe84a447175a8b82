"""A comparison: one cell for each router and seed, each trained, scored and stored once."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.metrics.report import plain
from holdfast.train.contenders import Contender
from holdfast.train.joining import joined
from holdfast.train.loop import require_trainable, train
from holdfast.train.ownership import agrees, claim, require_own, write_json
from holdfast.train.recipe import Recipe
from holdfast.train.snapshots import consistency, evolution, learns_a_graph, routes_of, snapshot_steps
from holdfast.train.start import start
from holdfast.train.summary import summarise
from holdfast.train.trained import make_task, save_trained
from holdfast.train.workers import run_side_by_side
from holdfast.version import VERSION, versions

Progress = Callable[["Cell", int], None]  # a cell and how many of its steps are done


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
        self.data, self.task = data, make_task(recipe, data)
        require_own(folder, self.identity())

    @property
    def cells(self) -> list[Cell]:
        return [Cell(contender, seed) for seed in range(self.seeds) for contender in self.contenders]

    def identity(self) -> dict[str, Any]:
        """What must agree for results to be of one comparison."""
        return {"holdfast": VERSION, "recipe": self.recipe.describe(), **self.task.describe()}

    def run(self, progress: Progress | None = None, *, jobs: int = 1) -> list[dict[str, Any]]:
        """The results of all cells, those that are there already included; so many of them trained at a time."""
        if jobs < 1:
            raise ValueError(f"jobs is {jobs}; at least 1 cell is trained at a time.")
        if jobs > 1:
            run_side_by_side(self, jobs, progress)
        return [self.result(cell, progress) for cell in self.cells]

    def finish(self, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows that put the routers side by side, those finished in the folder before included; all goes to results.json."""
        cells = joined(self.folder, results)
        rows = summarise(cells, cells[0]["router"])
        # Versions are not part of a run's identity: an update must not keep a run from continuing.
        run = {**self.identity(), "measure": asdict(self.task.measure)}
        write_json(self.folder / "results.json", {"run": run, "versions": versions(), "rows": rows, "cells": cells})
        return rows

    def _claim(self, cell: Cell) -> None:
        """The folder is this run's from now on, and the cell's this router's."""
        claim(self.folder, self.identity())
        write_json(self._path(cell) / "router.json", asdict(cell.contender))

    def _require_own_cell(self, cell: Cell) -> None:
        """Neither a result nor a checkpoint of a router that was told otherwise is this one's."""
        if not agrees(self._path(cell) / "router.json", asdict(cell.contender)):
            raise ValueError(
                f"{self._path(cell)} is of a {cell.contender.name} with other options; give this one another name."
            )

    def _path(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def stored(self, cell: Cell) -> dict[str, Any] | None:
        self._require_own_cell(cell)
        path = self._path(cell) / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def result(self, cell: Cell, progress: Progress | None = None) -> dict[str, Any]:
        """Of one cell: what is stored, or what training it gives."""
        stored = self.stored(cell)
        if stored is not None:
            if progress is not None:
                progress(cell, self.recipe.training.steps)
            return stored
        with _one_thread():
            return self._trained(cell, progress)

    def _trained(self, cell: Cell, progress: Progress | None) -> dict[str, Any]:
        contender, path = cell.contender, self._path(cell)
        k = contender.k or self.recipe.sparse.k
        model = start(self.task, contender.router, contender.options, seed=cell.seed, k=k)
        require_trainable(self.task, cell.seed)
        self._claim(cell)  # only now: a mistake in the recipe leaves no folder behind
        tick = None if progress is None else lambda steps: progress(cell, steps)
        log = train(model, self.task, path / "training", seed=cell.seed, k=k, tick=tick)
        examples, probe = self.task.examples(cell.seed), self.task.probe()
        steps = snapshot_steps(self.recipe.training.steps)
        names = routes_of(model, probe).names
        result = {
            "router": contender.name,
            "seed": cell.seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "first_batch": examples.hash(0),
            "last_batch": examples.hash(self.recipe.training.steps - 1),
            "log": log,
            **self.task.score(model),
            "snapshots": evolution(path / "training" / "snapshots", steps, names, learned=learns_a_graph(model)),
            "consistency": consistency(model, probe, k),
            "view": self.task.view(model.eval()),
        }
        save_trained(model, self.task, path)
        write_json(path / "result.json", plain(result))
        return plain(result)


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a CPU: sums over several threads round differently, and numbers would hang on what else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if torch.cuda.is_available() else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
