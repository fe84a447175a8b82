"""Signs of life: a bar that knows how far a model is."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.cli import terminal


class Seen(nn.Module):
    def forward(self, pixels: torch.Tensor, **_: Any) -> torch.Tensor:
        return pixels


def test_a_bar_counts_the_inputs_of_a_model_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []

    @contextmanager
    def bar(total: float | None, *, leave: bool = True) -> Any:
        assert total == 5 and not leave
        yield lambda done, what: told.append((done, what))

    monkeypatch.setattr(terminal, "bar", bar)
    model = Seen()
    with terminal.forwards(model, "scoring", 5):
        model(torch.zeros(3, 2))
        model(pixels=torch.zeros(2, 2))
    assert told == [(0, "scoring"), (3, "scoring"), (5, "scoring")]
    assert not model._forward_pre_hooks
