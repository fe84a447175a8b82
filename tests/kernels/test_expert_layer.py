"""A layer of experts in one function: the numbers, the gradients and the memory of four functions."""

import copy
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from holdfast import Experts
from holdfast.kernels import dispatch, grouped
from holdfast.kernels import expert_layer as one_function
from holdfast.kernels.dispatch import MOST_COLUMNS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
DIM, HIDDEN, COUNT, TOKENS, SLOTS = 24, 40, 5, 33, 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    found: list[str | None] = []
    run = one_function.expert_layer

    def counted(tokens: Tensor, chosen: Tensor, weights: Tensor, network: Any, *rest: Any) -> Tensor:
        found.append(network.activation)
        return run(tokens, chosen, weights, network, *rest)

    monkeypatch.setattr("holdfast.layers.experts.expert_layer", counted)
    return found


def made(device: str = "cpu", activation: Any = "relu", **options: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(DIM, HIDDEN, COUNT, activation=activation, device=device, **{"gated": False, "bias": True, **options})


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randn(TOKENS, dim, device=device, dtype=dtype, requires_grad=True)
    chosen = torch.rand(TOKENS, COUNT, device=device).argsort(-1)[:, :SLOTS]
    chosen[::4, 1] = COUNT  # unused slots
    weights = torch.rand(TOKENS, SLOTS, device=device)
    return tokens, chosen, weights.where(chosen < COUNT, 0.0).requires_grad_()


def in_four_functions() -> Any:
    """Hooks on saved tensors, which see everything that four functions save."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "float32"])
def test_it_equals_four_functions(device: str, activation: str, bias: bool, cast: bool, calls: list[str | None]) -> None:
    assert_equal_to_four_functions(device, activation, bias, cast, DIM)
    assert calls == [activation]


def assert_equal_to_four_functions(device: str, activation: str, bias: bool, cast: bool, dim: int) -> None:
    torch.manual_seed(0)
    experts = Experts(dim, HIDDEN, COUNT, activation=activation, gated=False, bias=bias, device=device)
    tokens, chosen, weights = inputs(device, dim=dim)
    results = []
    for in_four in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=cast), in_four_functions() if in_four else nullcontext():
            out = experts(tokens, chosen, weights)
        loss = (out.float() * torch.linspace(-1, 1, dim, device=device)).sum()
        results.append([out, *torch.autograd.grad(loss, [tokens, weights, *experts.parameters()])])
    for one, four in zip(*results, strict=True):
        assert one.dtype == four.dtype
        if device == "cpu":
            assert torch.equal(one, four)
        else:
            assert (one - four).norm() <= (2e-2 if cast else 1e-6) * four.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_wide_tokens_equal_four_functions(device: str, bias: bool, calls: list[str | None]) -> None:
    """One program cannot compute the dot product of such a token and a bias."""
    assert_equal_to_four_functions(device, "relu", bias, False, MOST_COLUMNS + 4)
    assert calls == ["relu"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_gated_experts_equal_four_functions_on_a_gpu(activation: str, bias: bool, calls: list[str | None]) -> None:
    experts, (tokens, chosen, weights) = made("cuda", activation, gated=True, bias=bias), inputs("cuda")
    results = []
    for in_four in (False, True):
        with in_four_functions() if in_four else nullcontext():
            out = experts(tokens, chosen, weights)
        results.append([out, *torch.autograd.grad(out.square().sum(), [tokens, weights, *experts.parameters()])])
    assert calls == [activation]
    for one, four in zip(*results, strict=True):
        torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_only_wanted_gradients_are_computed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, (tokens, chosen, weights) = made(device), inputs(device)
    products: list[str] = []

    def counted(name: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*given: Any) -> Tensor:
            products.append(name)
            return run(*given)

        return call

    monkeypatch.setattr(one_function, "grouped_outer", counted("grouped_outer", grouped.grouped_outer))
    monkeypatch.setattr(one_function, "sum_rows", counted("sum_rows", dispatch.sum_rows))
    every = [tokens, weights, *experts.parameters()]
    expected = torch.autograd.grad(experts(tokens, chosen, weights).square().sum(), every)
    for at, wanted in enumerate(every):
        for each in every:
            each.requires_grad_(each is wanted)
        products.clear()
        (found,) = torch.autograd.grad(experts(tokens, chosen, weights).square().sum(), wanted)
        assert torch.equal(found, expected[at])
        assert products == [[], ["grouped_outer"], ["sum_rows"]][0 if at < 2 else 1 if wanted.dim() == 3 else 2]


def test_a_graph_can_be_kept_for_another_backward() -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    loss = experts(tokens, chosen, weights).square().sum()
    first, second = (torch.autograd.grad(loss, [tokens, weights], retain_graph=keep) for keep in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [tokens, weights])


def test_what_was_used_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations of the second product are gone when the backward of the first one begins."""
    active: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    scale, combine = dispatch.scale_and_dot, dispatch.combine_rows

    def scale_and_dot(grad: Tensor, rows: Tensor, *rest: Any, **options: Any) -> Any:
        active.append(weakref.ref(rows))
        return scale(grad, rows, *rest, **options)

    def combine_rows(*given: Any) -> Tensor:
        alive.extend(each() is not None for each in active)
        return combine(*given)

    monkeypatch.setattr(one_function, "scale_and_dot", scale_and_dot)
    monkeypatch.setattr(one_function, "combine_rows", combine_rows)
    experts, (tokens, chosen, weights) = made(), inputs()
    for keep, expected in ((False, [False]), (True, [True])):
        active.clear()
        alive.clear()
        out = experts(tokens, chosen, weights)
        out.sum().backward(retain_graph=keep)
        assert alive == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_second_derivatives_are_right(device: str, activation: str) -> None:
    experts, (tokens, chosen, weights) = made(device, activation), inputs(device)
    every = [tokens, weights, *experts.parameters()]
    found = []
    for in_four in (False, True):
        with in_four_functions() if in_four else nullcontext():
            out = experts(tokens, chosen, weights)
        first = torch.autograd.grad(out.pow(3).sum(), every, create_graph=True)
        found.append(torch.autograd.grad(torch.stack([each.square().sum() for each in first]).sum(), every))
    for one, four in zip(*found, strict=True):
        torch.testing.assert_close(one, four, rtol=1e-3, atol=1e-3)


def test_gradients_can_be_batched() -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    found = [
        torch.autograd.functional.jacobian(lambda own: experts(own, chosen, weights), tokens, vectorize=way)
        for way in (True, False)
    ]
    torch.testing.assert_close(*found)
    out = experts(tokens, chosen, weights)
    (batched,) = torch.autograd.grad(out, tokens, torch.stack([out.detach(), 2 * out.detach()]), is_grads_batched=True)
    assert not batched.requires_grad
    torch.testing.assert_close(batched[1], 2 * batched[0])


def test_a_checkpoint_has_the_same_gradients(calls: list[str | None]) -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    every = [tokens, weights, *experts.parameters()]
    expected = torch.autograd.grad(experts(tokens, chosen, weights).square().sum(), every)
    for reentrant, in_one in ((True, ["relu"] * 2), (False, [])):  # reentrant: without hooks on what is saved
        calls.clear()
        out = torch.utils.checkpoint.checkpoint(experts, tokens, chosen, weights, use_reentrant=reentrant)
        out.square().sum().backward()
        assert calls == in_one
        for one, other in zip(every, expected, strict=True):
            torch.testing.assert_close(one.grad, other)
            one.grad = None


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_and_compilers_see_operators(calls: list[str | None]) -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    expected = experts(tokens, chosen, weights)
    assert calls == ["relu"]
    with Seen() as forward:
        experts(tokens, chosen, weights)
    assert {"holdfast::gather_mm", "holdfast::mm_combine"} <= forward.names
    with Seen() as backward:
        torch.autograd.grad(expected.sum(), tokens, retain_graph=True)
    assert {"holdfast::gather_mm_backward", "holdfast::mm_combine_backward"} <= backward.names
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)(tokens, chosen, weights)
    assert calls == ["relu"]
    torch.testing.assert_close(compiled, expected)


