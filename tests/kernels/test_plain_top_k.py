"""Plain top-k routing in one function: the same numbers as in three."""

import itertools

import pytest
import torch
from torch import Tensor

from holdfast.kernels.balance import reference as balance_reference
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.plain_top_k import plain_top_k
from holdfast.kernels.select import Amounts, select_top_k

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def in_one(tokens: Tensor, weight: Tensor, k: int) -> tuple[Tensor, ...]:
    *found, loss = plain_top_k(tokens, weight, k)
    assert loss is None
    return tuple(found)


def in_three(tokens: Tensor, weight: Tensor, k: int) -> tuple[Tensor, ...]:
    logits = linear_float32(tokens, weight).flatten(0, -2)
    experts, weights = select_top_k(logits, Amounts(logits, "softmax"), k)
    return logits, torch.softmax(logits, dim=-1), experts, weights


def inputs(device: str, dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randn(3, 40, 24, device=device, dtype=dtype)
    tokens[1, 5] = 0  # all logits are equal: the lower index wins
    weight = torch.randn(7, 24, device=device, dtype=weight_dtype)
    return tokens.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("used", [chosen for n in (1, 2, 3) for chosen in itertools.combinations((0, 1, 3), n)], ids=str)
def test_outputs_and_gradients_are_those_of_three_functions(
    device: str, k: int, dtypes: tuple[torch.dtype, torch.dtype], used: tuple[int, ...]
) -> None:
    tokens, weight = inputs(device, *dtypes)
    results = [function(tokens, weight, k) for function in (in_one, in_three)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) if device == "cpu" or one.dtype == torch.int64 else torch.allclose(one, other)
    grads = [torch.randn_like(results[0][at]) for at in used]
    found, expected = (torch.autograd.grad([result[at] for at in used], [tokens, weight], grads) for result in results)
    # Three gradients are added up in another order.
    is_exact = len(used) < 3 and device == "cpu"
    rtol, atol = (0.0, 0.0) if is_exact else (1e-4, 1e-5) if dtypes[0] == torch.float32 else (2e-2, 1e-2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
def test_only_wanted_gradients_are_computed(device: str) -> None:
    tokens, weight = inputs(device, torch.float32)
    (of_weight,) = torch.autograd.grad(plain_top_k(tokens.detach(), weight, 2)[3].square().sum(), weight)
    (of_tokens,) = torch.autograd.grad(plain_top_k(tokens, weight.detach(), 2)[3].square().sum(), tokens)
    both = torch.autograd.grad(plain_top_k(tokens, weight, 2)[3].square().sum(), [tokens, weight])
    assert torch.equal(of_tokens, both[0]) and torch.equal(of_weight, both[1])


@pytest.mark.parametrize("device", DEVICES)
def test_it_can_be_differentiated_twice(device: str) -> None:
    tokens, weight = inputs(device, torch.float32)
    found = []
    for function in (in_one, in_three):
        logits, gates, _, weights = function(tokens, weight, 2)
        loss = (
            (weights.square() * torch.tensor([1.0, 3.0], device=device)).sum() + gates.pow(3).sum() + logits.square().mean()
        )
        first = torch.autograd.grad(loss, [tokens, weight], create_graph=True)
        squares = torch.stack([each.square().sum() for each in first]).sum()
        found.append(torch.autograd.grad(squares, [tokens, weight]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("twice", [False, True])
def test_on_a_gpu_it_computes_the_balance_loss(twice: bool) -> None:
    tokens, weight = inputs("cuda", torch.float32)
    found = []
    for one in (True, False):
        _, gates, experts, weights, loss = plain_top_k(tokens, weight, 2, balance=0.3 if one else None)
        assert (loss is None) != one
        own = 0.3 * balance_reference(gates, experts, None, None) if loss is None else loss
        total = 5 * own + weights.square().sum() + gates.pow(3).mean()
        grads = torch.autograd.grad(total, [tokens, weight], create_graph=twice)
        if twice:
            squares = torch.stack([each.square().sum() for each in grads]).sum()
            grads = torch.autograd.grad(squares, [tokens, weight])
        found.append((own, *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
