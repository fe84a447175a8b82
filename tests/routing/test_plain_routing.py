"""A router that is nothing but top-k runs as one function, and nobody can tell."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from holdfast import Context, Losses, create_router
from holdfast.kernels.plain_top_k import plain_top_k
from holdfast.routing.scores import Linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture
def plain_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def counted(tokens: Tensor, weight: Tensor, k: int, **options: Any) -> Any:
        calls.append(k)
        return plain_top_k(tokens, weight, k, **options)

    monkeypatch.setattr("holdfast.routing.router.plain_top_k", counted)
    return calls


def smoe(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_router("smoe", dim=16, experts=6, k=2, **{"losses": Losses(balance=0.1, z=0.01), **options})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("losses", [Losses(balance=0.1), Losses(balance=0.1, z=0.01)], ids=["balance", "balance and z"])
def test_it_returns_what_the_stages_return(
    device: str, training: bool, padded: bool, losses: Losses, plain_calls: list[int]
) -> None:
    router = smoe(losses=losses).to(device).train(training)
    tokens = torch.randn(3, 9, 16, device=device, requires_grad=True)
    real = torch.ones(3, 9, dtype=torch.bool, device=device)
    real[0, 7:] = not padded
    results = []
    for by_stages in (False, True):
        handle = router.score.register_forward_hook(lambda *_: None) if by_stages else None
        routing = router(tokens, Context(token_mask=real if padded else None))
        loss = (routing.weights * torch.arange(2.0, device=device)).sum() + 10 * routing.loss
        results.append((routing, torch.autograd.grad(loss, [tokens, *router.parameters()])))
        if handle is not None:
            handle.remove()
    assert plain_calls == ([] if padded else [2])
    (one, found), (other, expected) = results
    for name in ("logits", "gates", "experts", "weights"):
        left, right = getattr(one, name), getattr(other, name)
        assert torch.equal(left, right) if device == "cpu" or name == "experts" else torch.allclose(left, right), name
    assert one.losses.keys() == other.losses.keys() and bool(one.losses) == training
    for name, value in other.losses.items():
        torch.testing.assert_close(one.losses[name], value)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7 if device == "cpu" else 1e-6)


WATCHED = {
    "a hook": lambda part: part.register_forward_hook(lambda *_: None),
    "a hook before": lambda part: part.register_forward_pre_hook(lambda *_: None),
    "a hook of the backward": lambda part: part.register_full_backward_hook(lambda *_: None),
    "a forward of another library": lambda part: setattr(part, "forward", part.forward),
}


@pytest.mark.parametrize("part", ["score", "select"])
@pytest.mark.parametrize("watched", WATCHED)
def test_parts_that_others_watch_are_called(part: str, watched: str, plain_calls: list[int]) -> None:
    router = smoe()
    WATCHED[watched](getattr(router, part))
    router(torch.randn(2, 5, 16))
    assert plain_calls == []


def test_global_hooks_see_the_parts(plain_calls: list[int]) -> None:
    router, seen = smoe(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    router(torch.randn(2, 5, 16))
    handle.remove()
    assert plain_calls == [] and "Linear" in seen and "TopK" in seen


class Doubled(Linear):
    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return 2 * super().forward(tokens, context)


def test_a_score_of_ones_own_is_called(plain_calls: list[int]) -> None:
    router, tokens = smoe(), torch.randn(2, 5, 16)
    before = router(tokens).logits
    weight = router.score.weight
    router.score = Doubled(16, 6)
    router.score.weight = weight
    assert plain_calls == [2] and torch.equal(router(tokens).logits, 2 * before) and plain_calls == [2]


OTHERS = [
    "smoe[bias=true]",
    "smoe[noise=gaussian]",
    "smoe[weights=switch]",
    "smooth",
    "symphony",
    "similarity",
    "ac",
    "xmoe",
]


@pytest.mark.parametrize("name", OTHERS)
def test_other_routers_run_by_stages(name: str, plain_calls: list[int]) -> None:
    torch.manual_seed(0)
    router = create_router(name, dim=16, experts=6, k=2)
    router(torch.randn(2, 5, 16), Context(causal=True))
    assert plain_calls == []


def test_recorded_routes_and_compilers_run_by_stages(plain_calls: list[int]) -> None:
    router, tokens = smoe().eval(), torch.randn(2, 5, 16)
    recorded = torch.tensor([4, 5]).expand(2, 5, 2)
    assert torch.equal(router(tokens, Context(replayed=recorded)).experts, recorded.flatten(0, 1))
    expected = router(tokens)
    assert plain_calls == [2]
    compiled = torch.compile(router, backend="eager", fullgraph=True)(tokens)
    assert plain_calls == [2] and torch.equal(compiled.experts, expected.experts)


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


def test_a_wrapper_around_a_part_is_called(plain_calls: list[int]) -> None:
    router, tokens = smoe(), torch.randn(2, 5, 16)
    before = router(tokens).logits
    router.score = Wrapper(router.score)
    assert torch.equal(router(tokens).logits, 3 * before) and plain_calls == [2]


def test_modes_and_transforms_see_the_parts(plain_calls: list[int]) -> None:
    router, tokens = smoe().eval(), torch.randn(4, 2, 5, 16)
    with FlopCounterMode(display=False):
        router(tokens[0])
    with torch.no_grad():
        found = torch.vmap(lambda own: router(own).weights)(tokens)
    assert plain_calls == []
    torch.testing.assert_close(found[1], router(tokens[1]).weights)


def test_a_checkpoint_recomputes_what_it_ran(plain_calls: list[int]) -> None:
    """A hook that is there in the forward, and not in the recomputation, must not change what is saved."""
    router, tokens = smoe().train(), torch.randn(2, 5, 16, requires_grad=True)
    expected = torch.autograd.grad(router(tokens).weights.square().sum(), tokens)
    handle = router.score.register_forward_hook(lambda *_: None)
    out = torch.utils.checkpoint.checkpoint(lambda own: router(own).weights, tokens, use_reentrant=False)
    handle.remove()
    found = torch.autograd.grad(out.square().sum(), tokens)
    assert plain_calls == [2] and torch.equal(found[0], expected[0])


def test_gradients_can_be_batched() -> None:
    router, tokens = smoe().eval(), torch.randn(1, 3, 16)
    found = [
        torch.autograd.functional.jacobian(lambda own: router(own).weights, tokens, vectorize=way) for way in (True, False)
    ]
    torch.testing.assert_close(*found)


def test_a_loss_is_a_new_tensor() -> None:
    router = create_router("smoe", dim=16, experts=6, k=2, losses=Losses(balance=0.1))
    routing = router(torch.randn(2, 5, 16))
    before, total = routing.losses["balance"].item(), routing.loss
    assert total.item() == before
    with torch.no_grad():
        total += 100
    assert routing.losses["balance"].item() == before


def test_weights_may_be_changed_in_place() -> None:
    router, tokens = smoe().eval(), torch.randn(2, 5, 16, requires_grad=True)
    expected = torch.autograd.grad((router(tokens).weights * 2).square().sum(), tokens)[0]
    weights = router(tokens).weights
    weights *= 2
    assert torch.equal(torch.autograd.grad(weights.square().sum(), tokens)[0], expected)


class TwiceTheLosses(Losses):
    def __call__(self, *given: Any, **options: Any) -> Any:
        return {name: 2 * value for name, value in super().__call__(*given, **options).items()}


@pytest.mark.parametrize("device", DEVICES)
def test_losses_of_ones_own_are_called(device: str) -> None:
    tokens = torch.randn(2, 5, 16, device=device)
    plain, doubled = (
        smoe(losses=losses).to(device)(tokens).loss for losses in (Losses(balance=0.1), TwiceTheLosses(balance=0.1))
    )
    torch.testing.assert_close(doubled, 2 * plain)


class Delegate:
    """Computes losses of its own, and passes attributes on."""

    def __init__(self, losses: Losses) -> None:
        self.losses = losses

    def __call__(self, *given: Any) -> Any:
        return {name: 0 * value for name, value in self.losses(*given).items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["losses"], name)


@pytest.mark.parametrize("device", DEVICES)
def test_an_object_that_passes_attributes_on_computes_its_own_losses(device: str) -> None:
    router: Any = smoe(losses=Delegate(Losses(balance=0.1))).to(device)
    assert router(torch.randn(2, 5, 16, device=device)).loss.item() == 0


COEFFICIENTS = {
    "numpy": np.float64(0.1),
    "numpy, 32 bits": np.float32(0.1),
    "int": 1,
    "bool": True,
    "tensor": torch.tensor(0.1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_a_coefficient_may_be_any_number(device: str, kind: str) -> None:
    coefficient: Any = COEFFICIENTS[kind]
    tokens = torch.randn(2, 5, 16, device=device)
    found, expected = (
        smoe(losses=Losses(balance=each)).to(device)(tokens).loss for each in (coefficient, float(coefficient))
    )
    torch.testing.assert_close(found, expected)


def test_only_a_plain_balance_loss_is_left_to_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Losses(balance=0.1).balance_alone == 0.1 and Losses(balance=1).balance_alone == 1.0
    for losses in (Losses(), Losses(balance=0.1, z=0.1), TwiceTheLosses(balance=0.1), Losses(balance=torch.tensor(0.1))):  # type: ignore[arg-type]
        assert losses.balance_alone is None
    monkeypatch.setattr(Losses, "__call__", lambda *given: {})
    assert Losses(balance=0.1).balance_alone is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_can_be_routed(dtype: torch.dtype) -> None:
    """Triton makes a size of 1 a constant."""
    router = smoe(losses=Losses(balance=0.1)).to("cuda", dtype).train()
    tokens = torch.randn(1, 1, 16, device="cuda", dtype=dtype, requires_grad=True)
    routing = router(tokens)
    (routing.weights[:, 0].sum() + routing.loss).backward()
    assert tokens.grad is not None and tokens.grad.isfinite().all()


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
        for one, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(one, expected)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
