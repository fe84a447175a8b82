"""One head of many against indexing."""

import pytest
import torch

from holdfast.ops.heads import take_head

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", [0, 2])
def test_a_head_and_its_gradient_are_those_of_indexing(head: int, device: str) -> None:
    rows = torch.randn(2, 37, 3, 20, device=device).transpose(1, 2).requires_grad_()
    got, expected = take_head(rows, torch.tensor([head], device=device)), rows[:, head]
    assert torch.equal(got, expected)
    grad = torch.randn_like(got)
    assert torch.equal(*(torch.autograd.grad(out, rows, grad)[0] for out in (got, expected)))
