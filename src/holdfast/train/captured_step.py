"""A training step that is captured as a CUDA graph and replayed, so that Python takes no part in it.

In a small model the host needs longer to start the kernels of a step than the GPU to run them. A CUDA graph starts them all
at once. It does the same work on the same memory each time, so three things make it right:

    what changes from step to step    is a tensor, changed in place: inputs, learning rate, router state, random numbers
    what is decided in Python         is compared before each replay (`_settings`); after a change the step is captured anew
    what is reported to the host      is read after each replay: scores that are NaN or infinite raise with the layer's name

If the step is compiled (`compiled_step`), the graph replays the compiled kernels.

The first steps run without a graph. They are part of the training: they create the state of the optimizer, compile kernels,
and show whether the step waits for the GPU, which a graph cannot do. Such a step, and inputs of another shape, run without a
graph. The first steps already read the memory that the graph will read. If the tensors changed later, for example if inputs
and labels were one tensor and became two copies, torch.compile would compile the step again, which cannot be captured.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.kernels.finite import require_finite_so_far
from holdfast.train.compiled_step import compile_step, first_line
from holdfast.train.step import Shapes, StepRecord, TrainingStep, shapes_of
from holdfast.train.task import Inputs

FIRST_STEPS = 3  # without a graph
PLAIN = (int, float, str)  # a tuple: a union of types would be made anew for each value
WAITS = "called a synchronizing CUDA operation"  # in the warning of `torch.cuda.set_sync_debug_mode`

logger = logging.getLogger("holdfast")


@final
class CapturedStep:
    """Call it as the `TrainingStep` that it captures; its records are valid until the next call."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.refused: str | None = None  # why this step cannot be captured
        self._key: tuple[Shapes, tuple[Any, ...]] | None = None
        self._first_steps = 0  # that ran with this key
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()
        self._inputs: list[Inputs] = []
        self._results: tuple[Tensor, Tensor] | None = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def __call__(self, inputs: Sequence[Inputs]) -> StepRecord:
        if self.refused is not None:
            return self.step(inputs)
        key = shapes_of(inputs), _settings(self.step.model)
        if self._key != key:
            if self._key is not None and self._key[1] == key[1] and self._graph is not None:
                return self.step(inputs)  # another shape, as in the last batch of the data
            if self._key is not None and self._key[1] != key[1] and self.step.is_compiled:
                self.step.use_uncompiled()
                logger.warning("training continues without torch.compile, because a setting of the model has changed.")
            self._key, self._graph, self._results, self._first_steps = key, None, None, 0
        if self._graph is None:
            if self._first_steps < FIRST_STEPS:
                return self._run_first_step(self._placed(inputs))
            self._capture(self._placed(inputs))
        if self._graph is None or self._results is None:
            return self.step(inputs)
        rate = self.step.set_learning_rate()
        self._placed(inputs)
        self._graph.replay()
        require_finite_so_far()
        self.step.done += 1
        return StepRecord(*self._results, rate)

    def compile(self, inputs: Sequence[Inputs]) -> None:
        """Compile the step if that changes no numbers, on the stream on which it will be captured."""
        placed = self._placed(inputs)
        with self._on_own_stream():
            compile_step(self.step, placed)
        # The comparison holds for these settings: if the first step has others, it is not compiled.
        self._key = shapes_of(inputs), _settings(self.step.model)

    def _placed(self, inputs: Sequence[Inputs]) -> list[Inputs]:
        """Return the inputs in memory that stays the same from step to step."""
        if shapes_of(self._inputs) != shapes_of(inputs):
            self._inputs = [{name: value.clone() for name, value in batch.items()} for batch in inputs]
            return self._inputs
        for place, given in zip(self._inputs, inputs, strict=True):
            for name, value in given.items():
                place[name].copy_(value, non_blocking=True)
        return self._inputs

    def _run_first_step(self, inputs: Sequence[Inputs]) -> StepRecord:
        """Run a step without a graph, on the stream on which it will be captured."""
        current = torch.cuda.current_stream()
        is_last = self._first_steps == FIRST_STEPS - 1
        with self._on_own_stream(), _recording_waits(is_last) as waits:
            record = self.step(inputs)
        record.loss.record_stream(current)
        record.grad_norm.record_stream(current)
        self._first_steps += 1
        if waits:
            self._refuse(f"a step waits for the GPU ({waits[0]})")
        return record

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Inside the `with`, launch kernels on the stream of captures: after earlier ones, and before later ones."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _capture(self, inputs: Sequence[Inputs]) -> None:
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()  # a capture that fails leaves the generator unusable
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._results = self.step.compute(inputs)
        except (RuntimeError, ValueError) as problem:
            generator.graphsafe_set_state(before)
            self.step.drop_gradients()  # of the half-captured backward, which never ran
            self._results = None
            reason = first_line(problem)
            if self.step.is_compiled:
                self.step.use_uncompiled()
                self._first_steps = 0
                logger.warning(
                    "training continues without torch.compile: the compiled step cannot be captured (%s).", reason
                )
            else:
                self._refuse(reason)
            return
        self._graph = graph

    def _refuse(self, reason: str) -> None:
        self.refused, self._graph = reason, None
        logger.warning("training runs without CUDA graphs, which is slower for small models: %s.", reason)


def _settings(model: nn.Module) -> tuple[Any, ...]:
    """Return what Python decides in a forward: modes, options, and where the tensors are that kernels read and write."""
    found: list[Any] = []
    for module in model.modules():
        found += [value for value in module.__dict__.values() if isinstance(value, PLAIN)]
        found.append(module)  # separates the values of two modules
        for tensors in (module._parameters, module._buffers):
            for value in tensors.values():
                if value is not None:
                    found += (value.data_ptr(), value.dtype, value.requires_grad)
    return tuple(found)


@contextmanager
def _recording_waits(enabled: bool) -> Iterator[list[str]]:
    """Return a list that gets a line for each place in which the host waits for the GPU inside the `with`."""
    found: list[str] = []
    if not enabled:
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if WAITS in str(warning.message):
            found.append(f"{warning.filename}, line {warning.lineno}")
        elif "debug mode is a prototype" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
