"""Training: one model in a folder, resumable.

    train       examples in a fixed order, a log of JSON lines, snapshots and complete checkpoints: in the training loop
                (`loop`), or on the Hugging Face Trainer for several ranks (`trainer_loop`), with the same numbers
    SingleRun   `holdfast train`: build a model and train it in a folder, and save it with its task
    Pace        warn early if a run would take very long
    Effort      what the training of a cell costs, stored with its result: time of a step, FLOPs, memory, when it ended

An interrupted run resumes from its newest complete checkpoint and gives the same numbers.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from holdfast.locking import locked, require_unlocked
from holdfast.planning.model_shape import counting
from holdfast.planning.planning import CONFIG_ERRORS
from holdfast.train.building import build_model, explain_failed_forward, preflight
from holdfast.train.loop import Log, Tick, TrainingLoop
from holdfast.train.recipe import Recipe, RouterChoice
from holdfast.train.run_folder import Guard, claim, prepare, require_own
from holdfast.train.saved_model import make_task, save_trained
from holdfast.train.snapshots import experts_per_token
from holdfast.train.stages import after_stages
from holdfast.train.start import checkpoint_identity
from holdfast.train.task import Inputs, Task, evaluating, forward, require_trainable
from holdfast.train.task_record import MODEL, TASK
from holdfast.train.trainer_loop import is_first_rank, processes, train_with_trainer
from holdfast.version import VERSION

VERY_LONG = 12 * 3600.0  # seconds of training for one model
SLOW_FIRST_STEP = 30.0  # seconds
MEASURED = 2  # steps after the first

logger = logging.getLogger("holdfast")
WINDOW = 16  # steps: a GPU runs behind the host by at most so many, so the time of fewer says little
FEW = 4  # examples whose FLOPs are counted


class SingleRun:
    """Train a recipe with one router and one seed in a folder; the same run there is resumed if it was interrupted."""

    def __init__(self, recipe: Recipe, choice: RouterChoice, seed: int, folder: Path, *, data: Path | None = None) -> None:
        self.recipe, self.choice, self.seed, self.folder = choice.recipe(recipe), choice, seed, folder
        self.task = make_task(self.recipe, data).for_seed(seed)
        for key, values in self.task.open_choices().items():
            raise ValueError(f"{key} is missing; for one run, set it to one of {', '.join(map(str, values))}.")
        require_own(folder, self.identity())

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for the folder to be this run's."""
        start, plugins = checkpoint_identity(self.recipe.model), self.recipe.plugins()
        same = {"recipe": self.recipe.describe(), **start, "data": self.task.describe()["data"]}
        router = {"router": self.choice.describe(), "seed": self.seed}
        return {"holdfast": VERSION, **router, **same, **({"plugins": plugins} if plugins else {})}

    def run(self, tick: Tick = lambda finished: None, report_to: tuple[str, ...] = ()) -> Log:
        """Train the model, save it in the folder and return the log."""
        if is_first_rank():
            require_unlocked(self.folder)
        preflight(self.task, [self.choice])
        task = after_stages(self.task, self.folder, self.seed, self.identity())
        model = build_model(task, self.choice.router, self.choice.options, seed=self.seed, k=self.choice.k)
        require_trainable(self.task, self.seed)
        place = self.folder / "training"
        options: dict[str, Any] = {"seed": self.seed, "k": experts_per_token(model), "report_to": report_to}
        if not is_first_rank():  # only the first rank writes, so only it holds the lock
            return train(model, self.task, place, tick=tick, **options)
        with locked(self.folder, wait=False) as lock:
            claim(self.folder, self.identity())
            prepare(self.folder, self.folder)
            log = train(model, self.task, place, tick=tick, guard=partial(lock.require, place), **options)
            lock.require(self.folder / MODEL, self.folder / TASK)
            save_trained(model, self.task, self.folder)
        return log


