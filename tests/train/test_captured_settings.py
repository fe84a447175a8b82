"""The settings of a model show what a captured step has decided in Python: after a change of them it is captured anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.train.captured_step import _settings

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
