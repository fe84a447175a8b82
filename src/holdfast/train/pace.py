"""Measure how long training steps take, and warn early if a run would take very long.

The first step of a run is often slow (kernels are compiled, files are read), so steps 2 and 3 are measured. A first step
that does not end is reported while it runs.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import final

import torch

VERY_LONG = 12 * 3600.0  # seconds of training for one model
SLOW_FIRST_STEP = 30.0  # seconds
MEASURED = 2  # steps after the first

logger = logging.getLogger("holdfast")


@final
class Pace:
    """Call it with the number of finished steps, first before the first step. It warns once if the run is very long.

    steps    of the whole run
    size     a line about the size of an input, if there is one
    remedy   what makes a run shorter
    """

    def __init__(self, steps: int, size: str | None, remedy: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps, self.clock = steps, clock
        self.advice = f"{f'{size}. ' if size else ''}{remedy}"
        self._first: int | None = None  # number of finished steps at the start
        self._began = 0.0
        self._timer: threading.Timer | None = None

    def __call__(self, finished: int) -> None:
        if self._first is None:
            self._first = finished
            if finished < self.steps:
                self._timer = threading.Timer(SLOW_FIRST_STEP, self._report_slow_step)
                self._timer.daemon = True
                self._timer.start()
        elif finished == self._first + 1:
            self.stop()
            self._began = _time_on_device(self.clock)
        elif finished == self._first + 1 + MEASURED:
            seconds = (_time_on_device(self.clock) - self._began) / MEASURED
            if seconds * (self.steps - finished) > VERY_LONG:
                logger.warning(
                    "this run will take about %s: %.3g seconds a step, and %s steps are left. %s",
                    _duration(seconds * (self.steps - finished)),
                    seconds,
                    f"{self.steps - finished:,}",
                    self.advice,
                )

    def stop(self) -> None:
        """Stop waiting for the first step."""
        if self._timer is not None:
            self._timer.cancel()

    def _report_slow_step(self) -> None:
        assert self._first is not None
        left = self.steps - self._first
        logger.warning("the first of %s steps has taken %.0f seconds so far. %s", f"{left:,}", SLOW_FIRST_STEP, self.advice)


def _time_on_device(clock: Callable[[], float]) -> float:
    """Return the time when the GPU has finished its steps."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock()


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours / 24:.0f} days" if hours > 72 else f"{hours:.0f} hours"
