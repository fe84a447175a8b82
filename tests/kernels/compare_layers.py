"""Comparisons of whole layers, as they run on a GPU, with the same layers on a CPU; test_comparisons.py has a case for each.

Without a GPU, the kernels run in Triton's interpreter, on the tensors of a CPU: all of the path to a kernel but the launch
is that of a GPU.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

import holdfast
from holdfast.kernels import balance, fp32_linear, grouped, operators, select

DIM, COUNT = 24, 5


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside the `with`, use kernels for tensors of a CPU."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(operators, "on_device_of", lambda _: nullcontext()))
        for module in (balance, fp32_linear, grouped, select):
            patches.enter_context(patch.object(module, "has_kernels", lambda tensor: tensor.numel() > 0))
        patches.enter_context(patch.object(holdfast.Experts, "_check"))  # it reads the indices, which it does not on a GPU
        yield


def layer(gated: bool, activation: str, bias: bool) -> holdfast.MoE:
    torch.manual_seed(0)
    router = holdfast.create_router("smoe", dim=DIM, experts=COUNT, k=2, losses=holdfast.Losses(balance=0.1))
    experts = holdfast.Experts(DIM, 20, COUNT, gated=gated, activation=activation, bias=bias)
    return holdfast.MoE(router, experts).train()


def results(made: holdfast.MoE, tokens: Tensor) -> list[Tensor]:
    tokens = tokens.clone().requires_grad_()
    out, routing = made(tokens)
    loss = (out * torch.linspace(-1, 1, DIM, device=out.device)).sum() + 10 * routing.loss
    grads = torch.autograd.grad(loss, [tokens, *made.parameters()])
    return [each.detach().cpu() for each in (out, routing.experts, routing.gates, routing.weights, routing.loss, *grads)]


def whole_layer(device: str, gated: bool, activation: str, bias: bool) -> None:
    """Outputs, losses and gradients."""
    tokens = torch.randn(2, 9, DIM)
    expected = results(layer(gated, activation, bias), tokens)
    with as_on_a_gpu() if device == "cpu" else nullcontext():
        got = results(layer(gated, activation, bias).to(device), tokens.to(device))
    assert torch.equal(got[1], expected[1])
    for one, other in zip(got, expected, strict=True):
        assert (one - other).double().norm() <= 1e-5 * other.double().norm()


def comparisons(device: str) -> dict[str, Callable[[], None]]:
    """Return what to compare on a device, by name."""
    kinds = itertools.product((False, True), ("relu", "gelu", "silu"), (False, True))
    return {f"layer {' '.join(map(str, kind))}": partial(whole_layer, device, *kind) for kind in kinds}
