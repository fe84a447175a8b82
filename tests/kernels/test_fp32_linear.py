"""float32 products that no switch can lower."""

import pytest
import torch

from holdfast.kernels.fp32_linear import linear_float32


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_product_and_its_gradients_stay_float32(setting: str) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(512, 256), torch.randn(16, 256), torch.randn(512, 16)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        out = linear_float32(*leaves)
        out.backward(grad)
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)
    exact = x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double()
    for got, expected in zip((out, leaves[0].grad, leaves[1].grad), exact, strict=True):
        assert got is not None
        assert (got - expected).norm() < 1e-6 * expected.norm()


def test_a_backward_inside_autocast_stays_float32() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256), torch.randn(16, 256)
    grads = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = linear_float32(*leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for plain, under_autocast in zip(*grads, strict=True):
        torch.testing.assert_close(under_autocast, plain, rtol=1e-5, atol=1e-4)


def test_low_precision_inputs_are_multiplied_as_float32_and_get_gradients_in_their_dtype() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    out = linear_float32(x, weight)
    assert out.dtype == torch.float32
    assert (out - (x.double() @ weight.double().t())).norm() < 1e-5
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
