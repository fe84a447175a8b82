"""The margin loss trains the distance that `certify` returns."""

import math
from typing import Any

import pytest
import torch
import transformers
from certificates.certified_routers import ROUTERS, SEQUENCES, build
from certificates.naive import effective_weights, plane_radii
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.certificates import certify
from holdfast.certificates.margins import shortfalls
from holdfast.certificates.planes import bisect_largest
from holdfast.certificates.router_conditions import describe_parts
from holdfast.layers.losses import margin
from holdfast.routing import Context, Linear, Router, create_router
from holdfast.routing.bounds import stretch

TRAINED = [name for name in ROUTERS if name not in SEQUENCES]
RADIUS = 0.3


def moved(router: Router) -> Router:
    """Move the weights: the projection of `xmoe` starts with equal singular values, where its norm has no gradient."""
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return router


def mean_shortfall(relative: list[float], radius: float) -> float:
    return sum(max(0.0, radius - each) / radius for each in relative) / len(relative)


@pytest.mark.parametrize("name", ["linear", "bias", "xmoe", "ac", "ac mixed", "smooth"])
def test_the_loss_is_that_of_a_loop_over_tokens_and_pairs(name: str) -> None:
    router, tokens, context = build(name)
    rows = tokens.flatten(0, 1)
    bias = getattr(router.score, "bias", None)
    bias = torch.zeros(router.experts) if bias is None else bias.detach()
    radii, _ = plane_radii(effective_weights(router, context), bias, rows, ROUTERS[name][3], "l2")
    relative = [radius / float(row.double().norm()) for radius, row in zip(radii, rows, strict=True)]
    found = margin(router, tokens, context, RADIUS)
    assert found.item() == pytest.approx(mean_shortfall(relative, RADIUS), rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_is_that_of_the_distances_that_certify_returns(name: str) -> None:
    router, tokens, context = build(name)
    found = certify(router, tokens, context, arithmetic=None)
    expected = mean_shortfall((found.distance / found.lengths).flatten().tolist(), RADIUS)
    assert 0.1 < expected < 1
    assert margin(router, tokens, context, RADIUS).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_in_tokens_and_weights_are_those_of_finite_differences(name: str) -> None:
    router, tokens, context = build(name)
    moved(router).double()
    tokens = tokens.double().requires_grad_()
    inputs = [tokens, *router.score.parameters()]

    def loss() -> Tensor:
        return shortfalls(router, tokens, context, RADIUS).mean()

    found = torch.autograd.grad(loss(), inputs, allow_unused=True)
    for value, gradient in zip(inputs, found, strict=True):
        direction = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(1))
        ends, step = [], 1e-4 if value.dim() == 1 else 1e-6  # routers read biases as float32
        for sign in (1, -1):
            with torch.no_grad():
                value += sign * step * direction
                ends.append(float(loss()))
                value -= sign * step * direction
        slope = 0.0 if gradient is None else float((gradient * direction).sum())
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-3, abs=5e-5)


@pytest.mark.parametrize("kind", ["smoe", "symphony", "xmoe", "ac", "smooth", "xmoe+symphony"])
def test_training_on_the_loss_raises_the_certified_share(kind: str) -> None:
    router, tokens, context = build({"smoe": "linear", "symphony": "symphony row"}.get(kind, kind))
    router.losses = holdfast.Losses(margin=1.0, radius=0.1)
    before = certify(router, tokens, context).share(0.1, relative=True)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.01)
    router.train()
    for _ in range(40):
        optimizer.zero_grad()
        router(tokens, context).loss.backward()
        optimizer.step()
    assert certify(router.eval(), tokens, context).share(0.1, relative=True) > before + 0.1


def test_the_gradient_reaches_the_tokens_of_a_router_that_is_not_trained() -> None:
    router = create_router("random", dim=12, experts=8, k=2, losses=holdfast.Losses(margin=1.0, radius=0.1)).train()
    tokens = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    router(tokens).loss.backward()
    assert tokens.grad is not None and tokens.grad.norm() > 0


@pytest.mark.parametrize("name", ["ac", "symphony row", "symphony+ac"])
def test_the_loss_changes_nothing_that_a_router_learns_without_gradients(name: str) -> None:
    states = []
    for losses in (holdfast.Losses(), holdfast.Losses(margin=1.0, radius=0.1)):
        router, tokens, context = build(name)
        router.losses = losses
        router.train()(tokens, context)
        states.append(dict(router.eval().named_buffers()))
    torch.testing.assert_close(states[1], states[0], atol=0, rtol=0)


