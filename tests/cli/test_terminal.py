"""Signs of life: a bar that knows how far a model is."""

import logging
import re
import warnings
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import tiny
from torch import nn

import holdfast
from holdfast.cli import common
from holdfast.errors import one_line
from holdfast.progress import Lines, bar, duration, quiet
from holdfast.report.tables import Table


class Seen(nn.Module):
    def forward(self, pixels: torch.Tensor, **_: Any) -> torch.Tensor:
        return pixels


def test_a_bar_counts_the_inputs_of_a_model_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []

    @contextmanager
    def told_bar(total: float | None, *, leave: bool = True) -> Any:
        assert total == 5 and not leave
        yield lambda done, what: told.append((done, what))

    monkeypatch.setattr(common, "bar", told_bar)
    model = Seen()
    with common.forwards(model, "scoring", 5):
        model(torch.zeros(3, 2))
        model(pixels=torch.zeros(2, 2))
    assert told == [(3, "scoring"), (5, "scoring")]
    assert not model._forward_pre_hooks


def test_without_a_terminal_each_phase_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The bar would be drawn at its end only: a log would be empty until then."""
    seen = []
    with bar(4) as tell:
        for step in range(3):
            tell(step, "smoe, seed 0: train", f"step {step} of 2")
            seen.append(capsys.readouterr().err)
        tell(3, "smoe, seed 0: evaluate and attack")
        seen.append(capsys.readouterr().err)
    assert [bool(line) for line in seen] == [True, False, False, True]
    assert seen[0].endswith(" smoe, seed 0: train\n") and " smoe, seed 0: evaluate and attack, 75% done, about " in seen[3]


def test_lines_say_how_long_it_takes_and_come_at_least_every_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines(100, clock=lambda: now)
    training = [(0, 20, "train"), (30, 22, "train"), (61, 40, "train")]
    for now, done, phase in [*training, (70, 41, "attack"), (71, 41, "attack"), (4000, 42, "attack")]:  # noqa: B007
        lines(done, phase, f"step {done}")
    said = [line[9:] for line in capsys.readouterr().err.splitlines()]  # without the time of the day
    assert said == [
        "train",
        "train, step 40, 40% done, about 3 min left",  # 20 steps took 61 s, 60 are left
        "attack, 41% done, about 3 min left",
        "attack, step 42, 42% done, about 2 h 56 min left",
    ]


def test_lines_of_work_of_unknown_size_say_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(None)
    lines(1, "one")
    lines(2, "a phase\nwith a line end")
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["one", "a phase with a line end"]


def test_durations_are_short() -> None:
    assert [*map(duration, (0.4, 99, 100, 5940, 6000))] == ["0 s", "99 s", "2 min", "99 min", "1 h 40 min"]


@pytest.mark.every_combination
@pytest.mark.parametrize("columns", ["80", "120", "30"])
def test_a_bar_fits_its_terminal_and_keeps_the_end_of_a_long_path(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    with bar(10) as tell:
        tell(3, "/home/somebody/projects/robust/comparisons/of/routers/cells/smoe-seed0: words swapped", "batch 3 of 10")
    shown = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", capsys.readouterr().out)]
    assert max(map(len, shown)) <= int(columns)
    assert any("3 of 10 ━" in line for line in shown)
    assert any("/home" in line or "…" in line for line in shown)


def test_an_audit_in_python_shows_its_progress_unless_it_has_a_function_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    batch, model = {"input_ids": torch.randint(3, 64, (2, 8))}, tiny("mixtral")
    holdfast.audit(model, [batch], perturb=["none"], name="mine")
    said = [line[9:] for line in capsys.readouterr().err.splitlines() if " mine: " in line]
    assert said == ["mine: the unperturbed model", "mine: the same forward a second time"]
    told: list[str] = []
    holdfast.audit(model, [batch], perturb=["none"], progress=lambda done, what: told.append(what))
    assert "the unperturbed model" not in capsys.readouterr().err and told[0] == "the unperturbed model"


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


def test_commands_do_not_show_warnings_of_torch_and_keep_those_of_others() -> None:
    level = logging.getLogger("torch").level
    shown = [("own", "mine"), ("of transformers", "transformers.modeling_utils"), ("of torch", "torch.nn.functional")]
    shown += [("of C++ (Triggered internally at /pytorch/aten/x.cpp:7.)", "mine")]
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            quiet()
            for place, (message, module) in enumerate(shown):
                warnings.warn_explicit(message, UserWarning, f"{place}.py", 1, module=module)
        assert [str(warning.message) for warning in found] == ["own"]
        assert not logging.getLogger("torch.utils._pytree").isEnabledFor(logging.WARNING)
    finally:
        logging.getLogger("torch").setLevel(level)


def test_an_error_of_torch_is_one_line_without_its_trace() -> None:
    problem = RuntimeError(
        "The server socket has failed to listen.\nException raised from makeWithPort at /pytorch/x.cpp:1 (most recent call "
        "first):\nframe #0: c10::Error::Error() + 0x80 (0xffff in libc10.so)\n"
    )
    assert one_line(problem) == "The server socket has failed to listen."
