"""What stands in padding, be it NaN, infinite or huge, changes no output, loss, state or gradient of real tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from combinations import COMBINATIONS, HEADS, context_for
from contexts import on_device
from router_names import needed
from torch import Tensor

import holdfast
from holdfast import Context, Experts, FeedForward, Losses
from holdfast.layers import LAYERS
from holdfast.layers.moe import RoutedLayer
from holdfast.testing.router_under_test import with_padding

ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, needed(name)) for name in holdfast.list_routers()
} | COMBINATIONS
ROUTERS |= {"attention": ("attention", {"heads": HEADS}), "ac, mixed": ("ac", {"mix": 3, "stats": "batch"})}
ROUTERS |= {"smooth, by its loss": ("smooth", {"control": "loss", "eps": 0.5})}
ROUTERS |= {"smoe, learned noise": ("smoe", {"noise": "gaussian"}), "low rank": ("similarity", {"rank": 3})}
BAD = {"NaN": torch.nan, "infinity": torch.inf, "minus infinity": -torch.inf, "1e38": 1e38}
DIM, EXPERTS = 16, 8
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
REAL = torch.tensor([[True] * 9, [True] * 4 + [False] * 5, [False] * 3 + [True] * 6])


def layer(name: str) -> RoutedLayer:
    torch.manual_seed(0)
    router_name, options = ROUTERS[name]
    losses = Losses(balance=1.0, importance=1.0, load=1.0, z=0.1, entropy=1.0)
    router = holdfast.create_router(router_name, **{"dim": DIM, "experts": EXPERTS, **options, "losses": losses})
    return LAYERS[router.select.layer_kind](router, Experts(DIM, 8, EXPERTS, bias=True), FeedForward(DIM, 8, bias=True))


def padded_with(value: float, rows: Tensor, real: Tensor = REAL) -> Tensor:
    """`rows (B,N,...)` with `value` in padding, as a leaf that gets a gradient."""
    mask = real.view(*real.shape, *[1] * (rows.dim() - 2))
    return rows.detach().where(mask, value).requires_grad_()


def surroundings(value: float, tokens: Tensor) -> Context:
    """A context in which all rows of padding hold `value`."""
    context = with_padding(replace(context_for(tokens, EXPERTS), token_mask=REAL), REAL, value)
    assert context.attention is not None and context.attention.projection is not None
    context.attention.projection.weight.requires_grad_()
    return context


def outcome(
    name: str, value: float, *, training: bool = True, compiled: bool = False, device: str = "cpu"
) -> dict[str, Tensor]:
    """What two steps of a layer give where padding holds `value`: outputs of real tokens, losses, gradients, state."""
    module = layer(name).train(training).to(device)
    found: dict[str, Tensor | None] = {}
    forward = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    for step in range(2):
        torch.manual_seed(step)
        plain = torch.randn(*REAL.shape, DIM)
        tokens, context = padded_with(value, plain), on_device(surroundings(value, plain), device)
        attention = context.attention
        assert attention is not None and attention.projection is not None
        out, routing = forward(tokens.to(device), context)
        real = out[REAL.to(device)]
        total = (real * torch.linspace(-1, 1, real.numel(), device=device).view(real.shape)).sum() + routing.loss
        total.backward()
        found |= {f"output {step}": real, f"loss {step}": routing.loss, f"tokens {step}": tokens.grad}
        chosen = REAL.flatten().to(device)
        found |= {f"weights {step}": routing.weights[chosen], f"experts {step}": routing.experts[chosen]}
        found[f"projection {step}"] = attention.projection.weight.grad
    found |= {f"gradient of {key}": parameter.grad for key, parameter in module.named_parameters()}
    found |= dict(module.eval().named_buffers())
    return {key: value.detach() for key, value in found.items() if value is not None}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key
        assert value.isfinite().all(), key


@pytest.mark.parametrize("name", ROUTERS)
def test_values_in_padding_change_nothing(name: str) -> None:
    expected = outcome(name, 0.0)
    assert (expected["tokens 1"][~REAL] == 0).all()
    assert_same(outcome(name, torch.nan), expected)


@on_gpu
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ROUTERS)
def test_values_in_padding_change_nothing_on_a_gpu(name: str, bad: str) -> None:
    """Sums there may be taken in another order."""
    got, expected = outcome(name, BAD[bad], device="cuda"), outcome(name, 0.0, device="cuda")
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert value.isfinite().all(), key
        torch.testing.assert_close(got[key], value, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("bad", [name for name in BAD if name != "NaN"])
@pytest.mark.parametrize("name", ["symphony with similarity", "attention on xmoe", "ac, mixed", "smooth", "remoe"])
def test_infinite_and_huge_padding_changes_nothing(name: str, bad: str) -> None:
    assert_same(outcome(name, BAD[bad]), outcome(name, 0.0))


@pytest.mark.parametrize("name", ["smoe", "similarity", "symphony"])
def test_infinite_padding_in_float16_changes_no_gradient_of_a_router(name: str) -> None:
    """The bound for usable numbers in padding is beyond float16."""
    gradients = []
    for bad in (0.0, torch.inf):
        router = layer(name).router.train()
        torch.manual_seed(0)
        routing = router(padded_with(bad, torch.randn(*REAL.shape, DIM).half()), Context(token_mask=REAL))
        (routing.weights[REAL.flatten()][:, 0].sum() + routing.loss).backward()
        gradients.append({key: value.grad for key, value in router.named_parameters() if value.grad is not None})
    assert_same(gradients[1], gradients[0])


@pytest.mark.parametrize("name", ["similarity", "attention", "ac, mixed", "smooth"])
def test_values_in_padding_change_nothing_in_evaluation_with_gradients(name: str) -> None:
    """As attacks take them."""
    assert_same(outcome(name, torch.nan, training=False), outcome(name, 0.0, training=False))


@pytest.mark.slow
def test_values_in_padding_change_nothing_in_a_compiled_layer() -> None:
    torch.compiler.reset()
    got, expected = outcome("symphony with similarity", torch.nan, compiled=True), outcome("symphony with similarity", 0.0)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", holdfast.list_routers())
def test_a_gradient_of_nan_from_padding_stops_at_the_router(name: str) -> None:
    """Experts of other libraries return a gradient of NaN: the derivative of a slot's weight is that expert's output."""
    router = layer(name).router
    tokens = torch.randn(*REAL.shape, DIM, requires_grad=True)
    context = replace(context_for(tokens.detach(), EXPERTS), token_mask=REAL)
    with torch.no_grad():
        tokens[~REAL] = torch.nan
    routing = router(tokens, context)
    for values in (routing.weights, routing.gates, routing.logits):
        if values.requires_grad:
            grad = torch.ones_like(values).where(REAL.view(-1, 1), torch.nan)
            values.backward(grad, retain_graph=True)
    grads = [value.grad for value in (tokens, *router.parameters()) if value.grad is not None]
    assert grads or name == "hash"  # whose routing has no gradient
    assert all(grad.isfinite().all() for grad in grads)


def test_padding_that_can_be_computed_with_is_a_token_like_others() -> None:
    """SigLIP reads the last token of a text, padding or not."""
    module = layer("smoe").eval()
    tokens = torch.randn(*REAL.shape, DIM)
    out, routing = module(tokens, Context(token_mask=REAL))
    without, expected = module(tokens)
    assert torch.equal(out, without) and torch.equal(routing.weights, expected.weights)
    broken = tokens.clone()
    broken[1, -1] = torch.nan
    out, _ = module(broken.flatten(0, 1), Context(token_mask=REAL.view(1, -1)))
    torch.testing.assert_close(out[:-10], without.flatten(0, 1)[:-10])
    assert out.isfinite().all()
