"""Compare routers: each router with each seed is a cell, which is trained, attacked and stored once in a folder.

A sweep has cells for each of its settings: cells/smoe-sparse.k=1-seed0/.

    cells/smoe-seed0/   router.json, training/ (checkpoints, snapshots, log), model/, task.json, result.json; in its name,
                        characters that are not safe in file names are replaced, and a checksum of the name is added
    results.json        `results.Results`: the rows that compare the routers, and what a page draws of all finished cells

Several processes may work on one comparison: each cell has a lock. With `jobs` above 1, cells are trained in parallel in
worker processes, because one small model uses only a part of a GPU. The result of a cell does not depend on how many others
run at the same time.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from holdfast.checked import from_mapping
from holdfast.files import remove_folder, require_no_links
from holdfast.hub.install import hooks_of
from holdfast.locking import POLL, Lock, Owner, locked
from holdfast.plugins import PLUGIN_ERRORS, failure_in_plugin, load_plugin, plugin_files
from holdfast.progress import quiet
from holdfast.stored import without_nan
from holdfast.train.building import build_model, preflight, with_training
from holdfast.train.cells import Cell, Result, Setting, merge_results, require_few_cells, shares_data, with_choices
from holdfast.train.certified_predictions import certified_trial
from holdfast.train.papers import PaperRun
from holdfast.train.recipe import Recipe, RouterChoice, change_recipe, require_different
from holdfast.train.results import CellResult, Metric, Results, Run
from holdfast.train.run_folder import (
    agrees,
    claim,
    is_only_begun,
    prepare,
    read_with_checksum,
    require_own,
    write_json,
    write_with_checksum,
)
from holdfast.train.saved_model import make_task, save_trained
from holdfast.train.snapshots import (
    consistency,
    evolution,
    experts_per_token,
    learns_a_graph,
    routings_of,
)
from holdfast.train.stages import after_stages
from holdfast.train.start import checkpoint_identity
from holdfast.train.summary import summarise, summarise_domains
from holdfast.train.task import Task, require_trainable
from holdfast.train.task_record import MODEL, TASK, is_trained
from holdfast.train.training import Effort, train
from holdfast.version import VERSION, origin, versions

PROGRESS_POLL = 0.5  # seconds between two reads of the workers' progress

Progress = Callable[[Cell, int], None]  # called with a cell and the number of its finished steps

logger = logging.getLogger("holdfast")


class Comparison:
    """Routers trained under equal conditions in a folder. An interrupted comparison is resumed; finished cells are kept.

    Several processes may run one comparison in one folder: each cell has a lock, and is trained by the process that holds
    it. The other processes train other cells, or wait and read the result.
    """

    def __init__(
        self,
        recipe: Recipe,
        choices: Sequence[RouterChoice],
        seeds: int | Sequence[int],
        folder: Path,
        *,
        data: Path | None = None,
        settings: Sequence[Setting] = (),
        paper: PaperRun | None = None,
        report_size: bool = True,
    ) -> None:
        if not (numbers := range(seeds) if isinstance(seeds, int) else seeds):
            raise ValueError(f"seeds is {seeds}; a comparison needs at least 1.")
        seeds = numbers
        names = [choice.name for choice in choices]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"routers are {', '.join(names) or 'none'}; name at least one, and each only once.")
        self.recipe, self.choices, self.seeds, self.folder = recipe, list(choices), seeds, folder
        self.settings = list(settings) or [Setting(recipe)]
        for choice in choices:
            if both := [key for key in choice.training if key in self.settings[0].values]:
                raise ValueError(f"{choice.name} sets {both[0]}, which is swept too; remove one of the two.")
        require_different(choices, self.settings[0].recipe)
        require_few_cells(len(self.settings), len(choices), len(seeds))
        self.paper = paper  # the experiment of a paper that this is
        self.report_size = report_size  # log how large the inputs are, before training
        self.data, self.task = data, make_task(self._started(recipe, Cell(choices[0], seeds[0])), data)
        if choices_left := self.task.open_choices():
            self.settings = with_choices(self.settings, choices_left)
            require_few_cells(len(self.settings), len(choices), len(seeds))
        self._tasks: dict[str, Task] = {}  # by the label of their setting
        self._locks = {cell.name: Lock(self._path(cell)) for cell in self.cells}
        self._seen: dict[str, tuple[Owner, bool]] = {}  # by cell: the process that trains it, and whether that was logged
        require_own(folder, self.identity())

    @property
    def cells(self) -> list[Cell]:
        return [
            Cell(choice, seed, tuple(setting.values.items()))
            for seed in self.seeds
            for setting in self.settings
            for choice in self.choices
        ]

    def task_of(self, setting: Setting) -> Task:
        """Return the task with the recipe of a setting; raise ValueError if its test data or its attack are others."""
        if not setting.values:
            return self.task
        if setting.label not in self._tasks:
            recipe = self._started(setting.recipe, Cell(self.choices[0], self.seeds[0]))
            if shares_data(setting.recipe, self.recipe):
                if not self.task.open_choices():
                    self.task.examples(0)  # reads the training data, which both tasks then share
                task = self.task.with_recipe(recipe)
            else:
                task = make_task(recipe, self.data)
                if task.describe() != self.task.describe():
                    raise ValueError(f"{setting.label} changes the test data or the attack; it cannot be part of a sweep.")
            self._tasks[setting.label] = task
        return self._tasks[setting.label]

    def task_of_cell(self, cell: Cell) -> Task:
        setting = next(one for one in self.settings if tuple(one.values.items()) == cell.settings)
        task, recipe = self.task_of(setting).for_seed(cell.seed), cell.choice.recipe(setting.recipe)
        if self.starts_from_cells:
            recipe = self._started(recipe, cell)
        return task if recipe is setting.recipe else task.with_recipe(recipe)

    @property
    def starts_from_cells(self) -> bool:
        """Whether the checkpoint is a comparison: each cell starts from that one's cell of the same router and seed."""
        checkpoint = self.recipe.model.checkpoint
        return checkpoint is not None and (Path(checkpoint) / "cells").is_dir()

    def _started(self, recipe: Recipe, cell: Cell) -> Recipe:
        """Return the recipe of a cell: the same, unless its checkpoint is one cell of a comparison."""
        if not self.starts_from_cells:
            return recipe
        folder = Path(str(recipe.model.checkpoint))
        start = folder / "cells" / Cell(cell.choice, cell.seed).folder
        if not is_trained(start):
            raise ValueError(f"{folder} has no trained cell of {cell.choice.name} with seed {cell.seed} to start from.")
        return change_recipe(recipe, {"model.checkpoint": str(start)})

    def _describe(self, cell: Cell) -> dict[str, Any]:
        """Return what two results of the same cell must share, apart from the seed."""
        if not self.starts_from_cells:
            return cell.describe()
        return cell.describe() | checkpoint_identity(self._started(self.recipe, cell).model)

    def steps_of(self, cell: Cell) -> int:
        """Return the number of training steps of a cell."""
        return self.task_of_cell(cell).steps

    def identity(self) -> dict[str, Any]:
        """Return the values that two results must share to belong to the same comparison."""
        start = {} if self.starts_from_cells else checkpoint_identity(self.recipe.model)
        some: dict[str, Any] = {"plugins": self.recipe.plugins(), "sweep": sorted(self.settings[0].values)}
        described = {"holdfast": VERSION, "recipe": self.recipe.describe(), **start, **self.task.describe()}
        return {**described, **{key: values for key, values in some.items() if values}}

    def run(self, progress: Progress | None = None, *, jobs: int = 1) -> list[Result]:
        """Return the results of all cells; train those that are not finished, `jobs` at a time."""
        if jobs < 1:
            raise ValueError(f"jobs is {jobs}; train at least 1 cell at a time.")
        progress = progress or (lambda cell, steps: None)
        self._preflight()
        found: dict[str, Result] = {}
        while missing := [cell for cell in self.cells if cell.name not in found]:
            free = [cell for cell in missing if self._locks[cell.name].holder() is None]
            if jobs > 1:
                run_in_parallel(self, free, jobs, progress)
            owners = {}
            for cell in missing:
                result = self.attempt(cell, progress)
                if isinstance(result, Owner):
                    owners[cell.name] = result
                else:
                    found[cell.name] = result
            if len(owners) == len(missing):
                for name, owner in owners.items():  # log once that a process trains a cell, when it is met again
                    known, was_logged = self._seen.get(name, (None, False))
                    if owner == known and not was_logged:
                        logger.warning("waiting for cell %s: %s writes it.", name, owner)
                    self._seen[name] = owner, owner == known
                time.sleep(POLL)
        return [found[cell.name] for cell in self.cells]

    def _preflight(self) -> None:
        """Check the training of every setting, and build its routers on `meta`; equal models are built once."""
        built: list[Any] = []
        for cell in self.cells if self.starts_from_cells else ():
            self._started(self.recipe, cell)  # raises if there is no such cell
        for setting in self.settings:
            task = self.task_of(setting)
            described = setting.recipe.describe()
            # The images have the same size and the same classes, whichever domain is held out.
            parts = {**described, "training": None, "data": {**described["data"], "held_out": None}}
            try:
                for one in [task, *(with_training(task, choice) for choice in self.choices if choice.training)]:
                    require_trainable(one, seed=0)
                if parts not in built:
                    preflight(task, self.choices, report_size=self.report_size)
            except ValueError as problem:
                raise ValueError(f"with {setting.label}: {problem}" if setting.values else str(problem)) from problem
            built.append(parts)

    def finish(
        self,
        results: Sequence[Result],
        page: Callable[[Results], Any] = lambda finished: None,
        *,
        command: str | None = None,
    ) -> Results:
        """Write results.json with these and the other finished cells of the folder, call `page` with it, and return it.

        `page` writes the report. One lock is held for both files: no other process writes between the two. `command` is
        the one that ran the comparison, if one did.
        """
        with locked(self.folder, wait=True) as lock:
            cells = merge_results(self.folder, results)
            baseline, paper = cells[0]["router"], self.paper
            metrics = [from_mapping(Metric, described) for described in self.task.other_metrics]
            with suppress(ValueError):  # routers may be added to the experiment of a paper
                earlier = Results.load(self.folder)
                paper, command = paper or earlier.paper, command or earlier.command
            finished = Results(
                run=Run(**self.identity(), measure=self.task.measure, metrics=metrics),
                versions=versions(),  # not part of the identity: a run can be resumed after an update of a package
                rows=summarise(cells, baseline),
                domains=summarise_domains(cells, baseline),
                cells=[CellResult.of(cell) for cell in cells],
                paper=None if paper is None else paper.with_cells(cells),
                command=command,
            )
            require_no_links(self.folder / Results.file_name, self.folder)
            lock.check()
            finished.save(self.folder / Results.file_name)
            page(finished)
        return finished

    def stored(self, cell: Cell) -> Result | None:
        """Return the stored result of a cell; None if it is not finished, or if its file is damaged.

        Raise ValueError if the cell has a result or checkpoint of a router with other options or plugins.
        """
        path = self._path(cell)
        if not is_only_begun(path) and not agrees(path / "router.json", self._describe(cell)):
            raise ValueError(
                f"{path} belongs to a router {cell.choice.name} with other options, another plugin or "
                "another start; give this router another name."
            )
        if not (path / "router.json").exists():  # without it, the router's options of a stored result are unknown
            return None
        try:
            result = read_with_checksum(path / "result.json")
        except (OSError, ValueError):
            return None
        is_of_cell = (result.get("router"), result.get("seed")) == (cell.choice.name, cell.seed)
        return result if is_of_cell and result.get("settings", {}) == dict(cell.settings) else None

    def attempt(self, cell: Cell, progress: Progress) -> Result | Owner:
        """Return the result of a cell, stored or from training it now; if another process trains it, return that process."""
        lock, path = self._locks[cell.name], self._path(cell)
        if (stored := self._stored_with_progress(cell, progress)) is not None:
            return stored
        if (owner := lock.holder()) is not None:
            return owner
        with _deterministic_threads():
            task = after_stages(self.task_of_cell(cell), self.folder, cell.seed, self.identity())
            model = build_model(task, cell.choice.router, cell.choice.options, seed=cell.seed, k=cell.choice.k)
            require_trainable(task, cell.seed)
            with locked(self.folder, wait=True):  # until the cell is locked too: a run without locks may be replaced
                claim(self.folder, self.identity())  # not earlier: a wrong recipe must not create a folder
                require_no_links(path, self.folder)
                owner = lock.attempt()
            if owner is not None:
                return owner
            try:
                # Read again under the lock: another process may have finished the cell in the meantime.
                stored = self._stored_with_progress(cell, progress)
                return self._train_and_store(cell, model, lock, progress) if stored is None else stored
            finally:
                lock.release()

    def _train_and_store(self, cell: Cell, model: Any, lock: Lock, progress: Progress) -> Result:
        """Train a cell under its lock, store its result and return it."""
        task, path = self.task_of_cell(cell), self._path(cell)
        k = experts_per_token(model)
        prepare(path, self.folder)
        if (path / "result.json").exists():
            logger.warning("%s is damaged; the cell is trained again.", path / "result.json")
        described = self._describe(cell)
        if not agrees(path / "router.json", described):  # a router with other options began here
            remove_folder(path / "training", self.folder)
        write_json(path / "router.json", described)
        effort = Effort(partial(progress, cell))
        how: dict[str, Any] = {"tick": effort, "guard": partial(lock.require, path / "training")}
        log = train(model, task, path / "training", seed=cell.seed, k=k, **how)
        examples, probe = task.examples(cell.seed), task.probe()
        steps = task.recipe.training.snapshot_steps(task.steps)
        names = routings_of(model, probe).names
        scores = task.score(model)
        scores.setdefault("trials", {}).update(certified_trial(model, task))
        result = {
            "router": cell.choice.name,
            "seed": cell.seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "first_batch": examples.hash(0),
            "last_batch": examples.hash((task.steps - 1) // task.recipe.robust.replays),
            "log": log,
            **scores,
            "snapshots": evolution(path / "training" / "snapshots", steps, names, learned=learns_a_graph(model)),
            "consistency": consistency(model, probe, k),
            "view": task.view(model.eval()),
            "origin": origin() | effort.spent(model, probe),
        }
        hooks = hooks_of(model)
        if task.recipe.task == "text" and hooks is not None and hooks.sees_later_tokens:
            result["sees_later_tokens"] = True
        result |= {key: described[key] for key in ("plugins", "settings") if key in described}
        lock.require(path / MODEL, path / TASK)
        save_trained(model, task, path)
        lock.require(path / "result.json")
        write_with_checksum(path / "result.json", without_nan(result))
        return without_nan(result)

    def _stored_with_progress(self, cell: Cell, progress: Progress) -> Result | None:
        """Return the stored result of a cell, and report the cell as finished if there is one."""
        stored = self.stored(cell)
        if stored is not None:
            progress(cell, self.steps_of(cell))
        return stored

    def _path(self, cell: Cell) -> Path:
        return self.folder / "cells" / cell.folder


@contextmanager
def _deterministic_threads() -> Iterator[None]:
    """Without a GPU, use one CPU thread inside the `with`: the rounding of sums depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if torch.cuda.is_available() else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_worker: tuple[Comparison, Any] | None = None  # in a worker process: its comparison, and the queue for its progress


def run_in_parallel(comparison: Comparison, wanted: list[Cell], jobs: int, progress: Progress) -> None:
    """Train the wanted cells that are not finished in worker processes, `jobs` at a time; each stores its results."""
    cells = comparison.cells
    missing = [number for number, cell in enumerate(cells) if cell in wanted and comparison.stored(cell) is None]
    if not missing:
        return
    names = [choice.name for choice in comparison.choices]
    missing.sort(key=lambda number: names.index(cells[number].choice.name))  # in the given order: name a slow router first
    context = get_context("spawn")  # a forked process cannot use the GPU, and may inherit locks that are held
    manager = SyncManager(ctx=context)
    with _signals_for_this_process_only():
        manager.start(end_with_parent)
    with manager:
        others = active_children()
        progress_queue = manager.Queue()
        options = {"data": comparison.data, "settings": comparison.settings}
        settings = (comparison.recipe, comparison.choices, comparison.seeds, comparison.folder, options)
        threads = max(1, (os.cpu_count() or 1) // jobs)
        arguments = (plugin_files(), settings, progress_queue, threads)
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_set_up_worker, initargs=arguments) as pool:
            try:
                with _signals_for_this_process_only():
                    waiting = {pool.submit(_train_in_worker, number) for number in missing}
                while waiting:
                    finished, waiting = wait(waiting, timeout=PROGRESS_POLL, return_when=FIRST_COMPLETED)
                    with suppress(queue.Empty):
                        while True:
                            number, steps = progress_queue.get_nowait()
                            progress(cells[number], steps)
                    for future in finished:
                        future.result()
            except BrokenProcessPool:
                raise ChildProcessError(
                    f"a process that trained a cell of {comparison.folder} was killed, perhaps because memory ran out; "
                    "finished cells are kept: run the same command again with fewer --jobs."
                ) from None
            except Exception:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            except BaseException:  # Ctrl-C: a killed worker loses what it did since its last checkpoint, and no file
                for child in active_children():
                    if child not in others:
                        child.kill()
                raise


@contextmanager
def _signals_for_this_process_only() -> Iterator[None]:
    """Let processes that are started inside the `with` never receive Ctrl-C, which a terminal sends to all of them.

    A process inherits which signals are blocked. Ctrl-C waits in this process until the `with` ends.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_up_worker(plugins: list[tuple[Path, str]], settings: tuple[Any, ...], progress_queue: Any, threads: int) -> None:
    global _worker
    end_with_parent()
    torch.set_num_threads(threads)
    quiet()
    for path, checksum in plugins:
        load_plugin(path, checksum=checksum)
    *positional, options = settings
    _worker = Comparison(*positional, **options), progress_queue


def _train_in_worker(number: int) -> None:
    assert _worker is not None
    comparison, progress_queue = _worker
    try:
        comparison.attempt(comparison.cells[number], lambda cell, steps: progress_queue.put((number, steps)))
    except PLUGIN_ERRORS as problem:
        failure = failure_in_plugin(problem)
        if failure is None:
            raise
        raise ValueError(failure) from None  # the traceback is lost on its way to the other process


def end_with_parent() -> None:
    """End this process when its parent process ends, even if the parent was killed."""
    parent = parent_process()

    def wait_and_end() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True, name="holdfast parent").start()
