"""A router runs its stages one by one, so that wrappers, modes, transforms and compilers of PyTorch see each of them."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import Losses, create_router

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def smoe(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_router("smoe", dim=16, experts=6, k=2, **{"losses": Losses(balance=0.1, z=0.01), **options})


class Wrapper(nn.Module):
    """Passes attributes on, as FSDP and PEFT do, and changes the logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any) -> Tensor:
        out: Tensor = 3 * self.inner(*arguments)
        return out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_a_wrapper_around_a_part_is_called() -> None:
    router, tokens = smoe(), torch.randn(2, 5, 16)
    before = router(tokens).logits
    router.score = Wrapper(router.score)
    assert torch.equal(router(tokens).logits, 3 * before)


def test_forwards_and_gradients_can_be_batched() -> None:
    router, tokens = smoe().eval(), torch.randn(4, 1, 3, 16)
    with torch.no_grad():
        found = torch.vmap(lambda own: router(own).weights)(tokens)
    torch.testing.assert_close(found[1], router(tokens[1]).weights)
    jacobians = [
        torch.autograd.functional.jacobian(lambda own: router(own).weights, tokens[0], vectorize=way)
        for way in (True, False)
    ]
    torch.testing.assert_close(*jacobians)


def test_a_loss_is_a_new_tensor() -> None:
    routing = smoe(losses=Losses(balance=0.1))(torch.randn(2, 5, 16))
    before, total = routing.losses["balance"].item(), routing.loss
    assert total.item() == before
    with torch.no_grad():
        total += 100
    assert routing.losses["balance"].item() == before


COEFFICIENTS: dict[str, Any] = {
    "numpy": np.float64(0.1),
    "numpy, 32 bits": np.float32(0.1),
    "int": 1,
    "bool": True,
    "tensor": torch.tensor(0.1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_a_coefficient_may_be_any_number(device: str, kind: str) -> None:
    tokens = torch.randn(2, 5, 16, device=device)
    found, expected = (
        smoe(losses=Losses(balance=each)).to(device)(tokens).loss for each in (COEFFICIENTS[kind], float(COEFFICIENTS[kind]))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_can_be_routed(dtype: torch.dtype) -> None:
    """Triton makes a size of 1 a constant."""
    router = smoe(losses=Losses(balance=0.1)).to("cuda", dtype).train()
    tokens = torch.randn(1, 1, 16, device="cuda", dtype=dtype, requires_grad=True)
    routing = router(tokens)
    (routing.weights[:, 0].sum() + routing.loss).backward()
    assert tokens.grad is not None and tokens.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_under_a_mode_and_a_compiled_one_have_the_same_gradients(device: str) -> None:
    from torch._dynamo import compiled_autograd

    router = smoe(losses=Losses(balance=0.1)).to(device)
    tokens = torch.randn(2, 5, 16, device=device, requires_grad=True)
    found = []
    for context in (nullcontext, Mode, lambda: compiled_autograd._enable(torch.compile(backend="eager"))):
        routing = router(tokens)
        loss = routing.weights[:, 0].sum() + 10 * routing.loss
        with context():
            loss.backward()
        found.append((tokens.grad, router.score.weight.grad))
        tokens.grad = router.score.weight.grad = None
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
