"""Train the cells that the verdicts of docs/results.md still need, in the order of `verdicts.yaml`, as far as the time goes.

    PYTHONPATH=src python benchmarks/verdicts.py --list
    PYTHONPATH=src python benchmarks/verdicts.py --data DATA --minutes 20 --jobs 6 --tar new.tar.gz
    PYTHONPATH=src python benchmarks/verdicts.py --data DATA --rehearse --out rehearsal

Each cell is entered in the ledger when it is finished; cells that are there are not trained again. With --tar, everything
that this run has stored is in one archive, which is written again after each cell: so only cells that were running are lost,
whether Ctrl-C, the end of the time or a kill ends it. Run the same command again to go on; with the same --out, unfinished
cells go on from their checkpoints.

On a GPU, start MPS first (`nvidia-cuda-mps-control -d`), so that the kernels of several processes run side by side. Without
it processes take turns, and six at a time finished none of four cells in the time that the four take one after the other.

A cell is started only if it will be finished in time, by the seconds of the device that others took: a second in which n
cells run counts as 1/n for each of them.
"""

import argparse
import os
import signal
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from verdict_cells import Entry, Places, Runner, Stored, Wanted, read_list, start_of

from holdfast.progress import quiet
from holdfast.train.comparison import end_with_parent

UNKNOWN = 120  # seconds of the device that a cell is expected to take until one like it was seen
MARGIN = 0.95  # of the time that is left, for all cells that run together
ALONE = 1.5  # a cell that runs alone does not fill the device, and takes so many times its share
LEAST = 0.15  # of what a cell is expected to take: what a running one still needs, at least
FAILURES = 2  # an experiment of which so many cells in a row failed is left out of the rest of the run
POLL = 0.5


@dataclass
class Clock:
    """What cells took, and what is left of the minutes of a run."""

    minutes: float | None
    begun: float = field(default_factory=time.monotonic)
    seen: dict[tuple[str, ...], float] = field(default_factory=dict)  # the most seconds of the device

    @property
    def passed(self) -> float:
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        return float("inf") if self.minutes is None else 60 * self.minutes - self.passed

    def note(self, wanted: Wanted, seconds: float) -> None:
        for like in _likes(wanted):
            self.seen[like] = max(seconds, self.seen.get(like, 0))

    def cost(self, wanted: Wanted) -> float:
        known = next((self.seen[like] for like in _likes(wanted) if like in self.seen), wanted.experiment.seconds)
        return UNKNOWN if known is None else known

    def fits(self, wanted: Wanted, running: Iterable["Worker"]) -> bool:
        """Return whether a cell and all that run would be finished in time."""
        cost, left = self.cost(wanted), self.left
        return cost * ALONE <= left and cost + sum(map(self.remaining, running)) <= MARGIN * left

    def remaining(self, worker: "Worker") -> float:
        """Return the seconds of the device that a running cell still needs; never none, as measuring it may take longer."""
        assert worker.wanted is not None
        expected = self.cost(worker.wanted)
        if worker.share > 0.1:  # by its own steps
            expected = max(expected, worker.spent / worker.share)
        return max(LEAST * self.cost(worker.wanted), expected - worker.spent)


def _likes(wanted: Wanted) -> list[tuple[str, ...]]:
    """Return what a cell's time can be taken from: the same router first."""
    return [(wanted.entry.name, wanted.experiment.name, wanted.router), (wanted.entry.name, wanted.experiment.name)]


@dataclass
class Worker:
    """A process that runs one cell after another; it ends with this one."""

    process: Any
    told: Connection
    wanted: Wanted | None = None
    spent: float = 0.0  # seconds of the device
    share: float = 0.0  # of its steps

    @classmethod
    def start(cls, places: Places, entries: Sequence[Entry], threads: int) -> "Worker":
        context = get_context("spawn")  # a forked process cannot use the GPU
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, places, entries, threads), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, wanted: Wanted) -> None:
        self.wanted, self.spent, self.share = wanted, 0.0, 0.0
        with suppress(OSError):  # it was killed, which is noticed when it is heard
            self.told.send(wanted)


