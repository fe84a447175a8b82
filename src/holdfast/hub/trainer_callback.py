"""What a training loop tells the routers of a model: how far it has come, how it scales its loss, what calibrates them."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from holdfast.hub.wiring import Wiring, wiring
from holdfast.routing import Router


def tell_progress(model: nn.Module, fraction: float) -> None:
    """Tell every router how far training has come, from 0 to 1; annealing and growing routers follow it."""
    for module in model.modules():
        if isinstance(module, Router):
            module.progress(fraction)


def router_loss_scale(model: nn.Module, scale: float) -> None:
    """Say by how much the training loss is multiplied before its backward, for loops that compute it from logits alone.

    Where the loss contains `outputs.loss`, `outputs.router_loss` or `outputs.aux_loss`, the routers' losses are scaled with
    it and this number is not used. Otherwise their gradients are added in the backward, multiplied by `scale`: 1 / n under
    accumulation over n batches, times `scaler.get_scale()` under a gradient scaler.
    """
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale is {scale}; it multiplies losses and must be finite and not negative.")
    for changed in _changed_models(model):
        changed.ledger.loss_scale = float(scale)


@contextmanager
def calibrate(model: nn.Module) -> Iterator[None]:
    """Inside the `with`, a model in training mode teaches its routers without gradients too.

    For a model that is not trained further: the width of `smooth`, the graph of `symphony`, the statistics of `ac` come
    from the texts that it is run on. Elsewhere a forward without gradients (a reference, a metric) teaches nothing.
    """
    with ExitStack() as stack:
        for changed in _changed_models(model):
            stack.enter_context(changed.ledger.calibration())
        yield


def trainer_callback() -> Any:
    """Return a callback for `transformers.Trainer` and what derives from it (TRL, sentence-transformers).

    Before every step it tells the model's routers how far training has come, and by how much the Trainer scales its loss:
    1 / accumulated batches, times the gradient scaler's factor.
    """
    from transformers import TrainerCallback

    class RouterCallback(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(
            self,
            args: Any,
            state: Any,
            control: Any,
            model: nn.Module | None = None,
            optimizer: Any = None,
            train_dataloader: Any = None,
            **_: Any,
        ) -> None:
            if model is None:
                return
            if state.max_steps > 0:
                tell_progress(model, min(1.0, state.global_step / state.max_steps))
            if any(True for _ in _wirings(model)):
                batches = _accumulated(args.gradient_accumulation_steps, state.global_step, train_dataloader)
                router_loss_scale(model, _scaler_factor(optimizer) / batches)

    return RouterCallback()


def _accumulated(steps: int, done: int, batches: Any) -> int:
    """Return how many batches the coming update accumulates: the last one of an epoch may have fewer."""
    try:
        count = len(batches)
    except TypeError:  # a stream
        return steps
    updates = math.ceil(count / steps)
    is_last = updates > 0 and done % updates == updates - 1
    return count % steps or steps if is_last else steps


def _scaler_factor(optimizer: Any) -> float:
    scaler = getattr(optimizer, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _wirings(model: nn.Module) -> Iterator[Wiring]:
    for module in model.modules():
        found = wiring(module)
        if found is not None:
            yield found


def _changed_models(model: nn.Module) -> list[Wiring]:
    found = list(_wirings(model))
    if not found:
        raise ValueError(f"{type(model).__name__} holds no model that sparsify or reroute has changed.")
    return found
