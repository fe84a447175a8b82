"""Nothing is NaN: bf16 autocast, logits of 1e4, one-hot distributions, dead experts, no real token at all."""

import math

import pytest
import torch
from test_training import COMBINATIONS, context_for
from torch import Tensor

import holdfast
from holdfast import Experts, Losses, MoE

ALL_LOSSES = Losses(balance=1.0, importance=1.0, load=1.0, z=1e-8, entropy=1.0)


def layer(name: str) -> MoE:
    torch.manual_seed(0)
    router_name, options = COMBINATIONS[name]
    router = holdfast.router(router_name, **{"dim": 16, "experts": 8, **options, "losses": ALL_LOSSES})
    return MoE(router, Experts(16, 8, router.experts))


def assert_finite_for_some_steps(module: MoE, tokens: Tensor, padding: Tensor | None = None, steps: int = 3) -> None:
    for _ in range(steps):
        x = tokens.clone().requires_grad_()
        module.zero_grad()
        out, routing = module(x, context_for(x.detach().float(), module.router.experts, padding))
        (out.float().square().mean() + routing.loss).backward()
        values = [out, routing.gates, routing.weights, routing.loss, x.grad, *module.buffers()]
        values += [p.grad for p in module.parameters() if p.grad is not None]
        assert all(v is not None and v.isfinite().all() for v in values)
    out, _ = module.eval()(tokens, context_for(tokens.float(), module.router.experts, padding))
    assert out.isfinite().all()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_bf16_autocast(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_finite_for_some_steps(layer(name), torch.randn(2, 9, 16))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_bfloat16_model(name: str) -> None:
    assert_finite_for_some_steps(layer(name).to(torch.bfloat16), torch.randn(2, 9, 16).bfloat16())


@pytest.mark.parametrize("scale", [1e4, 1e-30])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_extreme_logits(name: str, scale: float) -> None:
    """One-hot distributions at 1e4: all other gates underflow to 0."""
    module = layer(name)
    tokens = torch.randn(2, 9, 16)
    with torch.no_grad():
        for key, value in module.router.score.state_dict().items():
            if key.endswith("log_temperature"):
                value.sub_(math.log(scale))
            elif key.endswith("weight"):
                value.mul_(10 * scale)
    largest = module.router.eval()(tokens, context_for(tokens, 8)).logits.abs().max()
    assert largest > 1e4 if scale > 1 else largest < 1e-10
    module.train()
    assert_finite_for_some_steps(module, tokens)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_equal_tokens_leave_experts_dead(name: str) -> None:
    assert_finite_for_some_steps(layer(name), torch.ones(2, 9, 16))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_zero_tokens(name: str) -> None:
    assert_finite_for_some_steps(layer(name), torch.zeros(2, 9, 16))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_batch_of_nothing_but_padding(name: str) -> None:
    assert_finite_for_some_steps(layer(name), torch.randn(2, 9, 16), torch.zeros(2, 9, dtype=torch.bool))
