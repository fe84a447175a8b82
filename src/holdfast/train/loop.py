"""The training loop of a model on one device: every step is logged, and the host does not wait for the device at each step.

On a GPU the host prepares steps ahead of it. The loss and the gradient norm of a step are copied to the host in the
background, and are written to the log when they have arrived (`StepLog`). An interrupted run resumes from its newest
complete checkpoint; without a GPU it gives the same numbers to the bit. `TrainingStep` does the arithmetic, `run_folder` the
files.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from holdfast.files import append, require_no_links, require_no_links_inside, write_atomically
from holdfast.hub import has_routers, router_loss_scale
from holdfast.hub.install import hooks_of
from holdfast.kernels.finite import require_finite_so_far
from holdfast.routing import Router
from holdfast.train.augmentation import soft_labels
from holdfast.train.fast_step import CapturedStep
from holdfast.train.recipe import TrainingPart
from holdfast.train.robust_step import RobustLosses
from holdfast.train.run_folder import (
    LOOP_FILES,
    Guard,
    NeededFiles,
    TrainingState,
    delete_old_checkpoints,
    load_weights,
    newest_complete,
    read_checkpoint,
    read_deltas,
    reading_checkpoint,
    require_same_kind,
    restore_random,
    step_of,
    write_checkpoint,
)
from holdfast.train.snapshots import damaged_snapshot, take_snapshot
from holdfast.train.step import (
    Step,
    StepRecord,
    TrainingStep,
    adamw,
    label_count,
    loss_of,
)
from holdfast.train.task import Examples, Inputs, Task

STEPS_AHEAD = 16  # most steps that a GPU has not finished; half of them are waited for and logged at once
LOG = "log.jsonl"

Log = list[dict[str, float]]
Tick = Callable[[int], None]  # called with the number of finished steps

logger = logging.getLogger("holdfast")


@final
class TrainingLoop:
    """A run, with what happens after each step: log, snapshot, progress, evaluation, checkpoint.

    The arguments are those of `training.train`.
    """

    def __init__(
        self, model: Any, task: Task, folder: Path, *, seed: int, k: int | Sequence[int], tick: Tick, guard: Guard
    ) -> None:
        self.model, self.task, self.folder, self.k, self.tick, self.guard = model, task, folder, k, tick, guard
        self.training, self.steps = task.recipe.training, task.steps
        require_no_links_inside(folder, folder)
        transformers.set_seed(seed)
        model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        model.config.use_cache = False
        self.optimizer = adamw(model, self.training)
        self.due = self.training.snapshot_steps(self.steps) if has_routers(model) else []  # a dense model has no routing
        checkpoint = resume_point(folder, self.due, LOOP_FILES)
        self.state = TrainingState() if checkpoint is None else read_checkpoint(checkpoint, model, self.optimizer)
        robust = task.recipe.robust
        self.robust = None if robust.method == "none" else RobustLosses(model, robust, task.scaling)
        if self.robust is not None and checkpoint is not None:
            self.robust.deltas = read_deltas(checkpoint, model.device)
        self.training_step = TrainingStep(model, self.optimizer, self.training, self.steps, self.robust)
        self.training_step.done = self.state.global_step
        self.step: Step = CapturedStep(self.training_step) if self.training_step.on_gpu else self.training_step
        if hooks_of(model) is not None:
            router_loss_scale(model, 1 / self.training.accumulate)
        self.probe = task.probe()
        self.held_out = task.validation() if self.training.needs_validation else None
        self.batch = task.interference_batch(seed)
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.log = StepLog(folder / LOG, self.state.log, guard)
        done = range(self.state.global_step, self.steps)
        self.batches = _batches(task.examples(seed), self.training, done, model.device, robust.replays)
        if checkpoint is not None:
            restore_random(checkpoint)  # after the data loader has drawn its seed

    def run(self) -> Log:
        """Train the model in place by all steps that are not finished, and return the log."""
        with soft_labels(self.model, self.training.label_smoothing):
            self._run_steps()
        best = self.state.best_global_step if self.training.keep == "best" else None
        if best is not None:
            with reading_checkpoint(self.folder / f"checkpoint-{best}"):
                load_weights(self.folder / f"checkpoint-{best}", self.model)
        self.guard()
        delete_old_checkpoints(self.folder, self.steps, 1 if best is None else 0, best)
        return self.state.log

    def _run_steps(self) -> None:
        self.guard()
        write_atomically(self.log.path, as_json_lines(self.state.log))  # the lines of the checkpoint that it resumes from
        self.model.train()  # also if it is in training mode: parts set themselves up for the state that was loaded
        inputs = next(self.batches, None)
        if inputs is not None and self.state.compiles(self.training.compile) and isinstance(self.step, CapturedStep):
            self.step.compile(inputs)
        self.tick(self.state.global_step)  # after compilation, which must not count as a slow first step
        try:
            if self.state.global_step == 0:
                self._take_snapshot()
            while inputs is not None:
                inputs = self._run_step(inputs)
            self.log.flush()
            require_finite_so_far()
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self.log.flush()
            raise

    def _run_step(self, inputs: list[Inputs]) -> list[Inputs] | None:
        """Run one step and what follows it; return the inputs of the next step, which are copied while the GPU works."""
        if not self.model.training:
            self.model.train()
        for router in self.routers:
            router.progress(min(1.0, self.state.global_step / self.steps))
        record = self.step(inputs)
        self.state.global_step += 1
        self.log.add(self.state.global_step, record)
        following = next(self.batches, None)
        self._take_snapshot()
        self.tick(self.state.global_step)
        is_saved = self.training.saves(self.state.global_step, self.steps)
        if self.training.validates(self.state.global_step, self.steps):
            self._validate(is_saved)
        if is_saved:
            self.log.flush()
            # The GPU has finished its steps: a checkpoint never contains what a NaN has done to them.
            require_finite_so_far()
            require_finite_weights(self.model, self.state.global_step)
            self.state.compiled = self.training_step.is_compiled
            deltas = {} if self.robust is None else self.robust.deltas
            write_checkpoint(self.folder, self.model, self.optimizer, self.state, deltas, self.guard)
        return following

    def _take_snapshot(self) -> None:
        """Write a snapshot if one is due after the steps so far."""
        if self.state.global_step in self.due:
            self.log.flush()
            self.guard()
            folder = self.folder / "snapshots"
            require_no_links(folder, self.folder)
            take_snapshot(self.model, self.probe, self.k, self.state.global_step, folder, self.batch)

    def _validate(self, is_saved: bool) -> None:
        """Log the results on held-out data; of a step that is saved, note whether it is the best so far."""
        assert self.held_out is not None
        self.log.flush()
        require_finite_so_far()
        with torch.random.fork_rng(devices=[]):  # the data loader draws a number: training must not depend on it
            counts = self.training_step.counts_labels
            loss = held_out_loss(self.model, self.held_out, self.training.batch, counts_labels=counts)
            figure = self.task.held_out_figure(self.model)
        line = {"step": self.state.global_step, "eval_loss": loss}
        self.log.add_line(line if figure is None else {**line, "eval_figure": figure})
        result = figure if self.training.best_by == "figure" and figure is not None else loss
        best = math.inf if self.state.best_loss is None else self.state.best_loss
        if self.training.keep == "best" and is_saved and result < best:  # never if it is NaN
            self.state.best_loss, self.state.best_global_step = result, self.state.global_step


@final
class StepLog:
    """The log of a run: a line for each step, written in order once its numbers have arrived from the device.

    lines   the lines that have arrived; new ones are added to this list
    """

    def __init__(self, path: Path, lines: Log, guard: Guard) -> None:
        self.path, self.lines, self.guard = path, lines, guard
        self._waiting: deque[_Arriving] = deque()

    def add(self, step: int, record: StepRecord) -> None:
        """Add the line of a step. On a GPU, wait for older steps only if there are `STEPS_AHEAD` of them."""
        self._waiting.append(_Arriving(step, record))
        if self._waiting[-1].arrival is None:
            self.flush()
        elif len(self._waiting) >= STEPS_AHEAD:
            self._write(STEPS_AHEAD // 2)

    def add_line(self, line: dict[str, float]) -> None:
        """Add a line after those of all steps so far."""
        self.flush()
        self._append([line])

    def flush(self) -> None:
        """Wait for all steps so far and write their lines."""
        self._write(len(self._waiting))

    def _write(self, count: int) -> None:
        if count:
            self._append([self._waiting.popleft().line() for _ in range(count)])

    def _append(self, lines: Log) -> None:
        self.lines += lines
        self.guard()
        append(self.path, as_json_lines(lines))


def as_json_lines(log: Log) -> str:
    return "".join(json.dumps(line) + "\n" for line in log)


@final
class _Arriving:
    """The numbers of a step on their way from the device to the host."""

    def __init__(self, step: int, record: StepRecord) -> None:
        self.step, self.learning_rate = step, record.learning_rate
        both = torch.stack((record.loss.float(), record.grad_norm.float()))
        self.values = both.to("cpu", non_blocking=True)  # pinned memory, if from a GPU
        self.arrival = torch.cuda.Event() if both.is_cuda else None
        if self.arrival is not None:
            self.arrival.record()

    def line(self) -> dict[str, float]:
        """Wait until the numbers have arrived, and return the line of the log. It has no times: runs can be compared."""
        if self.arrival is not None:
            self.arrival.synchronize()
        loss, grad_norm = self.values.tolist()
        return {"step": self.step, "loss": loss, "grad_norm": grad_norm, "learning_rate": self.learning_rate}


@torch.no_grad()
def require_finite_weights(model: Any, step: int) -> None:
    """Raise ValueError if a weight is NaN or infinite: no forward, which would find it, follows the last step."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(
                f"{name} is NaN or infinite after step {step}: the training has diverged; set training.learning_rate to "
                "less, or training.warmup to more."
            )


