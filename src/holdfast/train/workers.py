"""Cells of a comparison trained side by side: processes of their own, which leave their results in the folder.

A small model keeps a GPU busy for a fraction of the time; several at once use the rest. What a cell computes does not depend
on how many run beside it.
"""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.routing.plugins import load_plugin, plugin_files

if TYPE_CHECKING:
    from holdfast.train.cells import Cell, Comparison, Progress

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

    from holdfast.train.cells import Comparison
    from holdfast.train.quiet import quiet

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