class Own(Tensor):
    pass


def test_tensors_of_another_class_run_by_stages(calls: list[str | None]) -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    experts(tokens.detach().as_subclass(Own), chosen, weights)
    experts(tokens, chosen, weights.detach().as_subclass(Own))
    assert calls == []


def test_an_activation_that_was_replaced_is_called(calls: list[str | None]) -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    before = experts(tokens, chosen, weights)
    experts.activation = torch.sin
    found = experts(tokens, chosen, weights)
    assert calls == ["relu"] and not torch.allclose(found, before)
    experts = made(activation=torch.sin)
    torch.testing.assert_close(found, experts(tokens, chosen, weights))


def test_a_weight_that_was_changed_in_between_is_refused() -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    out = experts(tokens, chosen, weights)
    with torch.no_grad():
        experts.down_proj.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_an_input_was_made_of_may_change_in_between() -> None:
    """Under autocast, products read copies; and nothing reads the experts of tokens again."""
    experts, (tokens, chosen, weights) = made(), inputs()
    outputs = []
    for changes in (False, True):
        own, experts_of = tokens * 1, chosen.clone()
        with torch.autocast("cpu", torch.bfloat16):
            out = experts(own, experts_of, weights)
        if changes:
            own += 1
            experts_of.zero_()
            with torch.no_grad():
                for parameter in experts.parameters():
                    if parameter.dim() == 3:
                        parameter.add_(1)
        outputs.append(torch.autograd.grad(out.float().square().sum(), [tokens, weights]))
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_kept_after_a_backward_under_a_mode() -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    out = experts(tokens, chosen, weights)
    expected = torch.autograd.grad(out.sum(), [tokens, weights, *experts.parameters()], retain_graph=True)
    with FlopCounterMode(display=False):
        found = torch.autograd.grad(out.sum(), [tokens, weights, *experts.parameters()])
    assert all(torch.equal(one, other) and not one.requires_grad for one, other in zip(found, expected, strict=True))
    assert out.grad_fn is not None and out.grad_fn.kept is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", ["SMALL_WEIGHTS", "SMALL_ROWS"])