def serve(told: Connection, places: Places, entries: Sequence[Entry], threads: int) -> None:
    """Run the cells that the other process sends; tell it the share of the steps, each new file, then a problem or None.

    After a problem the process ends: what it has of the device may be unusable.
    """
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    end_with_parent()
    torch.set_num_threads(threads)
    quiet()
    runner, last = Runner(places, entries), 0.0

    def progress(share: float) -> None:
        nonlocal last
        if time.monotonic() - last > POLL:
            last = time.monotonic()
            told.send(share)

    while True:
        try:
            wanted = told.recv()
        except EOFError:
            return
        try:
            runner.run(wanted, progress, told.send)
        except Exception as problem:
            told.send(f"{type(problem).__name__}: {problem}")
            return
        told.send(None)


class Run:
    """A run over the list: which cells are left, which run, and what was stored."""

    def __init__(self, entries: Sequence[Entry], places: Places, clock: Clock, jobs: int, tar: Path | None) -> None:
        self.entries, self.places, self.clock, self.jobs, self.tar = entries, places, clock, jobs, tar
        self.stored = Stored(places)
        self.left = [wanted for entry in entries for wanted in entry.cells if self.stored.missing(wanted)]
        self.workers: list[Worker] = []
        self.files: dict[Path, None] = {}  # that were written
        self.failed: set[str] = set()  # names of cells
        self.failures: Counter[str] = Counter()  # in a row, by experiment

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.wanted is not None]

    def run(self) -> None:
        """Run cells until none is left that would be finished in time, or the time is over."""
        try:
            while self.clock.left > 0 and (self._start_cells() or self.running):
                self._wait()
            for worker in self.running:
                assert worker.wanted is not None
                told = f"{worker.wanted.name} did not end in time, after {worker.share:.0%} of its steps"
                print(f"{self.clock.passed:.0f} s: {told}")
        except KeyboardInterrupt:
            print("interrupted")
        finally:
            for worker in self.workers:
                worker.process.kill()
            self._pack()

    def _start_cells(self) -> bool:
        """Give each idle worker the first cell that fits; return whether one was given."""
        began = False
        while len(self.running) < self.jobs and (wanted := self._next()) is not None:
            idle = next((worker for worker in self.workers if worker.wanted is None), None)
            if idle is None:
                threads = max(1, (os.cpu_count() or 1) // self.jobs)
                self.workers.append(idle := Worker.start(self.places, self.entries, threads))
            if wanted in self.left:
                self.left.remove(wanted)
            idle.give(wanted)
            print(f"{self.clock.passed:.0f} s: {wanted.name} begins", flush=True)
            began = True
        return began

    def _next(self) -> Wanted | None:
        """Return the first cell that fits, or the one that it starts from, if that one's model is gone."""
        running = [worker.wanted.name for worker in self.running if worker.wanted is not None]
        for wanted in self.left:
            start = start_of(wanted)
            if start is not None and not self.places.is_trained(start):
                wanted = start
            hopeless = self.failures[wanted.experiment.name] >= FAILURES
            if hopeless or wanted.name in self.failed or wanted.name in running:
                continue
            if self.clock.fits(wanted, self.running):
                return wanted
        return None

    def _wait(self) -> None:
        """Wait a moment for what workers tell; charge the time to the cells that run."""
        before, running = time.monotonic(), self.running
        told = wait([worker.told for worker in running], timeout=max(0.01, min(POLL, self.clock.left)))
        for worker in running:
            worker.spent += (time.monotonic() - before) / len(running)
            if worker.told in told:
                try:
                    self._hear(worker, worker.told.recv())
                except (EOFError, OSError):
                    self._fail(worker, "its process was killed, perhaps because memory ran out")

    def _hear(self, worker: Worker, message: float | str | Path | None) -> None:
        wanted = worker.wanted
        assert wanted is not None
        if isinstance(message, float):
            worker.share = message
        elif isinstance(message, Path):  # at once: what is measured of the cell may fail, or not end in time
            self.files[message] = None
            self._pack()
        elif isinstance(message, str):
            self._fail(worker, message)
        else:
            worker.wanted = None
            self.failures[wanted.experiment.name] = 0
            self.clock.note(wanted, worker.spent)
            print(f"{self.clock.passed:.0f} s: {wanted.name} took {worker.spent:.0f} s of the device", flush=True)

    def _fail(self, worker: Worker, problem: str) -> None:
        """Give up a cell, and its process."""
        wanted = worker.wanted
        assert wanted is not None
        worker.process.kill()
        self.workers.remove(worker)
        self.failed.add(wanted.name)
        self.failures[wanted.experiment.name] += 1
        print(f"{self.clock.passed:.0f} s: {wanted.name} failed: {problem}", flush=True)

    def _pack(self) -> None:
        """Write all new files into the archive, so that a kill finds a whole one."""
        if self.tar is None or not self.files:
            return
        self.tar.parent.mkdir(parents=True, exist_ok=True)
        part = self.tar.with_name(f"{self.tar.name}.part")
        with tarfile.open(part, "w:gz" if self.tar.suffix in (".gz", ".tgz") else "w") as archive:
            for file in self.files:
                archive.add(file, file.relative_to(self.places.results))
        part.replace(self.tar)


def lines(entries: Sequence[Entry], places: Places) -> Iterator[str]:
    """Yield for each entry how many of its cells are stored, how long the others take, and what they need."""
    stored = Stored(places)
    for entry in entries:
        cells = list(entry.cells)
        missing = [found for wanted in cells if (found := stored.missing(wanted))]
        trained = [wanted for wanted in cells if "cell" in stored.missing(wanted)]
        known = [wanted.experiment.seconds for wanted in trained]
        times = "unknown time" if None in known else f"{sum(filter(None, known)) / 60:.0f} minutes"
        where = f"issue {entry.issue}{f' ({entry.part})' if entry.part else ''}"
        told = [f"{entry.name}, {where}: {len(cells) - len(trained)} of {len(cells)} cells"]
        if trained:
            told.append(times)
        if more := len(missing) - len(trained):
            told.append(
                f"{more} without their {' and '.join(sorted({name for found in missing for name in found} - {'cell'}))}"
            )
        folders = dict.fromkeys(folder for experiment in entry.experiments for folder in experiment.data)
        if places.data is not None and (gone := [folder for folder in folders if not (places.data / folder).is_dir()]):
            told.append(f"{places.data} has no {', '.join(gone)}")
        yield "; ".join(told)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what is stored and what is missing, and train nothing")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, a few steps, one seed; results go to --out")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries of the list")
    parser.add_argument("--minutes", type=float, help="of this run; by default until all is done")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--data", type=Path, help="the folder around enwik8/, cifar10/ and the others")
    parser.add_argument("--out", type=Path, help="models and checkpoints; by default verdicts, of a rehearsal rehearsal")
    parser.add_argument("--ledger", type=Path, help="by default results/ledger; audits and certified are beside it")
    parser.add_argument("--tar", type=Path, metavar="FILE", help="an archive of all that this run stores")
    given = parser.parse_args(arguments)
    quiet()
    entries = read_list(rehearse=given.rehearse)
    if unknown := set(given.only or ()) - {entry.name for entry in entries}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; the list has {', '.join(entry.name for entry in entries)}.")
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}; run at least 1 cell at a time.")
    out = given.out or Path("rehearsal" if given.rehearse else "verdicts")
    ledger = given.ledger or (out if given.rehearse else Path("results")) / "ledger"
    places = Places(out, ledger, given.data)
    entries = [entry for entry in entries if given.only is None or entry.name in given.only]
    if given.list:
        print(*lines(entries, places), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends a run as Ctrl-C does
    run = Run(entries, places, Clock(given.minutes), given.jobs, given.tar)
    run.run()
    print(f"{run.clock.passed:.0f} s: {len(run.files)} new files; {len(run.left)} cells are left", flush=True)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