def test_a_graph_of_zeros_gives_no_nan() -> None:
    """All gates are equal whatever the token is: the first experts are selected, and no perturbation flips it."""
    router = create_router("symphony", dim=12, experts=8, k=2, losses=holdfast.Losses(margin=1.0, radius=0.1)).train()
    tokens = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = router(tokens).losses["margin"]
    gradients = torch.autograd.grad(loss, [tokens, *router.parameters()], allow_unused=True)
    assert loss.item() == 0
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("kind", ["smoe", "symphony"])
def test_a_token_that_no_perturbation_flips_adds_nothing_and_no_nan(kind: str) -> None:
    """All experts have the same weights, and one has a larger bias; or all experts are used."""
    options: dict[str, Any] = {"bias": True} if kind == "smoe" else {"bias": True, "init": "identity"}
    router = create_router(kind, dim=12, experts=4, k=1, losses=holdfast.Losses(margin=1.0, radius=0.1), **options).train()
    with torch.no_grad():
        score = router.score
        assert isinstance(score, Linear) and score.bias is not None
        score.weight.copy_(score.weight[:1].expand(4, -1))
        score.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tokens = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = router(tokens).losses["margin"]
    gradients = torch.autograd.grad(loss, [tokens, *router.parameters()], allow_unused=True)
    assert loss.item() == 0
    assert all(gradient is None or not gradient.any() for gradient in gradients)
    everything = create_router("smoe", dim=12, experts=2, k=2, losses=holdfast.Losses(margin=1.0, radius=0.1)).train()
    assert everything(tokens).losses["margin"] == 0


def test_padding_does_not_count_and_empty_tokens_give_no_nan() -> None:
    router = create_router("smoe", dim=12, experts=8, k=2, losses=holdfast.Losses(margin=1.0, radius=0.2)).train()
    tokens = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    alone = router(tokens[:, :5]).losses["margin"]
    tokens[:, 5:] = 0
    tokens.requires_grad_()
    mask = torch.arange(8).expand(2, -1) < 5
    padded = router(tokens, Context(token_mask=mask)).losses["margin"]
    torch.testing.assert_close(padded, alone)
    router(tokens).loss.backward()
    assert tokens.grad is not None and tokens.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("similarity", "cannot train Similarity: tokens of a sequence share their gates"),
        ("capacity", "no certificate is known for a capacity limit"),
        ("mlp", "cannot train TwoLayer: it declares no order"),
        ("sparsemax", "no certificate is known for sparsemax"),
        ("softmoe", "experts do not depend on the token"),
    ],
)
def test_a_router_without_a_certificate_refuses_the_loss(kind: str, says: str) -> None:
    router = create_router(kind, dim=12, experts=8, k=2, losses=holdfast.Losses(margin=1.0, radius=0.1)).train()
    assert_refused(says, router, torch.randn(2, 8, 12))


def test_a_margin_without_a_radius_and_a_native_gate_are_refused() -> None:
    assert_refused("margin needs a radius", holdfast.Losses, margin=0.1)
    assert_refused("radius is inf", holdfast.Losses, margin=0.1, radius=math.inf)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    model = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
    assert_refused("margin needs a router", holdfast.reroute, model, "native", losses=holdfast.Losses(margin=1, radius=0.1))
    model = holdfast.reroute(model, "smoe", losses=holdfast.Losses(margin=1.0, radius=0.1)).train()
    ids = torch.randint(1, 16, (2, 8))
    with_margin = model(input_ids=ids, labels=ids).loss
    holdfast.reroute(model, "smoe", losses=holdfast.Losses())
    assert with_margin > model.train()(input_ids=ids, labels=ids).loss + 0.01


def test_a_root_found_by_bisection_has_the_gradient_of_the_equation_it_solves() -> None:
    a = torch.tensor([2.0, 5.0, 7.0], dtype=torch.float64, requires_grad=True)
    upper = torch.tensor([10.0, 10.0, 1.0], dtype=torch.float64, requires_grad=True)
    root = bisect_largest(lambda r: a - r**3, upper)
    expected = torch.tensor([2 ** (1 / 3), 5 ** (1 / 3), 1.0], dtype=torch.float64)
    torch.testing.assert_close(root.detach(), expected, atol=1e-8, rtol=0)
    of_a, of_upper = torch.autograd.grad(root.sum(), [a, upper])
    slopes = torch.tensor([2 ** (-2 / 3) / 3, 5 ** (-2 / 3) / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(of_a, slopes, atol=1e-6, rtol=0)  # autograd through the bisection gives none
    assert of_upper.tolist() == [0, 0, 1]


def test_the_stretch_is_the_largest_singular_value_and_has_its_gradient() -> None:
    source = torch.Generator().manual_seed(0)
    for shape in ((8, 64), (64, 8), (3, 5, 12)):
        matrix = torch.randn(shape, generator=source, dtype=torch.float64, requires_grad=True)
        found, expected = stretch(matrix, "l2").sum(), torch.linalg.matrix_norm(matrix, ord=2).sum()
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-8)
        torch.testing.assert_close(*(torch.autograd.grad(value, matrix)[0] for value in (found, expected)))
    equal = torch.linalg.qr(torch.randn(20, 6, generator=source, dtype=torch.float64)).Q
    assert float(stretch(equal, "l2")) == pytest.approx(1, rel=1e-8)
    assert float(stretch(torch.zeros(3, 4, dtype=torch.float64), "l2")) == 0


@pytest.mark.parametrize("experts", [8, 24])
@pytest.mark.parametrize("name", TRAINED)
def test_shapes_that_do_not_depend_on_values_give_the_same_radii(name: str, experts: int) -> None:
    router, tokens, context = build(name, experts=experts, k=experts // 4)
    radii = []
    for static in (False, True):
        with torch.no_grad():
            problems = describe_parts(router, tokens, context, "l2", static).problems()
            radii.append(torch.cat([problem.nearest(None).radius for _, problem in problems]))
    torch.testing.assert_close(*radii, atol=0, rtol=1e-12)
