"""Show how far a long computation is: as a bar on a terminal, elsewhere as lines, with the time that is left.

The bar needs rich, of the extra `lab`; without it there are lines. `quiet` turns off what other libraries print meanwhile.
"""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from holdfast.errors import one_line

EVERY = 60.0  # seconds: the longest time between two lines while a phase makes progress
NARROW, SHORT, LONG = 100, 20, 40  # columns of a narrow terminal, and of the bar on a narrow and on a wide one
TIMES = 18  # columns of the two times, and of the spaces between columns
LEAST = 10  # columns of the text


class Tell(Protocol):
    """Called with the amount of finished work, the phase (what is being done), and how far the phase is."""

    def __call__(self, done: float, phase: str, detail: str = "") -> None: ...


@contextmanager
def reporting(
    progress: Callable[[int, str], None] | None, total: float | None, name: str | None
) -> Iterator[Callable[[int, str], None]]:
    """Yield `progress`; if it is None, show a bar and yield a function that advances it.

    total   of the work, None if it is not known
    name    what is measured, shown before what is being done
    """
    if progress is not None:
        yield progress
        return
    with bar(total, leave=False) as tell:
        yield lambda done, what: tell(done, f"{name}: {what}" if name else what)


@contextmanager
def bar(total: float | None, *, leave: bool = True) -> Iterator[Tell]:
    """Show a bar, from the first call of what is yielded, with the remaining time if `total` is known.

    Where no terminal shows it, print a line to stderr when a phase starts, and at least every minute while it goes on.
    """
    if find_spec("rich") is None:
        yield Lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=not leave)
    if not console.is_terminal:
        yield Lines(total)
        return
    width = SHORT if console.width < NARROW else LONG
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(bar_width=width), TimeElapsedColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console, transient=not leave)
    task = bars.add_task("", total=total)

    def update(done: float, phase: str, detail: str = "") -> None:
        bars.start()  # not before: a bar that ends before it shows anything leaves an empty line
        shown = shortened(one_line(f"{phase}, {detail}" if detail else phase), console.width - width - TIMES)
        bars.update(task, completed=done, description=shown)

    try:
        yield update
    finally:
        bars.stop()


def shortened(text: str, width: int) -> str:
    """Return the text without its beginning, often a long path, if it is longer than `width`."""
    width = max(width, LEAST)
    return text if len(text) <= width else f"…{text[1 - width :]}"


class Lines:
    """Print a line to stderr when a phase starts, and at least every minute while it goes on: for logs."""

    def __init__(self, total: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.clock = total, clock
        self.phases: set[str] = set()
        self.start: tuple[float, float] | None = None  # when the first work was reported, and how much
        self.printed = 0.0

    def __call__(self, done: float, phase: str, detail: str = "") -> None:
        now, is_new = self.clock(), phase not in self.phases
        self.start = self.start or (now, done)
        if not is_new and now - self.printed < EVERY:
            return
        self.phases.add(phase)
        self.printed = now
        parts = [phase, "" if is_new else detail, self._left(done, now)]
        print(f"{time.strftime('%H:%M:%S')} {one_line(', '.join(filter(None, parts)))}", file=sys.stderr, flush=True)

    def _left(self, done: float, now: float) -> str:
        assert self.start is not None
        began, before = self.start
        if self.total is None or not before < done < self.total:
            return ""
        left = (now - began) * (self.total - done) / (done - before)
        return f"{done / self.total:.0%} done, about {duration(left)} left"


def duration(seconds: float) -> str:
    """Return a time as people say it: 40 s, 12 min, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def quiet() -> None:
    """Turn off the messages, warnings and bars of other libraries: Holdfast's commands have their own."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if "TORCH_LOGS" not in os.environ:
        for name in ("bitsandbytes", "torch", "torchao"):  # the first and the last warn of a kernel that does not load
            logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(accelerate|torch|torchao|transformers)(\.|$)")
        warnings.filterwarnings("ignore", message=r"(?s).*Triggered internally at")  # of C++, in whichever module
