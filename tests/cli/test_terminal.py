"""Signs of life: a bar that knows how far a model is."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.cli import common
from holdfast.report.tables import Table


class Seen(nn.Module):
    def forward(self, pixels: torch.Tensor, **_: Any) -> torch.Tensor:
        return pixels


def test_a_bar_counts_the_inputs_of_a_model_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []

    @contextmanager
    def bar(total: float | None, *, leave: bool = True) -> Any:
        assert total == 5 and not leave
        yield lambda done, what: told.append((done, what))

    monkeypatch.setattr(common, "bar", bar)
    model = Seen()
    with common.forwards(model, "scoring", 5):
        model(torch.zeros(3, 2))
        model(pixels=torch.zeros(2, 2))
    assert told == [(3, "scoring"), (5, "scoring")]
    assert not model._forward_pre_hooks


def test_without_a_terminal_each_phase_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The bar would be drawn at its end only: a log would be empty until then."""
    seen = []
    with common.bar(4) as tell:
        for step in range(3):
            tell(step, "smoe, seed 0: train", f"step {step} of 2")
            seen.append(capsys.readouterr().err)
        tell(3, "smoe, seed 0: evaluate and attack")
        seen.append(capsys.readouterr().err)
    assert [bool(line) for line in seen] == [True, False, False, True]
    assert seen[0].endswith(" smoe, seed 0: train\n") and seen[3].endswith(" smoe, seed 0: evaluate and attack\n")


@pytest.mark.parametrize("columns", [None, "80", "20"])
def test_a_table_keeps_every_number_and_its_last_column(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe, which has no edge, and where there is too little room."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    routers = [f"router-{number}" for number in range(12)]
    figures = [f"+{number}234.567" for number in range(12)]
    rows = [["a long name of a row", *figures]]
    common.show(Table("Figures", ["a name that is not cut", *routers], rows, "The end of a caption."))
    shown = capsys.readouterr().out
    assert "…" not in shown and "a long name of a row" in shown
    assert [figure for figure in figures if figure not in shown] == []
    assert " ".join(shown.split()[-5:]) == "The end of a caption."
    if columns is None:
        assert all(name in shown for name in routers) and len(shown.splitlines()) == 5