def test_a_large_layer_runs_by_stages(limit: str, calls: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    size = sum(each.numel() for each in experts.parameters() if each.dim() == 3)
    monkeypatch.setattr(one_function, limit, size if limit == "SMALL_WEIGHTS" else chosen.numel() * HIDDEN)
    expected = experts(tokens, chosen, weights)
    assert calls == ["relu"]
    monkeypatch.setattr(one_function, limit, getattr(one_function, limit) - 1)
    assert torch.equal(experts(tokens, chosen, weights), expected) and calls == ["relu"]


def test_a_copy_runs_as_one_function_too(calls: list[str | None]) -> None:
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        experts = made(activation=activation)
        for each in (experts, copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
            each(*inputs())
        assert calls == [activation] * 3
        calls.clear()


def test_experts_can_be_traced() -> None:
    experts, given = made(), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trace is deprecated, and records what does not change
        traced = torch.jit.trace(experts, given)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced(*given), experts(*given))


def test_a_weight_of_a_slot_that_is_nan_spoils_only_what_it_reaches() -> None:
    experts, (tokens, chosen, weights) = made(), inputs()
    with torch.no_grad():
        weights[1, 0] = torch.nan
    found = []
    for in_four in (False, True):
        with in_four_functions() if in_four else nullcontext():
            out = experts(tokens, chosen, weights)
        found.append(torch.autograd.grad(out.square().sum(), [tokens, *experts.parameters()]))
    for one, four in zip(*found, strict=True):
        assert torch.equal(one.isnan(), four.isnan())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, (tokens, chosen, weights) = made(activation="gelu"), inputs()
    expected = experts(tokens, chosen, weights)
    made_here: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    combine = dispatch.combine_rows

    def grouped_mm(*given: Any, **options: Any) -> Tensor:
        found = grouped.grouped_mm(*given, **options)
        made_here.append(weakref.ref(found))
        return found

    def combine_rows(*given: Any) -> Tensor:
        alive.extend(each() is not None for each in made_here)
        return combine(*given)

    monkeypatch.setattr(one_function, "grouped_mm", grouped_mm)
    monkeypatch.setattr(one_function, "combine_rows", combine_rows)
    with mode():
        found = experts(tokens, chosen, weights)
    assert torch.equal(found, expected) and not found.requires_grad
    assert alive == [False, True]  # of the first product and the second, while the second is read


def test_a_backward_can_be_compiled() -> None:
    """By compiled autograd, which traces the backward of one step and runs what it compiled in the next."""
    from torch._dynamo import compiled_autograd
    from torch._dynamo.utils import counters

    experts, (tokens, chosen, weights) = made(), inputs()
    counters["compiled_autograd"].clear()
    for step in range(3):
        found = []
        for compiles in (False, True):
            loss = experts(tokens, chosen, weights + step).square().sum()
            with compiled_autograd._enable(torch.compile(backend="eager")) if compiles else nullcontext():
                loss.backward()
            found.append([each.grad for each in (tokens, *experts.parameters())])
            for each in (tokens, *experts.parameters()):
                each.grad = None
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
    assert counters["compiled_autograd"]["captures"] > 0
