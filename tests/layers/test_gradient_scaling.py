"""Gradients of experts that are scaled by their load: against a loop over tokens, and in models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from wording import assert_refused

import holdfast
from holdfast import Context, Experts, MoE, create_router

EXPERTS, DIM = 6, 8


def layer(name: str = "smoe", **options: Any) -> MoE:
    torch.manual_seed(0)
    router = create_router(name, dim=DIM, experts=EXPERTS, **options)
    return MoE(router, Experts(DIM, 12, EXPERTS, bias=True))


def batch(tokens: int = 63) -> tuple[Tensor, Context]:
    """Return tokens that prefer some experts, and a context in which a third of them are padding."""
    rows = torch.randn(3, tokens // 3, DIM, generator=torch.Generator().manual_seed(1)) + 0.7
    real = torch.ones(rows.shape[:2], dtype=torch.bool)
    real[:, : tokens // 9] = False
    return rows, Context(token_mask=real)


def expert_gradients(module: MoE, tokens: Tensor, context: Context, recomputes: bool = False) -> dict[str, Tensor]:
    """Return the gradients of a loss that is a mean over real tokens."""
    assert context.token_mask is not None
    out = checkpoint(module, tokens, context, use_reentrant=False) if recomputes else module(tokens, context)
    assert out is not None
    loss = (out[0] * torch.linspace(-1, 1, DIM)).sum(-1)[context.token_mask].square().mean()
    found = torch.autograd.grad(loss, list(module.parameters()))
    return dict(zip(dict(module.named_parameters()), found, strict=True))


@pytest.mark.parametrize(
    "name", ["smoe", "top-p[p=0.15]", "symphony[init=identity]", "smoe[drop=0.3]", "capacity[factor=0.8]"]
)
def test_inside_the_clip_an_expert_gets_the_mean_load_times_its_mean_gradient_per_token(name: str) -> None:
    tokens, context = batch()
    assert context.token_mask is not None
    real = context.token_mask
    scaled = layer(name, gradient_scaling=1e6)
    found = expert_gradients(scaled, tokens, context)
    # The loop: the gradient of each token's own loss, without scaling, added up per expert.
    plain, total = layer(name), int(real.sum())
    out, routing = plain(tokens, context)
    losses = (out * torch.linspace(-1, 1, DIM)).sum(-1).square().flatten()
    chosen, names = routing.chosen & real.view(-1, 1), [each for each, _ in plain.experts.named_parameters()]
    sums = {each: torch.zeros_like(parameter) for each, parameter in plain.experts.named_parameters()}
    for token in real.flatten().nonzero().flatten().tolist():
        gradients = torch.autograd.grad(losses[token], list(plain.experts.parameters()), retain_graph=True)
        for each, gradient in zip(names, gradients, strict=True):
            sums[each] += gradient
    loads = chosen.sum(0)
    for each, parameter in sums.items():
        for expert in range(EXPERTS):
            per_token = parameter[expert] / max(int(loads[expert]), 1)
            expected = float(loads.sum()) / EXPERTS / total * per_token
            torch.testing.assert_close(found[f"experts.{each}"][expert], expected, rtol=1e-4, atol=1e-7)


def test_the_clip_bounds_the_factor_and_routers_and_tokens_keep_their_gradients() -> None:
    tokens, context = batch()
    tokens.requires_grad_()
    assert context.token_mask is not None
    plain, scaled = layer(), layer(gradient_scaling=1.25)
    one, two = (expert_gradients(module, tokens, context) for module in (plain, scaled))
    torch.testing.assert_close(one["router.score.weight"], two["router.score.weight"], rtol=0, atol=0)
    loads = (plain(tokens, context)[1].chosen & context.token_mask.view(-1, 1)).sum(0).double()
    factors = (loads.mean() / loads.clamp_min(1)).clamp(1 / 1.25, 1.25)
    assert float(factors.max()) == 1.25 and float(factors.min()) == 0.8
    for name in ("up_proj", "down_proj", "down_proj_bias"):
        name = next(each for each in one if each.endswith((f"experts.{name}", f"gate_{name}")))
        shape = (-1, *[1] * (one[name].dim() - 1))
        torch.testing.assert_close(two[name], (one[name].double() * factors.view(shape)).float())


def test_a_recomputation_scales_equally_and_evaluation_not_at_all() -> None:
    tokens, context = batch()
    one, two = (expert_gradients(layer(gradient_scaling=10), tokens, context, recomputes) for recomputes in (False, True))
    assert all(torch.equal(one[name], two[name]) for name in one)
    module = layer(gradient_scaling=10).eval()
    one, two = (expert_gradients(each, tokens, context) for each in (module, layer().eval()))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_ranks_scale_by_the_loads_of_the_whole_batch_and_drop_the_same_experts() -> None:
    script = Path(__file__).with_name("scaling_on_ranks.py")
    assert on_ranks(script, "1", processes=1) == on_ranks(script, "2")


def test_an_expert_without_tokens_has_no_gradient() -> None:
    module = layer(k=1, gradient_scaling=10)
    assert isinstance(module.router.score.weight, torch.nn.Parameter)
    with torch.no_grad():
        module.router.score.weight.zero_()  # every token takes the first expert
    found = expert_gradients(module, *batch())
    assert not bool(found["experts.down_proj"][1:].any()) and bool(found["experts.down_proj"][0].any())


@pytest.mark.parametrize(
    ("name", "largest", "message"),
    [
        ("smoe", 1.0, "gradient_scaling is 1.0.*above 1"),
        ("softmoe", 10.0, "Slots uses every expert.*gradient_scaling would change nothing"),
        ("smear", 10.0, "Merged uses every expert"),
    ],
)
def test_a_factor_that_cannot_be_used_is_refused(name: str, largest: float, message: str) -> None:
    assert_refused(message, create_router, name, dim=8, experts=4, gradient_scaling=largest)


def test_it_is_an_option_in_brackets() -> None:
    assert holdfast.create_router("smoe[gradient_scaling=10]", dim=8, experts=4).gradient_scaling == 10
