"""Capacity: exact against a loop for every policy, the wrapped selector if there is room, and all ranks together."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from balanced_references import ceil_share, limit_sets
from batches_of_two_ranks import LIMITED, check_two_ranks
from torch import Tensor

from holdfast import Context, Losses, create_router
from holdfast.layers.losses import balance, load
from holdfast.routing import Capacity, Router, Routing, StatefulPart
from holdfast.routing.capacity import ORDERS, POLICIES

TOKENS = torch.randn(3, 21, 12, generator=torch.Generator().manual_seed(0))
CROWDED = TOKENS + torch.randn(12, generator=torch.Generator().manual_seed(1))
BASES = [
    "smoe",
    "switch",
    "top-p[p=0.15]",
    "remoe",
    "expert-choice",
    "sinkhorn",
    "sinkhorn[bias=running]",
    "base",
    "symphony",
]
BASES += ["smoe[noise=gaussian,noise_std=1.0]", "smoe-dropout", "ac+symphony+similarity"]


def build(name: str, **options: Any) -> Router:
    torch.manual_seed(0)
    return create_router(name, dim=12, experts=5, **options)


def limit_of(router: Router) -> Capacity:
    assert isinstance(router.select, Capacity)
    return router.select


def padding() -> Tensor:
    real = torch.ones(3, 21, dtype=torch.bool)
    real[1:, 13:] = False
    return real


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [0.3, 0.8, 1.0, 1.25])
@pytest.mark.parametrize("base", ["smoe[k=1]", "smoe[k=2]", "smoe[k=4]", "top-p[p=0.15]", "remoe"])
def test_the_limit_is_exactly_that_of_a_loop(base: str, factor: float, policy: str, order: str) -> None:
    name, _, k = base.partition("[k=")
    options = {"k": int(k[:-1])} if k else {}
    router = build(f"{name}+capacity", factor=factor, policy=policy, order=order, **options).eval()
    plain = build(name, **options).eval()
    # Rounded logits tie, within a token and between tokens.
    for tokens, real in ((CROWDED, padding()), (CROWDED.round(), torch.ones(3, 21, dtype=torch.bool))):
        context = Context(token_mask=real)
        asked, got = (each(tokens, context).map_tokens(Tensor.detach) for each in (plain, router))
        requested = [[e for e in row if e < 5] for row in asked.experts.tolist()]
        keys = asked.logits if name != "top-p" else asked.gates
        expected = limit_sets(requested, keys, asked.gates, real.flatten().tolist(), limit_of(router))
        assert [sorted(set(row) - {5}) for row in got.experts.tolist()] == [sorted(row) for row in expected]
        assert got.requested is not None and torch.equal(got.requested, asked.experts)
        lost = [len(asking) - len(kept) for asking, kept in zip(requested, expected, strict=True)]
        assert got.dropped is not None and got.dropped.tolist() == lost
        places = ceil_share(int(asked.used[real.flatten()].sum()), factor, 5)
        assert int(got.chosen[real.flatten()].sum(0).max()) <= places


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("base", BASES)
def test_with_room_for_all_it_is_the_wrapped_selector_to_the_last_bit(base: str, policy: str) -> None:
    routers = [build(base), build(base)]
    if base == "expert-choice":  # which has an option `factor` of its own
        routers[1].select = Capacity(routers[1].select, 5, factor=100.0, policy=policy)  # type: ignore[arg-type]
    else:
        routers[1] = build(f"{base}+capacity[policy={policy},factor=100]")
    context = context_of(base)
    for training in (True, False):
        outcomes = []
        for router in routers:
            torch.manual_seed(1)
            router.train(training).zero_grad()
            tokens = CROWDED.clone().requires_grad_()
            routing = router(tokens, context)
            (routing.weights * torch.linspace(1, 2, routing.weights.shape[1])).sum().backward()
            outcomes.append((routing, [tokens.grad, *(parameter.grad for parameter in router.parameters())]))
        (plain, plain_grads), (limited, grads) = outcomes
        for field in ("logits", "gates", "experts", "weights"):
            assert torch.equal(getattr(plain, field), getattr(limited, field)), field
        assert plain.loss == limited.loss
        for mine, theirs in zip(grads, plain_grads, strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)  # type: ignore[arg-type]
        assert limited.dropped is not None
        assert torch.equal(limited.dropped, torch.zeros_like(limited.dropped) if plain.dropped is None else plain.dropped)
    for one, two in zip(*(dict(router.named_buffers()).values() for router in routers), strict=True):
        assert torch.equal(one, two)


def context_of(base: str) -> Context:
    from holdfast.testing.router_under_test import RouterUnderTest

    return RouterUnderTest(build(base)).context(CROWDED, padding()) if "ac" in base else Context(token_mask=padding())


def test_what_is_left_is_renormalised_only_if_the_rule_renormalises() -> None:
    renormalised, raw = (build(f"{name}+capacity[factor=0.5]", k=3).eval()(CROWDED) for name in ("smoe", "switch"))
    some = renormalised.used.any(-1)
    assert renormalised.dropped is not None and bool((renormalised.dropped[some] > 0).any())
    torch.testing.assert_close(renormalised.weights.sum(-1)[some], torch.ones(int(some.sum())))
    torch.testing.assert_close(raw.weights, raw.gates.gather(1, raw.experts.clamp_max(4)).where(raw.used, 0.0))


def test_a_token_without_experts_has_weight_and_gradient_zero() -> None:
    router = build("smoe+capacity[factor=0.1]", k=1)
    tokens = CROWDED.clone().requires_grad_()
    routing = router(tokens)
    empty = ~routing.used.any(-1)
    assert bool(empty.any()) and not routing.weights[empty].any()
    routing.weights.square().sum().backward()
    assert tokens.grad is not None and tokens.grad.isfinite().all()
    assert not tokens.grad.flatten(0, 1)[empty].any()


def test_the_balance_loss_counts_what_was_requested() -> None:
    plain, limited = build("smoe")(CROWDED), build("smoe+capacity[factor=0.6]")(CROWDED)
    assert limited.dropped is not None and bool(limited.dropped.any())
    for loss in (balance, load):
        assert torch.equal(loss(plain), loss(limited))
        hidden = Routing(limited.logits, limited.gates, limited.experts, limited.weights)
        assert float(loss(hidden).detach()) < float(loss(plain).detach())


def test_smooth_selection_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="SmoothTopK: dropping an expert makes the output discontinuous"):
        build("smooth+capacity")


def test_the_state_progress_and_learning_of_the_wrapped_selector_go_on() -> None:
    router = build("remoe+capacity", l1=1e-3)
    inner = limit_of(router).base
    assert isinstance(inner, StatefulPart)
    before = inner.get_buffer("l1").clone()
    router(CROWDED)
    router(CROWDED)
    assert inner.get_buffer("l1") != before
    assert router.snapshot()["l1"] is inner.get_buffer("l1")
    router.learning = False
    assert not inner.learning
    staged = copy.deepcopy(dict(inner.named_buffers()))
    assert not router(TOKENS).losses
    assert all(torch.equal(value, staged[name]) for name, value in inner.named_buffers())
    growing = build("smoe-dropout+capacity")
    growing.progress(1.0)
    assert int(limit_of(growing).base.get_buffer("active")) == 5


def test_the_setting_of_the_geometry_paper_is_one_line_and_trains() -> None:
    torch.manual_seed(0)
    name = "smoe[noise=gaussian,noise_std=1.0]+capacity[factor=1.5]"
    router = create_router(name, dim=12, experts=5, losses=Losses(balance=0.01))
    optimizer = torch.optim.Adam(router.parameters(), 0.05)
    target = CROWDED.flatten(0, 1).sum(-1)
    values = torch.nn.Parameter(torch.zeros(5))
    optimizer.add_param_group({"params": [values]})
    errors = []
    for _ in range(60):
        routing = router(CROWDED)
        error = (routing.dense_weights @ values - target).square().mean()
        optimizer.zero_grad()
        (error + routing.loss).backward()
        optimizer.step()
        errors.append(float(error))
        assert int(routing.chosen.sum(0).max()) <= ceil_share(2 * 63, 1.5, 5)
    assert sum(errors[-10:]) < 0.8 * sum(errors[:10])


@pytest.mark.slow
def test_two_ranks_route_as_one_process(tmp_path: Path) -> None:
    """The ranks have different numbers of tokens, some of them padding."""
    check_two_ranks(LIMITED, tmp_path)


@pytest.mark.parametrize("policy", ["next", "reroute"])
def test_a_token_stays_within_the_groups_that_its_selector_keeps(policy: str) -> None:
    torch.manual_seed(0)
    name = f"hierarchical[groups=2,top_groups=1]+capacity[factor=1,policy={policy}]"
    router = create_router(name, dim=12, experts=8, k=2).eval()
    routing = router(torch.randn(2, 20, 12))
    assert routing.dropped is not None and int(routing.dropped.sum()) > 0
    kept = routing.gates.unflatten(-1, (2, 4)).sum(-1).argmax(-1)
    inside = routing.experts // 4 == kept.unsqueeze(-1)
    assert bool((inside | ~routing.used).all())


@pytest.mark.parametrize("policy", ["next", "reroute"])
def test_a_router_without_scores_for_other_experts_can_only_drop(policy: str) -> None:
    with pytest.raises(ValueError, match='no other expert to ask; limit it with policy="drop"'):
        create_router(f"hash+capacity[policy={policy}]", dim=12, experts=8, vocabulary=50)
    create_router("hash+capacity", dim=12, experts=8, vocabulary=50)
    create_router(f"stablemoe+capacity[policy={policy}]", dim=12, experts=8, vocabulary=50)