@torch.no_grad()
def held_out_loss(model: Any, dataset: Dataset[Inputs], batch: int, *, counts_labels: bool) -> float:
    """Return the mean loss of the examples, each with the loss of its batch. The model is left in evaluation mode."""
    model.eval()
    losses = []
    for inputs in DataLoader(dataset, batch_size=batch, collate_fn=unchanged):
        moved = to_device(inputs, model.device)
        loss = loss_of(model, moved, label_count([moved]) if counts_labels else None)
        losses.append(loss.repeat(len(inputs["labels"])))
    return float(torch.cat(losses).cpu().numpy().mean())


def _batches(
    examples: Examples, training: TrainingPart, steps: range, device: torch.device, replays: int
) -> Iterator[list[Inputs]]:
    """Return an iterator over the micro-batches of the `steps`, counted from 0, on the device, in a fixed order.

    replays   how many steps in a row have the same batch
    """
    examples, size = examples.on(device), training.batch * training.accumulate
    places = (place for step in steps for place in range(step // replays * size, (step // replays + 1) * size))
    loader = iter(DataLoader(examples, batch_size=training.batch, sampler=places, collate_fn=unchanged))  # type: ignore[arg-type]
    return ([to_device(next(loader), device) for _ in range(training.accumulate)] for _ in steps)


def unchanged(batch: Any) -> Any:
    """Return the batch unchanged: a dataset here returns all examples of a batch at once."""
    return batch


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Return the inputs on the device; from pinned memory, without waiting, and a tensor with two names is copied once."""
    if all(tensor.device.type == device.type for tensor in inputs.values()):
        return inputs
    different = {id(tensor): tensor for tensor in inputs.values()}
    copies = {key: tensor.pin_memory().to(device, non_blocking=True) for key, tensor in different.items()}
    return {name: copies[id(tensor)] for name, tensor in inputs.items()}


def resume_point(folder: Path, due: Sequence[int], needed: NeededFiles, *, warn: bool = True) -> Path | None:
    """Return the checkpoint to resume from, if any; warn if a newer one is damaged, or lacks one of the `due` snapshots.

    Raise ValueError if the newest one is of the other kind: a run that started again would delete it.
    """
    require_same_kind(folder, needed)

    def find_missing_snapshot(checkpoint: Path) -> str | None:
        return damaged_snapshot(folder / "snapshots", [step for step in due if step <= step_of(checkpoint)])

    checkpoint, reasons = newest_complete(folder, find_missing_snapshot, needed=needed)
    if reasons and warn:
        action = f"resuming from {checkpoint.name}" if checkpoint else "starting from the first step"
        logger.warning("%s; %s.", "; ".join(reasons), action)
    return checkpoint
