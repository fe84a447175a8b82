"""How far training has come, told to every router by the Trainer."""

from typing import Any

from torch import nn

from holdfast.routing import Router


def tell_progress(model: nn.Module, fraction: float) -> None:
    """Annealing and growing routers move along: training has come this far, from 0 to 1."""
    for module in model.modules():
        if isinstance(module, Router):
            module.progress(fraction)


def progress_callback() -> Any:
    """A callback for `transformers.Trainer` that tells the model's routers how far training has come, before every step."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
            if model is not None and state.max_steps > 0:
                tell_progress(model, min(1.0, state.global_step / state.max_steps))

    return Progress()
