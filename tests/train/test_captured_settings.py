"""The settings of a model show what a captured step has decided in Python: after a change of them it is captured anew."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.train import fast_step
from holdfast.train.fast_step import CapturedStep, _settings
from holdfast.train.recipe import TrainingPart
from holdfast.train.step import TrainingStep, adamw, shapes_of

LOSSES = holdfast.Losses(balance=0.01)


def build() -> Any:
    torch.manual_seed(0)
    layer = holdfast.MoE(holdfast.create_router("symphony", dim=8, experts=4, k=2, losses=LOSSES), holdfast.Experts(8, 8, 4))
    return nn.Sequential(nn.Dropout(0.1), layer).train()


def replace_module(model: Any) -> None:
    model[0] = nn.Dropout(0.1)


def move_weights(model: Any) -> None:
    model[1].experts.down_proj.data = model[1].experts.down_proj.data.clone()


CHANGES: dict[str, Callable[[Any], object]] = {
    "evaluation mode": lambda model: model.eval(),
    "k": lambda model: setattr(model[1].router.select, "k", 3),
    "dropout": lambda model: setattr(model[0], "p", 0.2),
    "frozen": lambda model: model[1].experts.down_proj.requires_grad_(False),
    "replaced module": replace_module,
    "moved weights": move_weights,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_settings(change: str) -> None:
    model = build()
    before = _settings(model)
    CHANGES[change](model)
    assert _settings(model) != before


def test_training_changes_no_setting() -> None:
    model = build()
    before = _settings(model)
    for _ in range(2):
        out, routing = model[1](torch.randn(2, 5, 8))
        (out.sum() + routing.loss).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1
    model.eval()
    model.train()
    assert _settings(model) == before


class TwoLayers(nn.Module):
    """A model with a loss, for a step without a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(self.first(x)).sum()}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_setting_that_changes_before_the_first_step_ends_compilation(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a resumed run whose first step sets the progress at which a router is frozen."""
    model, training = TwoLayers(), TrainingPart(steps=10, batch=1, learning_rate=0.1)
    step = TrainingStep(model, adamw(model, training), training, 10)
    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    monkeypatch.setattr(CapturedStep, "_on_own_stream", lambda self: nullcontext())
    monkeypatch.setattr(CapturedStep, "_run_first_step", lambda self, inputs: self.step(inputs))
    monkeypatch.setattr(
        fast_step, "compile_step", lambda step, inputs: setattr(step, "compiled", (model, shapes_of(inputs)))
    )
    captured, inputs = CapturedStep(step), [{"x": torch.ones(1, 4)}]
    captured.compile(inputs)
    assert step.is_compiled
    model.first.requires_grad_(not is_frozen)
    captured(inputs)
    assert step.is_compiled == (not is_frozen)
