"""The callback of transformers' Trainer. Import this module only after `transformers.trainer`: it imports transformers."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from holdfast.hub.engines import all_hooks, router_loss_scale, set_progress


class RouterCallback(TrainerCallback):  # type: ignore[misc]
    """Set the progress of routers and the scale of their losses before each step, and log these losses by name.

    The scale is the factor by which the Trainer multiplies its loss: 1 / accumulated batches, times the gradient scaler's
    factor. The log has `router/balance`, `router/z`, ...: what each has added to the training loss, the sum of all layers
    and the mean over the steps since the last log. All ranks log the same numbers: each has the losses of the whole batch.

    `transformers.trainer.DEFAULT_CALLBACKS` has this class (checkpoint.py), so every Trainer runs it. Of two in one Trainer
    the first one counts. It does nothing for a model that Holdfast has not changed.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, torch.device], Tensor] = {}
        self._steps, self._scaler_factor = 0, 1.0

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
        """Set progress and loss scale."""
        if model is None:
            return
        if state.max_steps > 0:
            set_progress(model, min(1.0, state.global_step / state.max_steps))
        changed = list(all_hooks(model))
        if changed:
            scaler = getattr(optimizer, "scaler", None)
            self._scaler_factor = float(scaler.get_scale()) if scaler is not None else 1.0
            batches = _accumulated_batches(args.gradient_accumulation_steps, state.global_step, train_dataloader)
            router_loss_scale(model, self._scaler_factor / batches)
        for hooks in changed:
            hooks.collector.sums = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Count the losses of this step."""
        self._steps += 1
        for hooks in [] if model is None else all_hooks(model):
            for key, value in (hooks.collector.sums or {}).items():
                self._sums[key] = self._sums.get(key, 0) + value / self._scaler_factor
            hooks.collector.sums = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add the losses to a log of the training loss; the Trainer has copied it to its history already."""
        if logs is None or "loss" not in logs or not self._sums:
            return
        means: defaultdict[str, float] = defaultdict(float)
        for (name, _device), value in self._sums.items():
            means[f"router/{name}"] += float(value) / self._steps
        logs.update(means)
        state.log_history[-1].update(means)
        self._sums.clear()
        self._steps = 0

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Forget the scale: a loop that trains the model further has its own."""
        for hooks in [] if model is None else all_hooks(model):
            hooks.collector.loss_scale = hooks.collector.sums = None


def _accumulated_batches(steps: int, done: int, batches: Any) -> int:
    """Return how many batches the next optimiser step accumulates: the last step of an epoch may have fewer."""
    try:
        count = len(batches)
    except TypeError:  # a stream has no length
        return steps
    updates = math.ceil(count / steps)
    is_last = updates > 0 and done % updates == updates - 1
    return count % steps or steps if is_last else steps
