"""DeepSeek-V3, with whose size the appendix F.1 of Symphony's paper compares; docs/scaling.md counts its router."""

import pytest

from holdfast.planning import Workload, plan

BINARY_GIGA = 2**30


def test_the_size_of_the_model_that_the_paper_compares_with() -> None:
    """1250 GB: of the 671 billion parameters in 2 bytes, in units of 2^30. And hundreds of TFLOPs for 4096 tokens."""
    (native,) = plan("deepseek_v3", ["native"], workload=Workload(sequence=4096)).columns
    assert native.training_memory.weights / BINARY_GIGA == pytest.approx(1250, abs=0.2)
    assert native.active_parameters == pytest.approx(37e9, rel=0.02)
    assert 1e14 < native.forward.total * 4096 < 1e15
