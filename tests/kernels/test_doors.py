"""Callers of kernels use their doors: they never ask whether a kernel applies, and never import Triton code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.kernels import clusters, select
from holdfast.kernels.statistics import update_running_mean

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
QUESTIONS = {"HAS_TRITON", "has_kernels", "has_linear_kernel"}
TRITON_MODULES = {"triton", "launch", "float32_parts"}


def asked(source: str) -> Iterator[str]:
    """Yield what a module imports from kernels, or reads from them, that only kernels may."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("holdfast.kernels"):
            names = {*node.module.split("."), *(alias.name for alias in node.names)}
            yield from sorted(names & (QUESTIONS | TRITON_MODULES))
        elif isinstance(node, ast.Attribute) and node.attr in QUESTIONS:
            yield node.attr


def test_no_caller_asks_whether_a_kernel_applies() -> None:
    assert list(asked("from holdfast.kernels.select import triton"))
    outside = [file for file in SOURCE.rglob("*.py") if "kernels" not in file.relative_to(SOURCE).parts]
    assert {str(file): found for file in outside if (found := list(asked(file.read_text())))} == {}


@pytest.mark.parametrize("how", select.WEIGHINGS)
def test_a_strip_of_no_width_is_top_k(how: select.Weighing) -> None:
    torch.manual_seed(0)
    scores = torch.rand(3, 7, 9)
    amounts = select.Amounts(scores, how)
    experts, weights = select.select_top_k(scores, amounts, 2)
    smooth, smooth_weights, gaps = select.select_smooth_top_k(scores, amounts, 2, torch.zeros(()), most=5, informed=False)
    assert torch.equal(smooth[..., :2], experts) and (smooth[..., 2:] == 9).all()
    assert torch.equal(smooth_weights[..., :2], weights) and (smooth_weights[..., 2:] == 0).all()
    assert gaps.isfinite().sum(-1).eq(3).all()  # the third to the fifth expert may fade in


def test_pairs_are_those_of_the_experts_that_tokens_choose() -> None:
    scores = torch.tensor([[[3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [1.0, 2.0, 3.0]]])
    real = torch.tensor([[True, True, False]])
    assert select.count_pairs(scores, None, 2).tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]
    assert select.count_pairs(scores, real, 2).tolist() == [[2, 1, 1], [1, 1, 0], [1, 0, 1]]


def test_clusters_scale_their_own_tokens_and_no_others() -> None:
    torch.manual_seed(0)
    tokens, weight, spreads = torch.randn(5, 4), torch.randn(3, 4), torch.rand(2, 4) + 0.5
    clusters_of = torch.tensor([0, 1, 2, 1, 0])  # there is no cluster 2
    groups = clusters.group(clusters_of, None, 2, tokens=tokens, weight=weight)
    scales = clusters.feature_scales(spreads, 0.1)
    each = torch.cat([scales[:2], torch.ones(1, 4)])[clusters_of]
    torch.testing.assert_close(clusters.clustered_linear(tokens, weight, groups, scales), (tokens * each) @ weight.t())
    sums, counts = clusters.deviations(tokens, None, groups, squared=False)
    assert counts.tolist() == [2, 2]
    torch.testing.assert_close(sums[0], (tokens[0] - tokens[4]).abs())


@pytest.mark.parametrize("due", [True, False])
def test_a_running_mean_starts_at_its_first_batch_and_moves_only_when_due(due: bool) -> None:
    mean, seen = torch.zeros(2), torch.zeros((), dtype=torch.uint8)
    for total, count in ((torch.tensor([8.0, 2.0]), 4), (torch.zeros(2), 0), (torch.tensor([0.0, 10.0]), 2)):
        update_running_mean(mean, seen, total, torch.tensor(count), torch.tensor(due), memory=0.5, is_sum=True)
    assert mean.tolist() == ([1.0, 2.75] if due else [0.0, 0.0]) and bool(seen) is due
