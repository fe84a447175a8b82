"""Real processes: two on half of the batch each end with the state of one on the whole."""

import json
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

SCRIPT = Path(__file__).with_name("train_on_ranks.py")


@pytest.mark.parametrize(
    ("router", "states"),
    [
        (
            "ac+symphony+attention+smooth",
            {"score.spreads", "inform.0.graph", "inform.1.entropy", "select.width"},
        ),
        ("remoe", {"select.l1"}),
    ],
)
def test_two_processes_learn_what_one_learns(router: str, states: set[str], tmp_path: Path) -> None:
    """Graph, spreads, entropies, eps and the L1 coefficient, to 1e-6, after five steps of DDP."""
    for processes in (1, 2):
        on_ranks(SCRIPT, router, str(tmp_path / "state"), processes=processes)
    alone, first, second = (json.loads((tmp_path / f"state.{name}.json").read_text()) for name in ("1.0", "2.0", "2.1"))
    assert states <= set(alone)
    for name in (name for name in alone if "staged_" not in name):  # staged sums have been committed: scratch by now
        expected = torch.tensor(alone[name], dtype=torch.float64)
        for other in (first, second):
            torch.testing.assert_close(torch.tensor(other[name], dtype=torch.float64), expected, atol=1e-6, rtol=0, msg=name)
    moved = torch.tensor(alone["inform.0.graph"]) != torch.eye(8) if "inform.0.graph" in alone else torch.tensor([True])
    assert moved.any()
