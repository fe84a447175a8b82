"""All that is finished in the folder of a comparison is one comparison, whoever named its routers and when.

Cells of a comparison trained side by side: processes of their own, which leave their results in the folder.

A small model keeps a GPU busy for a fraction of the time; several at once use the rest. What a cell computes does not depend
on how many run beside it.

A comparison: one cell for each router and seed, each trained, scored and stored once.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from holdfast.files import LARGEST, read_json, require_no_links
from holdfast.locking import POLL, Lock, Owner, being_written, locked
from holdfast.metrics.report import plain
from holdfast.routing.plugins import load_plugin, plugin_files
from holdfast.train.recipe import Contender, Recipe
from holdfast.train.run_folder import agrees, claim, prepare, read_sealed, require_own, write_json, write_sealed
from holdfast.train.saved_model import MODEL, TASK, make_task, save_trained
from holdfast.train.snapshots import consistency, evolution, learns_a_graph, routes_of, snapshot_steps
from holdfast.train.summary import summarise
from holdfast.train.training import Guard, require_trainable, start, train
from holdfast.version import VERSION, versions

Result = dict[str, Any]


def joined(folder: Path, results: Sequence[Result]) -> list[Result]:
    """These and the other finished cells, router by router: as in the last results, so that their baseline stays."""
    found = {_key(result): result for result in results}
    for path in sorted((folder / "cells").glob("*/result.json")):
        key, result = _read(path)
        found.setdefault(key, result)
    order = list(dict.fromkeys([*_routers_before(folder), *(router for router, _ in found)]))
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def _key(result: Result) -> tuple[str, int]:
    return str(result["router"]), int(result["seed"])


def _read(path: Path) -> tuple[tuple[str, int], Result]:
    try:
        result = read_sealed(path)
        return _key(result), result
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged; remove {path.parent}, and its cell is trained again.") from None


def _routers_before(folder: Path) -> list[str]:
    try:
        stored = read_json(folder / "results.json", limit=LARGEST)
        return [str(row["router"]) for row in stored["rows"]]
    except (OSError, ValueError, KeyError, TypeError):  # there are none, or they are damaged: they are written anew
        return []


PROGRESS_POLL = 0.5  # seconds between two looks at the progress

_worker: tuple[Comparison, Any] | None = None  # of a worker process: the comparison, and where progress is reported to


def run_side_by_side(comparison: Comparison, wanted: list[Cell], jobs: int, progress: Progress | None) -> None:
    """Train those of the wanted cells that are missing, so many at a time, save those that other processes train."""
    cells = comparison.cells
    missing = [number for number, cell in enumerate(cells) if cell in wanted and comparison.stored(cell) is None]
    if not missing:
        return
    names = [contender.name for contender in comparison.contenders]
    missing.sort(key=lambda number: names.index(cells[number].contender.name))  # who names slow routers first waits less
    context = get_context("spawn")  # a fork would share threads and the GPU's state
    manager = SyncManager(ctx=context)
    manager.start(_end_with_parent)
    with manager:
        done = manager.Queue()
        given = (comparison.recipe, comparison.contenders, comparison.seeds, comparison.folder, comparison.data)
        threads = max(1, (os.cpu_count() or 1) // jobs)
        begin = (plugin_files(), given, done, threads)
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=begin) as pool:
            waiting = {pool.submit(_train, number) for number in missing}
            try:
                while waiting:
                    finished, waiting = wait(waiting, timeout=PROGRESS_POLL, return_when=FIRST_COMPLETED)
                    _tell(done, cells, progress)
                    for future in finished:
                        future.result()
            except BrokenProcessPool:
                raise ChildProcessError(
                    f"a process that trained a cell of {comparison.folder} was killed, perhaps for want of memory; what is "
                    "finished is kept: give the same command again, with fewer --jobs."
                ) from None
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _tell(done: Any, cells: list[Any], progress: Progress | None) -> None:
    while True:
        try:
            number, steps = done.get_nowait()
        except queue.Empty:
            return
        if progress is not None:
            progress(cells[number], steps)


def _end_with_parent() -> None:
    """End this process when the command that started it ends, even if that was killed and could not tell it to."""
    parent = parent_process()

    def wait_and_end() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True, name="holdfast parent").start()


def _begin(plugins: list[tuple[Path, str]], given: tuple[Any, ...], done: Any, threads: int) -> None:
    import torch

    from holdfast.train.training import quiet

    global _worker
    _end_with_parent()
    torch.set_num_threads(threads)
    quiet()
    for path, checksum in plugins:
        load_plugin(path, checksum=checksum)
    *most, data = given
    _worker = Comparison(*most, data=data), done


def _train(number: int) -> None:
    assert _worker is not None
    comparison, done = _worker
    comparison.attempt(comparison.cells[number], lambda cell, steps: done.put((number, steps)))


say = logging.getLogger("holdfast")
STORED = ("router", "seed", "parameters", "log", "clean", "attacked", "snapshots", "consistency", "view")

Progress = Callable[["Cell", int], None]  # a cell and how many of its steps are done


@dataclass(frozen=True)
class Cell:
    contender: Contender
    seed: int

    @property
    def name(self) -> str:
        return f"{self.contender.name}-seed{self.seed}"


class Comparison:
    """Routers trained side by side in a folder. Interrupted, it continues where it was; a finished cell is not run again.

    Several processes may run one comparison in one folder: each cell has a lock, and is trained by the process that holds
    it. The others take other cells, or wait and read the result.
    """

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
        self._locks = {cell.name: Lock(self._path(cell)) for cell in self.cells}
        self._seen: dict[str, tuple[Owner, bool]] = {}  # by cell: who trains it, and whether that was said
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
        found: dict[str, dict[str, Any]] = {}
        while missing := [cell for cell in self.cells if cell.name not in found]:
            if jobs > 1:
                run_side_by_side(self, [cell for cell in missing if self._writer(cell) is None], jobs, progress)
            owners = {}
            for cell in missing:
                result = self.attempt(cell, progress)
                if isinstance(result, Owner):
                    owners[cell.name] = result
                else:
                    found[cell.name] = result
            if len(owners) == len(missing):
                self._wait(owners)
        return [found[cell.name] for cell in self.cells]

    def finish(self, results: Sequence[dict[str, Any]], guard: Guard = lambda: None) -> list[dict[str, Any]]:
        """Rows that put the routers side by side, those finished in the folder before included; all goes to results.json."""
        cells = joined(self.folder, results)
        rows = summarise(cells, cells[0]["router"])
        # Versions are not part of a run's identity: an update must not keep a run from continuing.
        run = {**self.identity(), "measure": asdict(self.task.measure)}
        require_no_links(self.folder / "results.json", self.folder)
        guard()
        write_json(self.folder / "results.json", {"run": run, "versions": versions(), "rows": rows, "cells": cells})
        return rows

    def publish(self, results: Sequence[dict[str, Any]], page: Callable[[], Any]) -> list[dict[str, Any]]:
        """`finish`, and then `page`, which writes the report: no other process comes between the two."""
        with locked(self.folder, wait=True) as lock:
            rows = self.finish(results, lock.check)
            page()
        return rows

    def _claim(self) -> None:
        """The folder is this run's from now on."""
        with locked(self.folder, wait=True):
            claim(self.folder, self.identity())

    def _require_own_cell(self, cell: Cell) -> None:
        """Neither a result nor a checkpoint of a router that was told otherwise is this one's."""
        if not agrees(self._path(cell) / "router.json", cell.contender.describe()):
            raise ValueError(
                f"{self._path(cell)} is of a {cell.contender.name} with other options or another plugin; give this one "
                "another name."
            )

    def _writer(self, cell: Cell) -> Owner | None:
        """Who trains the cell, in this moment and in another process."""
        state, owner = self._locks[cell.name].holder()
        return None if state == "dead" else owner

    def _wait(self, owners: dict[str, Owner]) -> None:
        """Say who trains the cells that are waited for, when that was found twice, and wait a little."""
        for name, owner in owners.items():
            found, told = self._seen.get(name, (None, False))
            if owner == found and not told:
                say.warning("waiting for cell %s: %s", name, being_written(owner))
            self._seen[name] = owner, owner == found
        time.sleep(POLL)

    def _path(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.name

    def stored(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell; None where it is not finished, or its file is damaged and the cell is to be done again."""
        self._require_own_cell(cell)
        path = self._path(cell)
        if not (path / "router.json").exists():  # without it, the options of a stored result are unknown
            return None
        try:
            result = read_sealed(path / "result.json")
        except (OSError, ValueError):
            return None
        is_whole = all(key in result for key in STORED)
        is_of_cell = is_whole and (result["router"], result["seed"]) == (cell.contender.name, cell.seed)
        return result if is_of_cell else None

    def result(self, cell: Cell, progress: Progress | None = None) -> dict[str, Any]:
        """Of one cell: what is stored, what training it gives, or what another process stores that trains it now."""
        while isinstance(found := self.attempt(cell, progress), Owner):
            self._wait({cell.name: found})
        return found

    def attempt(self, cell: Cell, progress: Progress | None = None) -> dict[str, Any] | Owner:
        """`result` without waiting: who trains the cell, where another process does."""
        lock, path = self._locks[cell.name], self._path(cell)
        stored = self._told_of(cell, progress)
        if stored is not None:
            return stored
        owner = self._writer(cell)
        if owner is not None:
            return owner
        with _one_thread():
            k = cell.contender.k or self.recipe.sparse.k
            model = start(self.task, cell.contender.router, cell.contender.options, seed=cell.seed, k=k)
            require_trainable(self.task, cell.seed)
            self._claim()  # only now: a mistake in the recipe leaves no folder behind
            require_no_links(path, self.folder)
            owner = lock.attempt()
            if owner is not None:
                return owner
            try:
                # Another process may have finished it since: what counts is what is there under the lock.
                stored = self._told_of(cell, progress)
                return self._trained(cell, model, lock, progress) if stored is None else stored
            finally:
                lock.release()

    def _told_of(self, cell: Cell, progress: Progress | None) -> dict[str, Any] | None:
        """What is stored of a cell; its progress is told."""
        stored = self.stored(cell)
        if stored is not None and progress is not None:
            progress(cell, self.recipe.training.steps)
        return stored

    def _trained(self, cell: Cell, model: Any, lock: Lock, progress: Progress | None) -> dict[str, Any]:
        """Train a cell under its lock, and store its result."""
        contender, path = cell.contender, self._path(cell)
        k = contender.k or self.recipe.sparse.k
        prepare(path, self.folder)
        if (path / "result.json").exists():
            say.warning("%s is damaged; the cell is done again.", path / "result.json")
        described = contender.describe()
        write_json(path / "router.json", described)
        tick = None if progress is None else lambda steps: progress(cell, steps)
        guard = partial(lock.require, path / "training")
        log = train(model, self.task, path / "training", seed=cell.seed, k=k, tick=tick, guard=guard)
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
        if "plugins" in described:
            result["plugins"] = described["plugins"]
        lock.require(path / MODEL, path / TASK)
        save_trained(model, self.task, path)
        lock.require(path / "result.json")
        write_sealed(path / "result.json", plain(result))
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
