"""benchmarks/dense.py: what it prints of the seeds, and what it refuses before it trains."""

from pathlib import Path

import dense
import pytest


def test_intervals_are_those_of_a_comparison_for_any_number_of_seeds() -> None:
    assert dense.interval([3.0]) == {"mean": 3.0, "low": None, "high": None}
    three = dense.interval([1.0, 2.0, 3.0])
    assert three["low"] == pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-4)
    assert three["high"] == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4)
    seven = dense.interval([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert seven["high"] == pytest.approx(3 + 2.4469 * (14 / 3) ** 0.5 / 7**0.5, abs=1e-4)


def test_several_routers_are_refused_before_the_first_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dense, "Comparison", lambda *_, **named: pytest.fail("it trains"))
    monkeypatch.setattr("sys.argv", ["dense.py", "banking77", "--out", str(tmp_path), "--router", "smoe,smooth"])
    with pytest.raises(SystemExit):
        dense.main()
    assert "give one router" in capsys.readouterr().err
