"""Expert choice, Sinkhorn and BASE: balance in training, plain selection in evaluation, and all ranks together."""

import math
from pathlib import Path

import pytest
import torch
from batches_of_two_ranks import BALANCED, check_two_ranks
from torch import Tensor
from wording import assert_refused

from holdfast import Context, create_router
from holdfast.routing.balanced import BaseAssignment, ExpertChoice, Sinkhorn
from holdfast.routing.declarations import LayerSizes
from holdfast.routing.transport import TOLERANCE, column_potentials

TOKENS = torch.randn(3, 21, 12, generator=torch.Generator().manual_seed(0))
CROWDED = TOKENS + torch.randn(12, generator=torch.Generator().manual_seed(1))


def padded() -> tuple[Tensor, Context]:
    real = torch.ones(3, 21, dtype=torch.bool)
    real[1:, 13:] = False
    return real, Context(token_mask=real)


@pytest.mark.parametrize(("factor", "k"), [(1.0, 1), (1.0, 2), (1.1, 2), (2.0, 2), (50.0, 2)])
def test_every_expert_takes_as_many_tokens_as_its_capacity(factor: float, k: int) -> None:
    router = create_router("expert-choice", dim=12, experts=5, k=k, factor=factor)
    real, context = padded()
    routing = router(CROWDED, context)
    count = int(real.sum())
    expected = min(count, math.ceil(round(factor * count * k / 5, 9)))
    assert routing.chosen[real.flatten()].sum(0).tolist() == [expected] * 5


def test_tokens_without_an_expert_are_counted_as_dropped() -> None:
    router = create_router("expert-choice", dim=12, experts=5, k=1)
    routing = router(CROWDED)
    assert routing.dropped is not None
    assert torch.equal(routing.dropped, (routing.used.sum(-1) == 0).long())
    assert int(routing.dropped.sum()) > 0
    assert router.eval()(CROWDED).dropped is None


def test_experts_that_tie_take_the_earlier_tokens() -> None:
    router = create_router("expert-choice", dim=12, experts=5, k=1)
    routing = router(torch.ones(2, 6, 12))
    assert routing.chosen.all(1).tolist() == [True] * 3 + [False] * 9  # ceil(12 / 5) = 3 tokens for each expert


def test_expert_choice_of_one_rank_needs_no_other() -> None:
    costs = [select.declares.cost for select in (ExpertChoice(3, 1), BaseAssignment(3, 1))]
    sizes = LayerSizes(12, 3, 21, 2, 4, 4, 4)
    assert [(cost(sizes).summed, cost(sizes).gathered) for cost in costs if cost] == [(0, 0.0), (0, 12.0)]


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_the_marginals_of_sinkhorn_hold(spread: float) -> None:
    logits = spread * torch.randn(2, 300, 9) + spread * torch.linspace(0, 2, 9)
    real = torch.rand(2, 300) < 0.8
    potentials, count = column_potentials(logits, real)
    plan = torch.softmax(logits[real] + potentials, dim=-1)
    assert int(count) == int(real.sum())
    assert float((plan.sum(0) * 9 / count - 1).abs().max()) <= TOLERANCE * 1.01
    torch.testing.assert_close(plan.sum(1), torch.ones(int(count)))


def test_sinkhorn_survives_an_expert_that_no_token_wants() -> None:
    logits = torch.randn(1, 60, 4)
    logits[..., 2] -= 1000
    potentials, _ = column_potentials(logits, torch.ones(1, 60, dtype=torch.bool))
    columns = torch.softmax(logits + potentials, dim=-1).sum((0, 1))
    assert bool((columns / 15 - 1).abs().max() <= 0.01)


def test_sinkhorn_with_fewer_tokens_than_experts_is_top_k() -> None:
    router = create_router("sinkhorn", dim=12, experts=7, k=2)
    few = CROWDED[:1, :6]
    assert torch.equal(router(few).experts, router.eval()(few).experts)


def test_running_potentials_follow_the_state_rule() -> None:
    router = create_router("sinkhorn", dim=12, experts=7, k=2, bias="running")
    select = router.select
    assert isinstance(select, Sinkhorn)
    potentials = [
        column_potentials(router.score(batch, Context()), torch.ones(3, 21).bool())[0] for batch in (CROWDED, TOKENS)
    ]
    router(CROWDED)
    assert not select.running.any(), "a forward uses the state from before its batch"
    router(TOKENS)
    torch.testing.assert_close(select.running, potentials[0])
    router.eval()
    torch.testing.assert_close(select.running, 0.9 * potentials[0] + 0.1 * potentials[1])
    router.train()(TOKENS[:1, :5])  # fewer tokens than experts: the state stays
    router.eval()
    torch.testing.assert_close(select.running, 0.9 * potentials[0] + 0.1 * potentials[1])


@pytest.mark.parametrize("name", ["symphony+base", "similarity+base", "symphony+base+capacity"])
def test_base_refuses_informers(name: str) -> None:
    assert_refused("remove one of them", create_router, name, dim=12, experts=5)


@pytest.mark.parametrize(
    "name",
    ["expert-choice", "sinkhorn", "base", "smoe[noise=gaussian,noise_std=2]", "smooth[eps=3]", "stablemoe[vocabulary=30]"],
)
def test_a_model_that_generates_in_training_mode_selects_as_in_evaluation(name: str) -> None:
    router, context = create_router(name, dim=12, experts=5, k=2), Context(token_ids=torch.randint(0, 30, (3, 21)))
    router.learning = False
    generated, evaluated = router(CROWDED, context), router.eval()(CROWDED, context)
    assert torch.equal(generated.experts, evaluated.experts) and torch.equal(generated.weights, evaluated.weights)
    router.learning = True
    assert not torch.equal(router.train()(CROWDED, context).chosen, evaluated.chosen)


@pytest.mark.slow
def test_two_ranks_route_as_one_process(tmp_path: Path) -> None:
    """The ranks have different numbers of tokens, some of them padding."""
    check_two_ranks(BALANCED, tmp_path)
