"""One head of many against indexing."""

import pytest
import torch

from holdfast.kernels.attention import take_heads

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", [0, 3])
def test_heads_and_their_gradients_are_those_of_indexing(head: int, device: str) -> None:
    """Of four, which share two: those of keys, of another width."""
    own = torch.randn(2, 37, 4, 20, device=device).transpose(1, 2).requires_grad_()
    shared = torch.randn(2, 2, 37, 24, device=device, requires_grad=True)
    got = take_heads((own, shared), torch.tensor([head], device=device), 4)
    expected = own[:, head], shared[:, head // 2]
    for mine, theirs, rows in zip(got, expected, (own, shared), strict=True):
        assert torch.equal(mine, theirs)
        grad = torch.randn_like(mine)
        assert torch.equal(*(torch.autograd.grad(out, rows, grad, retain_graph=True)[0] for out in (mine, theirs)))
