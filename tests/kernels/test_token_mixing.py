"""Blocked mixing against the explicit N x N matrix, outputs and gradients; and that the matrix never exists."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.kernels.attention import attention_entropy, sampled
from holdfast.kernels.token_mixing import Levels, SecondProduct, blocks, naive, softmax_mix, softmax_mix_with_total

QUERIES, KEYS = 13, 17


@pytest.fixture(params=[1, 2**22], ids=["small blocks", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of queries hold this many scores, but at least five queries."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": request.param})
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 5)


def mask_of(kind: str, *shape: int) -> torch.Tensor | None:
    """Return no mask, a bool one for all groups, or one of numbers; `shape` has no groups, of which there are two."""
    return {"no mask": None, "bool mask": torch.rand(1, *shape) < 0.8, "bias": torch.randn(2, *shape)}[kind]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("kind", ["no mask", "bool mask", "bias"])
@pytest.mark.parametrize("twice", [True, False], ids=["two products", "one product"])
@pytest.mark.usefixtures("block")
def test_blocks_equal_the_explicit_matrix(causal: bool, padded: bool, kind: str, twice: bool) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, QUERIES, 5, requires_grad=True)
    key, value = torch.randn(2, KEYS, 5, requires_grad=True), torch.randn(2, KEYS, 3, requires_grad=True)
    real = torch.rand(2, KEYS) < 0.7 if padded else None
    mask = mask_of(kind, QUERIES, KEYS)
    leaves = [query, key, value]
    second, bias = None, None
    if twice:
        other = torch.randn(2, QUERIES, 4, requires_grad=True), torch.randn(2, KEYS, 4, requires_grad=True)
        second, bias = SecondProduct(*other, 0.3), torch.randn(2, KEYS, requires_grad=True)
        leaves += [*other, bias]
    weights = naive.mixing_weights(query, key, 0.7, causal, real, mask, second, bias)
    got = softmax_mix(query, key, value, scale=0.7, causal=causal, real=real, mask=mask, second=second, bias=bias)
    grad = torch.randn_like(got)
    fast, slow = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(weights @ value, leaves, grad)
    for mine, theirs in zip([got, *fast], [weights @ value, *slow], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["no mask", "bool mask", "bias"])
@pytest.mark.parametrize("size", [1.0, 1e19], ids=["float32", "float64"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@torch.no_grad()
def test_one_query_without_gradients_equals_the_explicit_matrix(kind: str, size: float, compiled: bool) -> None:
    """A step of decoding. The second group has no key that is real; keys and values of padding are NaN."""
    torch.manual_seed(0)
    size = 1.0 if compiled else size  # compiled, huge operands are not looked for
    query, key, value = size * torch.randn(2, 1, 5), size * torch.randn(2, KEYS, 5), torch.randn(2, KEYS, 3)
    real = (torch.rand(2, KEYS) < 0.7) & torch.tensor([[True], [False]])
    mask = mask_of(kind, 1, KEYS)
    second = SecondProduct(torch.randn(2, 1, 4), torch.randn(2, KEYS, 4), 0.3)
    levels, bias = Levels(torch.rand(2, 1) + 0.5, torch.rand(2, KEYS)), torch.randn(2, KEYS)
    limits: dict[str, Any] = {"real": real, "mask": mask, "bias": bias, "levels": levels}
    exact = (query.double(), key.double(), 0.7 / size**2, True)
    weights = naive.mixing_weights(*exact, second=second, **limits)
    totals = naive.log_totals(*exact, second=second, **limits)
    key, value = (rows.masked_fill(~real.unsqueeze(-1), torch.nan) for rows in (key, value))
    run: Any = torch.compile(softmax_mix_with_total, backend="aot_eager") if compiled else softmax_mix_with_total
    out, log_total = run(query, key, value, scale=0.7 / size**2, causal=True, second=second, **limits)
    expected = (weights @ value.nan_to_num().double()).float()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_total, totals.float(), atol=1e-5, rtol=1e-5)
    assert (out[0] != 0).all() and (out[1] == 0).all() and (log_total[1] == -torch.inf).all()
    mixed = softmax_mix(query, key, value, scale=0.7 / size**2, causal=True, second=second, **limits)
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("levelled", [True, False], ids=["levels", "no levels"])
@pytest.mark.parametrize("size", [1.0, 1e19], ids=["float32", "float64"])
@pytest.mark.parametrize("twice", [True, False], ids=["second derivative", "first derivative"])
@pytest.mark.parametrize("block", [1], indirect=True, ids=["small blocks"])
@pytest.mark.usefixtures("block")
def test_totals_and_levels_equal_those_of_the_explicit_matrix(
    causal: bool, padded: bool, levelled: bool, size: float, twice: bool
) -> None:
    """Outputs and gradients, of `out` and `log_total` together; some queries may attend to nothing."""
    torch.manual_seed(0)
    query, key = ((size * torch.randn(2, rows, 5)).requires_grad_() for rows in (QUERIES, KEYS))
    value = torch.randn(2, KEYS, 3, requires_grad=True)
    other = torch.randn(2, QUERIES, 4, requires_grad=True), torch.randn(2, KEYS, 4, requires_grad=True)
    bias = torch.randn(2, KEYS, requires_grad=True)
    real = torch.rand(2, KEYS) < 0.7 if padded else None
    levels = Levels(torch.randn(2, QUERIES), torch.randn(2, KEYS)) if levelled else None
    if levels is not None:
        levels.query[:, 0] = -100.0
    leaves: list[torch.Tensor] = [query, key, value, *other, bias]
    how: dict[str, Any] = {"scale": 0.7 / size**2, "causal": causal, "real": real, "levels": levels}
    how |= {"second": SecondProduct(*other, 0.3), "bias": bias}
    out, total = softmax_mix_with_total(query, key, value, **how)
    expected = naive.mixing_weights(query.double(), key.double(), **how).float() @ value
    expected_total = naive.log_totals(query.double(), key.double(), **how).float()
    torch.testing.assert_close(softmax_mix(query, key, value, **how), out)
    assert not levelled or (total[:, 0] == -torch.inf).all()
    grads = []
    for found, found_total in ((out, total), (expected, expected_total)):
        reachable = expected_total > -torch.inf
        objective = (found * torch.linspace(-1, 1, 3)).sum() + found_total[reachable].sin().sum()
        slopes = torch.autograd.grad(objective, leaves, create_graph=twice)
        if twice:
            sizes = (size, size, 1, 1, 1, 1)
            moved = torch.stack([(each * factor).sin().sum() for each, factor in zip(slopes, sizes, strict=True)])
            slopes = torch.autograd.grad(moved.sum(), leaves)
        grads.append([found, found_total, *slopes])
    for mine, theirs in zip(*grads, strict=True):
        scale = theirs[theirs.isfinite()].abs().max().clamp_min(1e-30)
        torch.testing.assert_close(mine / scale, theirs / scale, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("kind", ["no mask", "bool mask", "bias"])
@pytest.mark.usefixtures("block")
def test_entropies_equal_those_of_the_explicit_matrix(causal: bool, padded: bool, kind: str) -> None:
    """Four heads, two of which share keys."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, QUERIES, 5), torch.randn(2, 2, KEYS, 5)
    real = torch.rand(2, KEYS) < 0.7 if padded else None
    mask = mask_of(kind, 4 if kind == "bias" else 1, QUERIES, KEYS)
    got = attention_entropy(query, key, scale=0.7, causal=causal, real=real, mask=mask)
    for head in range(4):
        own = None if mask is None else mask[:, head if mask.shape[1] > 1 else 0]
        weights = naive.mixing_weights(query[:, head], key[:, head // 2], 0.7, causal, real, own)
        torch.testing.assert_close(got[:, head], torch.special.entr(weights).sum(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("rows", [1, 270], ids=["one row of the mask", "a row for each"])
def test_entropies_of_some_blocks_are_those_among_all(causal: bool, rows: int) -> None:
    torch.manual_seed(0)
    query, key, real = torch.randn(2, 4, 270, 5), torch.randn(2, 2, 300, 5), torch.rand(2, 300) < 0.7
    given: dict[str, Any] = {"scale": 0.7, "causal": causal, "real": real, "mask": torch.randn(1, 4, rows, 300)}
    everything = attention_entropy(query, key, **given)
    for step, first in ((1, 0), (2, 64), (3, 64), (4, 128)):
        assert sampled(270, step)[0].start == first
        some = torch.cat([everything[:, :, block] for block in sampled(270, step)], 2)
        torch.testing.assert_close(attention_entropy(query, key, **given, step=step), some)


def test_a_gradient_that_is_not_needed_changes_no_other() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, QUERIES, 5), torch.randn(2, KEYS, 5)
    value = torch.rand(2, KEYS, 3, requires_grad=True)
    grads = []
    for wanted in (False, True):
        out = softmax_mix(query.requires_grad_(wanted), key.requires_grad_(wanted), value, scale=0.7)
        grads.append(torch.autograd.grad(out.square().sum(), value)[0])
    assert torch.equal(*grads)


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


LONG: dict[tuple[str, ...], int] = {
    # N = 16,384, d = 64, E = 16, one sequence, forward and backward: no matrix of a gigabyte
    **{(name,): 300 for name in ("similarity", "attention", "similarity[from=confident]", "attention[heads=all]")},
    # Two padded sequences of 4,096 under the model's own float mask (134 MB): it is not copied for every head, of 4
    **{(name, "masked"): 134 + 200 for name in ("similarity", "attention")},
}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize("arguments", LONG, ids=" ".join)
def test_long_sequences_need_little_memory(arguments: tuple[str, ...]) -> None:
    script = Path(__file__).with_name("peak_memory.py")
    run = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert 1 < float(run.stdout) < LONG[arguments], f"{run.stdout.strip()} MB"
