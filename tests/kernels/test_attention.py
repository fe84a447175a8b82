"""One head of many against indexing, and norms of projected values against the projected values, with their gradients.

compare_mixing.py compares the kernels.
"""

import pytest
import torch

from holdfast.kernels import attention
from holdfast.kernels.attention import take_heads

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CASES = [("cpu", torch.float32)] + ([("cuda", torch.bfloat16)] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", [0, 3])
def test_heads_and_their_gradients_are_those_of_indexing(head: int, device: str) -> None:
    """Four query heads share two key heads of another width."""
    own = torch.randn(2, 37, 4, 20, device=device).transpose(1, 2).requires_grad_()
    shared = torch.randn(2, 2, 37, 24, device=device, requires_grad=True)
    got = take_heads((own, shared), torch.tensor([head], device=device), 4)
    expected = own[:, head], shared[:, head // 2]
    for got_head, expected_head, rows in zip(got, expected, (own, shared), strict=True):
        assert torch.equal(got_head, expected_head)
        grad = torch.randn_like(got_head)
        grads = [torch.autograd.grad(out, rows, grad, retain_graph=True)[0] for out in (got_head, expected_head)]
        assert torch.equal(*grads)


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("way", ["by itself", "with its own gradients"])
@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_norms_and_their_gradients_are_those_of_the_vectors(
    biased: bool, way: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if device == "cpu":  # where there is no kernel
        monkeypatch.setattr(attention, "_projected_norms", attention.projected_norms)
    value, across, bias = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in ((13, 5), (5, 17), (17,))
    )
    leaves = [value, across, *([bias] if biased else [])]
    apply = attention.projected_norms if way == "by itself" else attention._ProjectedNorms.apply  # type: ignore[no-untyped-call]
    got = apply(value, across, bias if biased else None, 3)
    projected = 3 * value.double() @ across.double() + (bias.double() if biased else 0)
    expected = projected.square().sum(-1)
    grad = torch.randn_like(got)
    mine = torch.autograd.grad(got, leaves, grad)
    theirs = torch.autograd.grad(expected, leaves, grad.double())
    within = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=within, atol=10 * within)
