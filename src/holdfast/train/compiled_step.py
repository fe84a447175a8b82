"""Compile forward and backward of a training step with torch.compile, after a comparison with the step as it is.

A compiled step fuses small kernels. Two options keep its numbers close to those of the step that is not compiled: sums are
added in another order, and nothing else is meant to differ.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from holdfast.kernels.finite import require_finite_so_far
from holdfast.train.step import TrainingStep
from holdfast.train.task import Inputs

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True, "emulate_precision_casts": True}
PASSES = 2  # forwards and backwards that are compared
TOLERANCE, SMALL = 0.05, 0.05
ROUNDING = 1e-6  # difference of a router state that is always allowed

logger = logging.getLogger("holdfast")
Compiler = Callable[[Any], Callable[..., Any]]  # from a model to a function that is called in its place


class GpuLostError(ValueError):
    """A compiled kernel has failed, and this process cannot use the GPU any more."""


def with_inductor(model: Any) -> Callable[..., Any]:
    """Return the model compiled for inputs of fixed shape, without CUDA graphs of the compiler."""
    # The compiler keeps at most 8 versions of a function: forget those of models that this process has trained before.
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False, options=OPTIONS)
    return compiled


def compile_step(step: TrainingStep, inputs: Sequence[Inputs], compiler: Compiler = with_inductor) -> None:
    """Make the step use a compiled model if that agrees with the model itself; otherwise log one sentence that says why not.

    Weights, router state and random numbers are as before. Raise GpuLostError if a compiled kernel makes the GPU unusable.
    """
    start = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
    logger.info("compiling the training step; this can take a minute.")
    try:
        expected = _trial(step, inputs, step.model, start)
        problem = _try_compiled(step, inputs, compiler, start, expected)
    finally:
        if not _gpu_is_lost(step):  # otherwise this would fail too, and hide the first error
            _restore(step, start)
            if step.on_gpu:
                torch.cuda.empty_cache()  # a captured step cannot use this memory
    if problem is not None:
        logger.warning("training runs without torch.compile: %s.", problem)


def _try_compiled(
    step: TrainingStep, inputs: Sequence[Inputs], compiler: Compiler, start: dict[str, Tensor], expected: "_Trial"
) -> str | None:
    """Compile the model, compare it with `expected` and use it; return why not if it cannot be used."""
    try:
        run = compiler(step.model)
        _trial(step, inputs, run, start)  # compiles, and measures which kernels are fastest
        found = _trial(step, inputs, run, start)
    except Exception as failure:  # a compiler fails in many ways: no C compiler, no Triton, out of memory, its own faults
        reason = f"{type(failure).__name__}: {first_line(failure)}"
        if _gpu_is_lost(step):
            raise GpuLostError(
                f"a compiled kernel failed, and this process cannot use the GPU any more ({reason}): run again with "
                "training.compile=false, into a new folder."
            ) from failure
        return f"the compiler failed ({reason})"
    problem = disagreement(found, expected)
    if problem is None:
        step.use_compiled(run, inputs)
    return problem


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
