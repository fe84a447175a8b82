"""Nothing is NaN: bf16 autocast, logits of 1e4, one-hot distributions, dead experts, no real token at all."""

import math
from dataclasses import replace

import pytest
import torch
from combinations import COMBINATIONS, context_for
from router_names import needed
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context, Experts, Losses, MoE

ALL_LOSSES = Losses(balance=1.0, importance=1.0, load=1.0, z=1e-8, entropy=1.0)


def layer(name: str) -> MoE:
    torch.manual_seed(0)
    router_name, options = COMBINATIONS[name]
    router = holdfast.create_router(router_name, **{"dim": 16, "experts": 8, **options, "losses": ALL_LOSSES})
    return MoE(router, Experts(16, 8, router.experts))


def assert_finite_for_some_steps(module: MoE, tokens: Tensor, token_mask: Tensor | None = None, steps: int = 3) -> None:
    for _ in range(steps):
        x = tokens.clone().requires_grad_()
        module.zero_grad()
        out, routing = module(x, context_for(x.detach().float(), module.router.experts, token_mask))
        (out.float().square().mean() + routing.loss).backward()
        values = [out, routing.gates, routing.weights, routing.loss, x.grad, *module.buffers()]
        values += [p.grad for p in module.parameters() if p.grad is not None]
        assert all(v is not None and v.isfinite().all() for v in values)
    out, _ = module.eval()(tokens, context_for(tokens.float(), module.router.experts, token_mask))
    assert out.isfinite().all()


FIRST_IS_PADDING = torch.tensor([False, True]).unsqueeze(1).expand(2, 9)
BATCHES: dict[str, tuple[Tensor, Tensor | None]] = {
    "a bfloat16 model": (torch.randn(2, 9, 16).bfloat16(), None),
    "equal tokens, so that experts are dead": (torch.ones(2, 9, 16), None),
    "zero tokens": (torch.zeros(2, 9, 16), None),
    "a sequence of nothing but padding": (torch.randn(2, 9, 16), FIRST_IS_PADDING),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_all_numbers_are_finite(name: str, batch: str) -> None:
    tokens, token_mask = BATCHES[batch]
    assert_finite_for_some_steps(layer(name).to(tokens.dtype), tokens, token_mask)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_bf16_autocast(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_finite_for_some_steps(layer(name), torch.randn(2, 9, 16))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*holdfast.list_routers(), *(name for name in COMBINATIONS if "similarity" in name)])
def test_tokens_of_any_size_are_routed_or_refused(name: str, dtype: torch.dtype) -> None:
    """From 1e19 on a product of two tokens is beyond float32. Attention is then NaN, and its router says so."""
    router_name, options = COMBINATIONS.get(name, (name, needed(name)))
    for scale in (1e-30, 1e-19, 1e19, 1e30, 1e37):
        torch.manual_seed(0)
        router = holdfast.create_router(router_name, **{"dim": 16, "experts": 8, **options}).to(dtype)
        x = (torch.randn(2, 9, 16).clamp(-3, 3) * scale).to(dtype).requires_grad_()
        context = context_for(x.detach().float(), 8)
        if name == "attention" and scale > 1:
            assert_refused(r"router: .*NaN", router, x, context)
            continue
        context = context if name == "attention" else replace(context, attention=None)
        for _ in range(2):
            routing = router(x, context)
            if routing.weights.requires_grad:
                (routing.weights * torch.linspace(-1, 1, routing.weights.shape[1])).sum().backward()
        values = [routing.gates, routing.weights, x.grad, *(p.grad for p in router.parameters()), *router.eval().buffers()]
        assert all(value.isfinite().all() for value in values if value is not None)
        assert (routing.gates > 0).any(-1).all() or "symphony" in router_name or name == "remoe"


@pytest.mark.parametrize("scale", [1e19, 1e37])
def test_similarity_of_huge_tokens_is_the_limit(scale: float) -> None:
    """Each token takes the gates of the one that its product is largest with, and no gradient passes the comparison."""
    tokens = torch.randn(2, 9, 16).clamp(-3, 3)
    router = holdfast.create_router("similarity", dim=16, experts=8).eval()
    nearest = (tokens.double() @ tokens.double().mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).argmax(-1)
    own = torch.softmax(router.score(tokens * scale, Context()), -1)
    gates = router(tokens * scale, Context(causal=True)).gates.view(2, 9, 8)
    torch.testing.assert_close(gates, own.gather(1, nearest.unsqueeze(-1).expand(-1, -1, 8)))


@pytest.mark.parametrize("scale", [1e10, 1e19, 1e37])
def test_cosine_scores_do_not_depend_on_the_length(scale: float) -> None:
    router = holdfast.create_router("xmoe", dim=16, experts=8).eval()
    tokens = torch.randn(2, 9, 16).clamp(-3, 3)
    torch.testing.assert_close(router(tokens * scale).logits, router(tokens).logits, atol=1e-5, rtol=1e-5)
