"""The learning rate of every step, and the steps at which a run validates and saves.

    constant    the learning rate after the warm-up
    linear      falls in a straight line to `floor` times the learning rate
    cosine      falls to the same value along half a cosine

The warm-up grows linearly from 0. All of them depend on the number of finished steps only, so a resumed run continues with
the same numbers; the training loop and the Hugging Face Trainer use the same functions.
"""

import math
from collections.abc import Callable

from holdfast.train.recipe import TrainingPart

Schedule = Callable[[int], float]  # from the number of finished steps to a factor, or to the learning rate of the next step


def rate_factor(training: TrainingPart, steps: int) -> Schedule:
    """Return the function from the number of finished steps to the share of the learning rate of the next step."""
    warmup, falling = training.warmup, FALLING[training.schedule]
    if falling is not None and warmup >= steps:
        raise ValueError(
            f"training.warmup is {warmup} and the run has {steps} {'step' if steps == 1 else 'steps'}: the schedule "
            f"{training.schedule} never begins; use more epochs or steps, or a shorter warm-up, such as "
            f"--set training.warmup={steps // 10}."
        )

    def factor(done: int) -> float:
        if done < warmup:
            return float(done) / float(warmup)
        if falling is None:
            return 1.0
        share = falling((done - warmup) / (steps - warmup))
        return training.floor + (1.0 - training.floor) * share

    return factor


def schedule_of(training: TrainingPart, steps: int) -> Schedule:
    """Return the function from the number of finished steps to the learning rate of the next step."""
    factor = rate_factor(training, steps)
    return lambda done: training.learning_rate * factor(done)


def _line(progress: float) -> float:
    return max(0.0, 1.0 - progress)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


FALLING: dict[str, Callable[[float], float] | None] = {"constant": None, "linear": _line, "cosine": _half_cosine}


def saves(training: TrainingPart, step: int, steps: int) -> bool:
    """Return whether a checkpoint is written after this step."""
    return step % training.save_every == 0 or step == steps


def validates(training: TrainingPart, step: int, steps: int) -> bool:
    """Return whether the model is evaluated on held-out data after this step."""
    is_due = training.validate_every is not None and step % training.validate_every == 0
    return is_due or (training.keep == "best" and saves(training, step, steps))


def needs_validation(training: TrainingPart) -> bool:
    """Return whether a run evaluates on held-out data at all."""
    return training.validate_every is not None or training.keep == "best"
