"""The activation `gelu_new` is transformers' formula to the last bit, with the derivatives of torch's function."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from transformers.activations import NewGELUActivation

from holdfast.layers import gelu_new as module
from holdfast.layers.gelu_new import gelu_new

torch_gelu = partial(F.gelu, approximate="tanh")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"a number": (), "none": (0, 64), "odd": (257, 63), "whole vectors": (4, 50, 128)}


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.every_combination
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("block", [module.BLOCK, 2**9], ids=["one block", "blocks"])
def test_it_is_the_formula_bit_for_bit(
    block: int, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    formula, x = NewGELUActivation(), numbers(*shape, dtype=dtype)
    found = gelu_new(x)
    assert found.dtype == dtype and torch.equal(found, formula(x))
    if x.dim():  # the gates of gated experts are half rows
        assert torch.equal(gelu_new(torch.cat([x, x], dim=-1).chunk(2, dim=-1)[0]), found)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = gelu_new(x), formula(x)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_its_derivatives_are_those_of_torch() -> None:
    x, grad = numbers(5, 7).requires_grad_(), numbers(5, 7)
    assert torch.autograd.gradcheck(gelu_new, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(gelu_new, x, check_batched_grad=True)
    found, expected = (torch.autograd.grad(function(x), x, grad)[0] for function in (gelu_new, torch_gelu))
    assert torch.equal(found, expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, grad)
        tangents = [forward_ad.unpack_dual(function(dual)).tangent for function in (gelu_new, torch_gelu)]
        assert torch.equal(*tangents)


def test_it_can_be_transformed_compiled_and_exported() -> None:
    x = numbers(3, 7)
    for transform in (torch.func.vmap, torch.func.hessian, lambda each: torch.func.jacfwd(torch.func.jacfwd(each))):
        torch.testing.assert_close(transform(gelu_new)(x), transform(torch_gelu)(x))
    torch.compiler.reset()
    compiled = torch.compile(gelu_new, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(compiled(leaf).sum(), leaf), torch.autograd.grad(gelu_new(leaf).sum(), leaf)
    )

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gelu_new(x)

    torch.testing.assert_close(torch.export.export(Module(), (x,)).module()(x), gelu_new(x))
