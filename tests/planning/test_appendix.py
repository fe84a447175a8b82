"""DeepSeek-V3 with Symphony, as the appendix F.1 of its paper counts it, and as this library does."""

import pytest

from holdfast.planning import plan, symphony_by_the_paper, symphony_here
from holdfast.planning.meta_model import Change, Choice, build_on_meta, read_config
from holdfast.planning.model_shape import Setting, measure_shape
from holdfast.planning.planning import Workload

DEEPSEEK = {"layers": 58, "experts": 256, "tokens": 4096}
MIB, BINARY_GIGA = 2**20, 2**30


def test_the_numbers_of_the_paper() -> None:
    paper = symphony_by_the_paper(**DEEPSEEK, k=8)
    assert paper.inference_bytes / MIB == 14.5
    assert paper.training_bytes / MIB == 39.875
    assert paper.inference_operations / BINARY_GIGA == 14.5
    assert round(paper.training_operations / BINARY_GIGA, 2) == 14.51


def test_symphony_here_equals_the_planned_model() -> None:
    here = symphony_here(**DEEPSEEK)
    config = read_config("deepseek_v3")
    shape = measure_shape(build_on_meta(config, Choice("symphony", "symphony"), Change()), Setting(4096))
    graphs = [sparse.part_flops["expert graph"] for sparse in shape.sparse]
    assert len(graphs) == 58
    assert shape.state == here.inference_bytes == here.training_bytes
    assert sum(graph.forward for graph in graphs) * 4096 == here.inference_operations
    assert sum(graph.training for graph in graphs) * 4096 == here.training_operations
    paper = symphony_by_the_paper(**DEEPSEEK, k=8)
    assert here.inference_operations == 2 * paper.inference_operations  # a multiply-add is 2
    assert here.inference_bytes == 2 * paper.inference_bytes + 58  # the staged counts, and a flag a layer


def test_the_size_of_the_model_that_the_paper_compares_with() -> None:
    """1250 GB: of the 671 billion parameters in 2 bytes, in units of 2^30. And hundreds of TFLOPs for 4096 tokens."""
    (native,) = plan("deepseek_v3", ["native"], workload=Workload(sequence=4096)).columns
    assert native.training_memory.weights / BINARY_GIGA == pytest.approx(1250, abs=0.2)
    assert native.active_parameters == pytest.approx(37e9, rel=0.02)
    assert 1e14 < native.forward.total * 4096 < 1e15
