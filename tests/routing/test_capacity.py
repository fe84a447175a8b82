"""Capacity: exact against a loop for every policy, the wrapped selector if there is room, and all ranks together."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from balanced_references import ceil_share, limit_sets
from batches_of_two_ranks import LIMITED, check_two_ranks
from torch import Tensor
from wording import assert_refused

from holdfast import Context, create_router
from holdfast.layers.losses import balance, load
from holdfast.routing import Capacity, Router, Routing, StatefulPart
from holdfast.routing.capacity import ORDERS, POLICIES
from holdfast.routing.presets import resolve_layers, written_name

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
@pytest.mark.parametrize("factor", [0.3, 0.8, 1.0, 1.25, [0.1, 0.4, 1.7, 0.8, 3.0]], ids=str)
@pytest.mark.parametrize("base", ["smoe[k=1]", "smoe[k=2]", "smoe[k=4]", "top-p[p=0.15]", "remoe"])
def test_the_limit_is_exactly_that_of_a_loop(base: str, factor: Any, policy: str, order: str) -> None:
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
        factors = factor if isinstance(factor, list) else [factor] * 5
        places = torch.tensor([ceil_share(int(asked.used[real.flatten()].sum()), each, 5) for each in factors])
        assert (got.chosen[real.flatten()].sum(0) <= places).all()


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
        torch.testing.assert_close(grads, plain_grads, rtol=0, atol=0)
        assert limited.dropped is not None
        assert torch.equal(limited.dropped, torch.zeros_like(limited.dropped) if plain.dropped is None else plain.dropped)
    torch.testing.assert_close(*([*router.buffers()] for router in routers), rtol=0, atol=0)


def context_of(base: str) -> Context:
    from holdfast.testing.router_under_test import RouterUnderTest

    return RouterUnderTest(build(base)).context(CROWDED, padding()) if "ac" in base else Context(token_mask=padding())


def test_the_balance_loss_counts_what_was_requested() -> None:
    plain, limited = build("smoe")(CROWDED), build("smoe+capacity[factor=0.6]")(CROWDED)
    assert limited.dropped is not None and bool(limited.dropped.any())
    for loss in (balance, load):
        assert torch.equal(loss(plain), loss(limited))
        hidden = Routing(limited.logits, limited.gates, limited.experts, limited.weights)
        assert float(loss(hidden).detach()) < float(loss(plain).detach())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", ["0.5", "0.5:0.2:1:2:1"])
def test_another_factor_in_evaluation_is_used_there_only(factor: str, policy: str) -> None:
    both = build(f"smoe+capacity[factor={factor},eval_factor=0.9,policy={policy}]")
    for training, same in ((True, factor), (False, "0.9")):
        expected = build(f"smoe+capacity[factor={same},policy={policy}]").train(training)(CROWDED)
        assert torch.equal(both.train(training)(CROWDED).experts, expected.experts)
    assert_refused("must be positive and finite", build, "smoe+capacity", eval_factor=0.0)


def test_factors_of_experts_are_written_with_colons_and_saved() -> None:
    name = "smoe+capacity[factor=0.5:1:2:0.25:1.1]"
    router = build(name)
    assert limit_of(router).factor == [0.5, 1.0, 2.0, 0.25, 1.1]
    (spec,) = resolve_layers(name)
    assert written_name([spec]) == "smoe+capacity[factor=0.5:1.0:2.0:0.25:1.1]"
    other = build("smoe+capacity[factor=1:1:1:1:1]")
    other.load_state_dict(router.state_dict())
    assert torch.equal(other(CROWDED).experts, router(CROWDED).experts)
    with pytest.raises(ValueError, match=r"factor has 3 numbers; give one number, or one for each of the 5 experts\."):
        build("smoe+capacity[factor=1:1:2]")
    assert_refused("must be positive and finite", build, "smoe+capacity", factor=[1.0, 1.0, 0.0, 1.0, 1.0])


def test_smooth_selection_is_refused_with_the_reason() -> None:
    assert_refused("SmoothTopK: dropping an expert makes the output discontinuous", build, "smooth+capacity")


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


@pytest.mark.slow
def test_two_ranks_route_as_one_process(tmp_path: Path) -> None:
    """The ranks have different numbers of tokens, some of them padding."""
    check_two_ranks(LIMITED, tmp_path)


@pytest.mark.parametrize("policy", ["next", "reroute"])
@pytest.mark.parametrize("groups", ["grouped", "hierarchical"])
def test_a_token_stays_within_the_groups_that_its_selector_keeps(groups: str, policy: str) -> None:
    name = f"{groups}[groups=2,top_groups=1]+capacity[factor=1,policy={policy}]"
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
