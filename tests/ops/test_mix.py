"""Blocked mixing against the explicit N x N matrix, outputs and gradients; and that the matrix never exists."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.ops import mix
from holdfast.ops.mix import attention_entropy, softmax_mix

QUERIES, KEYS = 13, 17


def explicit(query: Tensor, key: Tensor, scale: float, causal: bool, real: Tensor | None, mask: Tensor | None) -> Tensor:
    """The weights as a (G,N,M) matrix; rows that may look at nothing are 0."""
    scores = scale * query @ key.transpose(1, 2)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        allowed &= torch.arange(KEYS) <= torch.arange(QUERIES).unsqueeze(1) + KEYS - QUERIES
    if real is not None:
        allowed &= real.unsqueeze(1)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores.masked_fill(~allowed, -1e30), -1) * allowed.any(-1, keepdim=True)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("kind", ["no mask", "bool mask", "bias"])
@pytest.mark.parametrize("block", [1, 2**22], ids=["small blocks", "one block"])
def test_blocks_equal_the_explicit_matrix(
    causal: bool, padded: bool, kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix, "BLOCK_ELEMENTS", {"cpu": block})
    monkeypatch.setattr(mix, "FEWEST_ROWS", 5)
    torch.manual_seed(0)
    query = torch.randn(2, QUERIES, 5, requires_grad=True)
    key, value = torch.randn(2, KEYS, 5, requires_grad=True), torch.randn(2, KEYS, 3, requires_grad=True)
    real = torch.rand(2, KEYS) < 0.7 if padded else None
    mask = {"no mask": None, "bool mask": torch.rand(1, QUERIES, KEYS) < 0.8, "bias": torch.randn(2, QUERIES, KEYS)}[kind]
    weights = explicit(query, key, 0.7, causal, real, mask)
    got = softmax_mix(query, key, value, scale=0.7, causal=causal, real=real, mask=mask)
    grad = torch.randn_like(got)
    leaves = (query, key, value)
    fast, slow = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(weights @ value, leaves, grad)
    for mine, theirs in zip([got, *fast], [weights @ value, *slow], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    entropy = attention_entropy(query, key, scale=0.7, causal=causal, real=real, mask=mask)
    torch.testing.assert_close(entropy, torch.special.entr(weights).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_query_that_may_look_at_nothing_gets_zero_and_no_nan() -> None:
    query, key = torch.randn(1, 3, 4, requires_grad=True), torch.randn(1, 3, 4, requires_grad=True)
    out = softmax_mix(query, key, torch.ones(1, 3, 2), scale=1.0, real=torch.zeros(1, 3, dtype=torch.bool))
    assert torch.equal(out, torch.zeros(1, 3, 2))
    out.sum().backward()
    assert torch.equal(query.grad, torch.zeros(1, 3, 4))  # type: ignore[arg-type]


def test_huge_scores_do_not_overflow() -> None:
    query = torch.tensor([[[1e4], [-1e4]]])
    out = softmax_mix(query, query, torch.eye(2).unsqueeze(0), scale=1.0)
    torch.testing.assert_close(out, torch.eye(2).unsqueeze(0))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("router", ["similarity", "attention"])
def test_sixteen_thousand_tokens_need_no_matrix_of_a_gigabyte(router: str) -> None:
    """N = 16,384, d = 64, E = 16, one sequence, forward and backward: below 300 MB more than before."""
    script = Path(__file__).with_name("peak_memory.py")
    run = subprocess.run([sys.executable, str(script), router], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert 1 < float(run.stdout) < 300, f"{run.stdout.strip()} MB"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("router", ["similarity", "attention"])
def test_a_mask_is_not_copied_for_every_head(router: str) -> None:
    """Two padded sequences of 4,096 under the model's own float mask (134 MB): nothing of that size besides, for 4 heads."""
    script = Path(__file__).with_name("peak_memory.py")
    run = subprocess.run([sys.executable, str(script), router, "masked"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert 1 < float(run.stdout) < 134 + 200, f"{run.stdout.strip()} MB"