def train(
    model: Any,
    task: Task,
    folder: Path,
    *,
    seed: int,
    k: int | Sequence[int],
    tick: Tick = lambda finished: None,
    report_to: tuple[str, ...] = (),
    guard: Guard = lambda: None,
    trainer: bool = False,
) -> Log:
    """Train `model` in place and return the log. A run that was interrupted in `folder` is resumed, to the same numbers.

    k           experts per token in the snapshots, for all layers or one number for each
    report_to   "tensorboard", "wandb": callbacks of the Trainer
    guard       called before every write; raises if the folder now belongs to another process
    trainer     use the Hugging Face Trainer also where the training loop would do; several ranks and `report_to` need it
    """
    pace = Pace(task.steps, task.size_line(model), task.faster)

    def count(finished: int) -> None:
        if is_first_rank():
            pace(finished)
        tick(finished)

    how: dict[str, Any] = {"seed": seed, "k": k, "tick": count, "guard": guard}
    try:
        if trainer or report_to or processes() > 1:
            if task.recipe.robust.method != "none":
                raise ValueError("robust training runs on one rank and without --log; set robust.method to none.")
            return train_with_trainer(model, task, folder, report_to=report_to, **how)
        return TrainingLoop(model, task, folder, **how).run()
    except CONFIG_ERRORS as problem:
        if isinstance(problem, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(problem):
            raise ValueError(
                f"memory ran out in training, with training.batch={task.recipe.training.batch}: set it to less; "
                "training.accumulate adds up several batches to one step."
            ) from problem
        explain_failed_forward(task, problem)
        raise
    finally:
        pace.stop()


@final
class Pace:
    """Call it with the number of finished steps, first before the first step. It warns once if the run is very long.

    The first step of a run is often slow (kernels are compiled, files are read), so steps 2 and 3 are measured. A first step
    that does not end is reported while it runs.

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
                message = "the first of %s steps has taken %.0f seconds so far. %s"
                told = (message, f"{self.steps - finished:,}", SLOW_FIRST_STEP, self.advice)
                self._timer = threading.Timer(SLOW_FIRST_STEP, logger.warning, told)
                self._timer.daemon = True
                self._timer.start()
        elif finished == self._first + 1:
            self.stop()
            self._began = self._time_on_device()
        elif finished == self._first + 1 + MEASURED:
            seconds = (self._time_on_device() - self._began) / MEASURED
            if seconds * (self.steps - finished) > VERY_LONG:
                hours = seconds * (self.steps - finished) / 3600
                logger.warning(
                    "this run will take about %s: %.3g seconds a step, and %s steps are left. %s",
                    f"{hours / 24:.0f} days" if hours > 72 else f"{hours:.0f} hours",
                    seconds,
                    f"{self.steps - finished:,}",
                    self.advice,
                )

    def stop(self) -> None:
        """Stop waiting for the first step."""
        if self._timer is not None:
            self._timer.cancel()

    def _time_on_device(self) -> float:
        """Return the time when the GPU has finished its steps."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()


@final
class Effort:
    """A `Tick` that also notes when each step ends."""

    def __init__(self, tick: Tick) -> None:
        self.tick, self.begun, self.times = tick, time.monotonic(), list[float]()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def __call__(self, finished: int) -> None:
        # Without a GPU, the time that this process computes: other processes may slow down what a clock shows.
        self.times.append(time.monotonic() if torch.cuda.is_available() else time.process_time())
        self.tick(finished)

    def spent(self, model: Any, probe: Inputs) -> dict[str, Any]:
        """Return the effort so far.

        finished        when, in UTC
        seconds         since this object was made: training, evaluation and attacks, of this process
        step_seconds    of a training step, on a CPU those of the processor; None if fewer than two steps were run
        flops           of a forward, per token of a text or per image; None if they cannot be counted
        peak_bytes      of GPU memory that tensors used at most; None on a CPU
        """
        return {
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.begun, 2),
            "step_seconds": step_seconds(self.times),
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            "flops": flops_of_forward(model, probe),
        }


def step_seconds(times: Sequence[float]) -> float | None:
    """Return the median time of a step over windows of steps, so that a checkpoint or a validation does not count."""
    if len(times) < 2:
        return None
    steps = min(WINDOW, len(times) - 1)
    return statistics.median((end - begin) / steps for begin, end in zip(times, times[steps:], strict=False))


@torch.no_grad()
def flops_of_forward(model: Any, probe: Inputs) -> float | None:
    """Return the FLOPs of matrix products in evaluation, per token of a text or per image."""
    few = {name: tensor[:FEW] for name, tensor in probe.items()}
    count = few["input_ids"].numel() if "input_ids" in few else len(few["pixel_values"])
    with evaluating(model, routing=False), suppress(RuntimeError, NotImplementedError), counting() as counter:
        forward(model, few)
        return counter.get_total_flops() / count
    return None  # an operator cannot be counted
