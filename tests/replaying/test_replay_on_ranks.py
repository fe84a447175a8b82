"""Two processes that replay routes compute what one process computes on the whole batch."""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from replay_on_ranks import CASES, train


@pytest.mark.slow
def test_two_processes_replay_what_one_replays(tmp_path: Path) -> None:
    on_ranks(Path(__file__).with_name("replay_on_ranks.py"), str(tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, router in CASES:
        alone = train(name, router, 0, 1)
        for rank in found:
            case = rank[f"{name}: {router}"]
            assert case["losses"] == pytest.approx(alone["losses"], abs=1e-4)
            torch.testing.assert_close(case["weights"], alone["weights"], atol=1e-4, rtol=1e-3)
