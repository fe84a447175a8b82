"""Second derivatives of the operators and of whole layers, against the naive mathematics; wrong ones would not raise."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from contexts import on_device
from references import reference
from router_names import MOE, needed
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context, Experts, MoE
from holdfast.kernels.attention import projected_norms, take_heads
from holdfast.kernels.fp32_linear import _linear_reference, linear_float32, scaled_linear_float32
from holdfast.kernels.grouped import naive as naive_grouped
from holdfast.kernels.operators import refuse_second_derivatives
from holdfast.kernels.select import WEIGHINGS, _weigh_reference
from holdfast.kernels.token_mixing import SecondProduct, softmax_mix
from holdfast.kernels.token_mixing import naive as naive_token_mixing
from holdfast.testing.router_under_test import VOCABULARY, RouterUnderTest

Function = Callable[..., Tensor]


def along(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The derivative of the gradient of a curved function of the output, along a direction."""
    inputs = [value.detach().clone().requires_grad_() for value in inputs]
    out = function(*inputs).cpu()
    total = (out.square() * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    grads = torch.autograd.grad(total, inputs, create_graph=True)
    slope = sum((grad * torch.linspace(-1, 2, grad.numel(), dtype=grad.dtype).view(grad.shape)).sum() for grad in grads)
    return list(torch.autograd.grad(slope, inputs, materialize_grads=True))  # type: ignore[arg-type]


def assert_same(function: Function, plain: Function, inputs: Sequence[Tensor], within: float = 1e-4) -> None:
    got, expected = along(function, inputs), along(plain, [value.double() for value in inputs])
    largest = max(float(value.norm()) for value in expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).norm() <= within * theirs.norm().clamp_min(0.1 * largest)


def mixing(**how: Any) -> tuple[Function, Function]:
    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return naive_token_mixing.mixing_weights(query, key, **how) @ value

    return lambda query, key, value: softmax_mix(query, key, value, **how), plain


REAL = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
MIXTURE, SCALES = torch.eye(3)[[0, 1, 2, 1, 0]], torch.rand(3, 6) + 0.5
ORDER = torch.full((192,), 5)
ORDER[:2], ORDER[64:67] = torch.tensor([0, 2]), torch.tensor([1, 3, 4])
ORDER[128:] = -7  # a tile that is not needed holds anything
OPERATORS: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "mix": (*mixing(scale=0.7), [(2, 7, 5), (2, 7, 5), (2, 7, 3)]),
    "mix, causal and padded": (*mixing(scale=0.7, causal=True, real=REAL), [(2, 7, 5), (2, 7, 5), (2, 7, 3)]),
    "mix of queries with themselves": (
        lambda query, value: softmax_mix(query, query, value, scale=0.5, causal=True),
        lambda query, value: naive_token_mixing.mixing_weights(query, query, 0.5, causal=True) @ value,
        [(2, 7, 5), (2, 7, 3)],
    ),
    "mix of two products": (
        lambda q, k, v, a, b, c: softmax_mix(q, k, v, scale=0.5, second=SecondProduct(a, b, 0.3), bias=c),
        lambda q, k, v, a, b, c: naive_token_mixing.mixing_weights(q, k, 0.5, second=(a, b, 0.3), bias=c) @ v,
        [(2, 7, 5), (2, 7, 5), (2, 7, 3), (2, 7, 4), (2, 7, 4), (2, 7)],
    ),
    "linear": (linear_float32, lambda x, w: x @ w.t(), [(5, 6), (4, 6)]),
    "scaled linear": (
        lambda x, w: scaled_linear_float32(x, MIXTURE, SCALES, w),
        lambda x, w: (x * (MIXTURE @ SCALES)) @ w.t(),
        [(5, 6), (4, 6)],
    ),
    "clustered linear": (  # tiles of 64: the first cluster's, then the second's
        lambda x, w: _linear_reference(x, w, ORDER, torch.tensor([0, 1, -1]), torch.tensor([1, 2]), SCALES),
        lambda x, w: (x * SCALES[[0, 1, 0, 1, 1]]) @ w.t(),
        [(5, 6), (4, 6)],
    ),
    "norms": (
        lambda v, a, b: projected_norms(v, a, b, 2),
        lambda v, a, b: (2 * v @ a + b).square().sum(-1),
        [(5, 3), (3, 6), (6,)],
    ),
    "heads": (
        lambda x: take_heads([x], torch.tensor([1]), 4)[0].square(),
        lambda x: x[:, 0].square(),
        [(2, 2, 5, 3)],
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_of_an_operator(name: str) -> None:
    function, plain, shapes = OPERATORS[name]
    generator = torch.Generator().manual_seed(0)
    assert_same(function, plain, [torch.randn(shape, generator=generator) for shape in shapes])


@pytest.mark.parametrize("how", WEIGHINGS)
def test_the_reference_of_the_selection_kernel_equals_its_weights(how: str) -> None:
    """The kernel runs on a GPU; this is its second derivative there. The strip's own path is the specification."""
    scores = torch.randn(5, 6)
    amounts = scores if how == "softmax" else scores.softmax(-1)
    selector = holdfast.routing.SmoothTopK(6, 2, eps=0.8, a=2.0, b=9.0)
    selector.rule = holdfast.routing.rules.Softmax(renormalise=how != "raw")
    kind = holdfast.routing.Scores(scores, scores.softmax(-1), informed=how == "shares", raw=scores)
    chosen = selector.eval()(kind, scores, Context())
    rest = 2, WEIGHINGS.index(how), how == "shares", *selector.powers, amounts  # type: ignore[arg-type]
    got = _weigh_reference(kind.key, chosen.experts, torch.tensor(0.8), torch.empty(0), *rest)
    torch.testing.assert_close(got, chosen.weights)


def layers(name: str, device: str = "cpu") -> tuple[Function, Function, list[Tensor]]:
    """The layer on a device and the naive mathematics, both as functions of tensors on the CPU."""
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=12, experts=5, **needed(name, vocabulary=VOCABULARY))
    subject = RouterUnderTest(router.train()).warm_up(2)
    module = MoE(subject.build().eval(), Experts(12, 6, 5))
    tokens = 2 * subject.tokens(1, 6)
    context = subject.context(tokens, causal=True)
    names = ["gate_up_proj", "down_proj"]
    there, around = copy.deepcopy(module).to(device), on_device(context, device)

    def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        experts = {f"experts.{names[0]}": up.to(device), f"experts.{names[1]}": down.to(device)}
        out, _ = torch.func.functional_call(there, experts, (x.to(device), around))
        return out

    def plain(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        routing = reference(module.router, x.float(), context)
        experts = routing.experts, routing.weights.double()
        out = naive_grouped.experts(x.flatten(0, 1), *experts, up, down, None, None, torch.nn.functional.silu, True)
        return out.view(x.shape)

    return run, plain, [tokens, *(module.experts.get_parameter(each).detach() for each in names)]


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MOE)
def test_second_derivatives_of_a_layer(name: str, device: str) -> None:
    assert_same(*layers(name, device), within=1e-3)


def pairs() -> list[str]:
    found = []
    for pair in itertools.combinations(MOE, 2):
        name = "+".join(pair)
        with contextlib.suppress(ValueError):  # both replace one stage, or one refuses informers
            holdfast.create_router(name, dim=12, experts=5, **needed(name))
            found.append(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", pairs())
def test_second_derivatives_of_a_layer_with_two_router_names(name: str, device: str) -> None:
    test_second_derivatives_of_a_layer(name, device)


def test_a_refusal_comes_when_it_is_differentiated() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x.square()
    y.register_hook(lambda grad: refuse_second_derivatives(grad, "these do not support second derivatives; use others."))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert_refused("second derivatives", grad.sum().backward)
    (2 * x.square()).sum().backward()  # a first derivative passes
