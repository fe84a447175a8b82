"""A training step that Python takes no part in: compiled with torch.compile, and replayed as a CUDA graph.

**Replayed.** In a small model the host needs longer to start the kernels of a step than the GPU to run them. A CUDA graph
starts them all at once. It does the same work on the same memory each time, so three things make it right:

    what changes from step to step    is a tensor, changed in place: inputs, learning rate, router state, random numbers
    what is decided in Python         is compared before each replay (`_settings`); after a change the step is captured anew
    what is reported to the host      is read after each replay: scores that are NaN or infinite raise with the layer's name

If the step is compiled, the graph replays the compiled kernels.

The first steps run without a graph. They are part of the training: they create the state of the optimizer, compile kernels,
and show whether the step waits for the GPU, which a graph cannot do. Such a step, and inputs of another shape, run without a
graph. The first steps already read the memory that the graph will read. If the tensors changed later, for example if inputs
and labels were one tensor and became two copies, torch.compile would compile the step again, which cannot be captured.

**Compiled.** A compiled step fuses small kernels. Two options keep its numbers close to those of the step that is not
compiled: sums are added in another order, and nothing else is meant to differ.

    fallback_random            dropout draws the random numbers that it draws without a compiler
    emulate_precision_casts    bf16 results are rounded where they are rounded without a compiler

torch.compile can be wrong without an error: that of torch 2.11 has wrong gradients for attention heads of width 44. So both
versions first run two forwards and backwards from the same weights, router state and random numbers, and their losses,
gradients and router states are compared. The second forward reads the router state that the first one wrote. The difference
allowed for the gradient g of a parameter, as a norm, is

    TOLERANCE (|g| + SMALL |all gradients|)

The second term is for parameters whose gradient is 0 up to rounding, such as biases of keys. In bf16 a token close to a tie
may select another expert; 0.05 leaves room for a few of these. If a value differs by more, or the compiler fails, the step
stays as it is, and one sentence says why. A kernel that reads memory it does not own makes the GPU unusable for the whole
process: then nothing can stay as it is, and `GpuLostError` says what to do.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.kernels.finite import require_finite_so_far
from holdfast.train.step import Shapes, StepRecord, TrainingStep, shapes_of
from holdfast.train.task import Inputs

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True, "emulate_precision_casts": True}
PASSES = 2  # forwards and backwards that are compared
TOLERANCE, SMALL = 0.05, 0.05
ROUNDING = 1e-6  # difference of a router state that is always allowed

Compiler = Callable[[Any], Callable[..., Any]]  # from a model to a function that is called in its place
FIRST_STEPS = 3  # without a graph
PLAIN = (int, float, str)  # a tuple: a union of types would be made anew for each value
WAITS = "called a synchronizing CUDA operation"  # in the warning of `torch.cuda.set_sync_debug_mode`
logger = logging.getLogger("holdfast")


class GpuLostError(ValueError):
    """A compiled kernel has failed, and this process cannot use the GPU any more."""


def with_inductor(model: Any) -> Callable[..., Any]:
    """Return the model compiled for inputs of fixed shape, without CUDA graphs of the compiler."""
    # The compiler keeps at most 8 versions of a function: forget those of models that this process has trained before.
    torch.compiler.reset()
    return torch.compile(model, dynamic=False, options=OPTIONS)


def compile_step(step: TrainingStep, inputs: Sequence[Inputs], compiler: Compiler = with_inductor) -> None:
    """Make the step use a compiled model if that agrees with the model itself; otherwise log one sentence that says why not.

    Weights, router state and random numbers are as before. Raise GpuLostError if a compiled kernel makes the GPU unusable.
    """
    start = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
    logger.info("compiling the training step; this can take a minute.")
    problem: str | None = None  # why the compiled model cannot be used
    try:
        expected = _trial(step, inputs, step.model, start)
        try:
            run = compiler(step.model)
            _trial(step, inputs, run, start)  # compiles, and measures which kernels are fastest
            found = _trial(step, inputs, run, start)
        except Exception as failure:  # a compiler fails in many ways: no C compiler, out of memory, its own faults
            reason = f"{type(failure).__name__}: {first_line(failure)}"
            if _gpu_is_lost(step):
                raise GpuLostError(
                    f"a compiled kernel failed, and this process cannot use the GPU any more ({reason}): run again with "
                    "training.compile=false, into a new folder."
                ) from failure
            problem = f"the compiler failed ({reason})"
        else:
            problem = disagreement(found, expected)
        if problem is None:
            step.compiled = run, shapes_of(inputs)
    finally:
        if not _gpu_is_lost(step):  # otherwise this would fail too, and hide the first error
            _restore(step, start)
            if step.on_gpu:
                torch.cuda.empty_cache()  # a captured step cannot use this memory
    if problem is not None:
        logger.warning("training runs without torch.compile: %s.", problem)


def _gpu_is_lost(step: TrainingStep) -> bool:
    """Return whether the step's GPU fails whatever is asked of it, as after an illegal memory access."""
    if not step.on_gpu:
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@final
@dataclass(frozen=True)
class _Trial:
    """What forwards and backwards have computed, by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]  # of routers


def _trial(step: TrainingStep, inputs: Sequence[Inputs], run: Callable[..., Any], start: dict[str, Tensor]) -> _Trial:
    """Run `PASSES` forwards and backwards from `start`, with the same random numbers each time."""
    _restore(step, start)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if step.on_gpu else []):
        losses = [step.add_gradients(inputs, run) for _ in range(PASSES)]
    named = step.model.named_parameters()
    gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    stored = step.model.state_dict()  # commits staged statistics
    state = {name: stored[name].float().clone() for name in start if name in stored}
    if step.on_gpu:
        torch.cuda.synchronize()
    require_finite_so_far()
    return _Trial(torch.stack(losses).float(), gradients, state)


def _restore(step: TrainingStep, start: dict[str, Tensor]) -> None:
    """Set the buffers to the values in `start`, and drop gradients and reports of NaN."""
    with torch.no_grad():
        for name, buffer in step.model.named_buffers():
            buffer.copy_(start[name])
    step.drop_gradients()
    if step.on_gpu:
        torch.cuda.synchronize()
    with suppress(ValueError):
        require_finite_so_far()


def disagreement(found: _Trial, expected: _Trial) -> str | None:
    """Return which value differs most beyond what is allowed, in a few words; None if all agree."""
    if found.gradients.keys() != expected.gradients.keys():
        name = sorted(found.gradients.keys() ^ expected.gradients.keys())[0]
        return f"{name} has a gradient in one of the compiled and the uncompiled step only"
    total = torch.stack([gradient.float().norm() for gradient in expected.gradients.values()]).norm()
    differences = {"the loss": _excess(found.loss, expected.loss, ROUNDING)}
    for name, gradient in expected.gradients.items():
        differences[f"the gradient of {name}"] = _excess(found.gradients[name], gradient, SMALL * total)
    for name, value in expected.state.items():
        other = found.state[name]
        # Both may be the same infinity or NaN, as a router's state is before its first batch.
        equal = ~value.isfinite() & ((other == value) | (other.isnan() & value.isnan()))
        excess = _excess(other.masked_fill(equal, 0), value.masked_fill(equal, 0), ROUNDING / TOLERANCE)
        differences[f"the router state {name}"] = excess
    shares = torch.stack([share.to(total.device) for share in differences.values()]).tolist()
    worst = max(zip(shares, differences, strict=True), key=lambda pair: float("inf") if pair[0] != pair[0] else pair[0])
    if worst[0] <= TOLERANCE:
        return None
    return f"{worst[1]} differs from that of the uncompiled step by {worst[0]:.2g} of its size"


def _excess(found: Tensor, expected: Tensor, small: Tensor | float) -> Tensor:
    """Return |found - expected| / (|expected| + small)."""
    return (found - expected).float().norm() / (expected.float().norm() + small)


def first_line(failure: BaseException) -> str:
    """Return the first line of the error that caused this one: one raised while it was handled hides it."""
    while failure.__context__ is not None:
        failure = failure.__context__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return (lines[0] if lines else "no message").rstrip(".")


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
                self.step.compiled = None
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
        recording = _recording_waits() if self._first_steps == FIRST_STEPS - 1 else nullcontext(list[str]())
        with self._on_own_stream(), recording as waits:
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
                self.step.compiled = None
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
def _recording_waits() -> Iterator[list[str]]:
    """Return a list that gets a line for each place in which the host waits for the GPU inside the `with`."""
    found: list[str] = []
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
