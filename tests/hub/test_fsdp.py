"""Real processes with sharded weights: FSDP2 on two learns what one process learns.

`fully_shard` directly, because accelerate runs DDP where it is asked for FSDP on a CPU.
"""

from pathlib import Path

import pytest
import torch
from fsdp_on_ranks import CASES, STEPS, rows, train_all
from ranks import on_ranks

import holdfast

SCRIPT = Path(__file__).with_name("fsdp_on_ranks.py")


def test_two_processes_with_sharded_weights_learn_what_one_learns(tmp_path: Path) -> None:
    on_ranks(SCRIPT, str(tmp_path))
    first, second = (torch.load(tmp_path / f"rank.{rank}.pt") for rank in (0, 1))
    alone = train_all(tmp_path, 0, 1)
    for case in CASES:
        losses = alone[case]["losses"]
        assert len(set(losses)) == STEPS
        for sharded in (first[case], second[case]):
            assert sharded["losses"] == pytest.approx(losses, abs=1e-5)
            for part in ("parameters", "state"):
                assert sharded[part].keys() == alone[case][part].keys()
                for name, value in alone[case][part].items():
                    torch.testing.assert_close(sharded[part][name], value, atol=1e-5, rtol=1e-4, msg=f"{case}: {name}")
        for name in first[case]["state"]:
            assert torch.equal(first[case]["state"][name], second[case]["state"][name]), f"{case}: {name}"
        loaded = holdfast.load(tmp_path / case).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=rows(STEPS)).logits, first[case]["logits"], atol=1e-5, rtol=1e-5)
