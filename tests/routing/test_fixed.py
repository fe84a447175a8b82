"""Routers that choose by token id: their tables, their stages, and that hidden states change nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context, Losses, Router
from holdfast.certificates import certify, undecided
from holdfast.metrics.selection import NearTies, boundary_of
from holdfast.routing.fixed import Distilled, HashedIds

DIM, EXPERTS, VOCABULARY = 12, 6, 50


def build(name: str, **options: Any) -> Router:
    torch.manual_seed(0)
    return holdfast.create_router(name, dim=DIM, experts=EXPERTS, **{"vocabulary": VOCABULARY, **options})


def batch(seed: int = 0, sequences: int = 3, length: int = 9) -> tuple[Tensor, Context]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(sequences, length, DIM, generator=generator)
    return tokens, Context(token_ids=torch.randint(VOCABULARY, (sequences, length), generator=generator))


def table(k: int = 2, **options: Any) -> Tensor:
    part = build("hash", k=k, **options).score
    assert isinstance(part, HashedIds)
    return part.table


@pytest.mark.parametrize("k", [1, 2, 5, EXPERTS])
@pytest.mark.parametrize("balanced", [False, True])
def test_a_row_of_the_hash_table_has_k_distinct_experts(k: int, balanced: bool) -> None:
    rows = table(k, balanced=balanced)
    assert rows.shape == (VOCABULARY, k)
    assert (rows.diff(dim=1) > 0).all() and rows.min() >= 0 and rows.max() < EXPERTS


def test_every_set_of_experts_is_equally_likely_in_a_random_table() -> None:
    rows = table(2, vocabulary=30_000)
    counts = torch.bincount(rows[:, 0].long() * EXPERTS + rows[:, 1])
    counts = counts[counts > 0]
    assert len(counts) == 15
    assert (counts - 2000).abs().max() < 6 * 2000**0.5


def test_layers_and_seeds_have_tables_of_their_own() -> None:
    first = table()
    assert torch.equal(table(), first)
    assert not torch.equal(table(depth=1), first) and not torch.equal(table(seed=1), first)


def test_a_balanced_table_gives_every_expert_the_same_share_of_the_text() -> None:
    counts = (1000 / torch.arange(1, VOCABULARY + 1)).floor()  # Zipf
    counts[0] = 300  # an id is not split, so none may have more than an expert's share

    def largest_share(rows: Tensor) -> float:
        load = torch.zeros(EXPERTS).index_add(0, rows[:, 0].long(), counts)
        return float(load.max() * EXPERTS / load.sum())

    assert largest_share(table(1, balanced=True, frequencies=counts.tolist())) < 1.02
    assert largest_share(table(1)) > 1.2
    router = build("hash", k=1, balanced=True)
    assert isinstance(router.score, HashedIds)
    router.use_token_counts(counts)
    assert largest_share(router.score.table) < 1.02


def test_token_counts_do_not_change_a_random_table() -> None:
    router = build("hash")
    before = copy.deepcopy(router.state_dict())
    router.use_token_counts(torch.rand(VOCABULARY))
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_hash_is_constant_under_any_change_of_the_hidden_states(training: bool) -> None:
    router = build("hash", k=3).train(training)
    tokens, context = batch()
    first = router(tokens, context)
    for other in (100 * torch.randn_like(tokens), torch.full_like(tokens, torch.nan), torch.zeros_like(tokens)):
        second = router(other, context)
        for name in ("logits", "gates", "experts", "weights"):
            assert torch.equal(getattr(first, name), getattr(second, name))
    assert (first.weights == torch.tensor(1 / 3)).all()
    torch.testing.assert_close(first.gates, first.chosen / 3, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["hash", "stablemoe"])
def test_missing_wrong_and_unknown_ids_are_errors(name: str) -> None:
    router = build(name)
    tokens, context = batch()
    ids = context.token_ids
    assert ids is not None
    assert_refused("chooses experts by token id, and there are none", router, tokens)
    assert_refused(r"token_ids has dtype torch.int64 and shape \(3, 8\)", router, tokens, Context(token_ids=ids[:, 1:]))
    for unknown in (-1, VOCABULARY):
        wrong = ids.clone()
        wrong[1, 2] = unknown
        assert_refused("built for 0 to 49", router, tokens, Context(token_ids=wrong))
        real = torch.ones_like(ids, dtype=torch.bool)
        real[1, 2] = False  # in padding any number is allowed
        assert router(tokens, Context(token_ids=wrong, token_mask=real)).weights.isfinite().all()


@pytest.mark.parametrize("name", ["hash", "stablemoe"])
@pytest.mark.parametrize("informer", ["symphony", "similarity"])
def test_informers_are_refused(name: str, informer: str) -> None:
    assert_refused("does not select by gates", build, f"{name}+{informer}")


def distilled(router: Router) -> Distilled:
    assert isinstance(router.select, Distilled)
    return router.select


def test_stage_1_chooses_by_sigmoid_scores_in_training_and_by_ids_in_evaluation() -> None:
    router = build("stablemoe", k=2)
    tokens, context = batch()
    routing = router(tokens, context)
    assert torch.equal(routing.experts, routing.logits.topk(2).indices)
    torch.testing.assert_close(routing.weights, routing.logits.topk(2).values.sigmoid())
    router.eval()
    first, second = router(tokens, context), router(torch.randn_like(tokens), context)
    assert torch.equal(first.chosen, second.chosen) and not torch.equal(first.chosen, routing.chosen)


@pytest.mark.parametrize("training", [True, False])
def test_the_sets_of_stage_2_depend_on_ids_only(training: bool) -> None:
    router = build("stablemoe", k=2)
    tokens, context = batch()
    before = router.eval()(tokens, context)
    router.progress(0.1)
    router.train(training)
    first, second = router(tokens, context), router(5 * torch.randn_like(tokens), context)
    assert torch.equal(first.chosen, second.chosen)
    assert torch.equal(first.chosen, before.chosen)  # those of the distilled router when stage 2 began
    assert not torch.equal(first.weights, second.weights)
    torch.testing.assert_close(first.weights, first.logits.sigmoid().gather(1, first.experts))


def test_the_distilled_router_learns_the_choices_of_stage_1() -> None:
    """With tokens that are vectors of their ids, as in a model, the choice depends on the id, so it can be learnt."""
    router = build("stablemoe")
    words = torch.randn(VOCABULARY, DIM)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
    ids = torch.randint(VOCABULARY, (8, 64))

    def agreement() -> float:
        scored = router.train()(words[ids], Context(token_ids=ids)).experts
        return float((router.eval()(words[ids], Context(token_ids=ids)).experts == scored).float().mean())

    untrained = agreement()
    for _ in range(60):
        optimizer.zero_grad()
        router.train()(words[ids], Context(token_ids=ids)).loss.backward()
        optimizer.step()
    assert untrained < 0.5 and agreement() > 0.95


def test_in_stage_2_the_distilled_router_gets_no_gradient_and_weights_still_do() -> None:
    router = build("stablemoe", losses=Losses(balance=1.0, importance=1.0, load=1.0))
    tokens, context = batch()
    routing = router(tokens, context)
    assert routing.losses["balance"] > 0 and routing.losses["distill"] > 0
    routing.loss.backward()
    assert all(parameter.grad is not None for parameter in router.parameters())
    router.progress(0.2)
    router.train()
    routing = router(tokens, context)
    (routing.weights.sum() + routing.loss).backward()
    select = distilled(router)
    assert select.embedding.grad is None and select.predictor.grad is None
    assert router.score.get_parameter("weight").grad is not None
    assert "distill" not in routing.losses
    assert all(routing.losses[name] == 0 for name in ("balance", "importance", "load"))


def test_weight_decay_does_not_change_the_frozen_parts() -> None:
    router = build("stablemoe")
    optimizer = torch.optim.AdamW(router.parameters(), lr=0.1, weight_decay=0.5)
    tokens, context = batch()

    def step() -> None:
        optimizer.zero_grad()
        routing = router(tokens, context)
        (routing.weights.sum() + routing.loss).backward()
        optimizer.step()

    step()
    router.progress(0.1)
    frozen = copy.deepcopy(distilled(router).state_dict())
    score = router.score.get_parameter("weight").clone()
    step()
    assert all(torch.equal(value, frozen[name]) for name, value in distilled(router).state_dict().items())
    assert not torch.equal(router.score.get_parameter("weight"), score)


def test_the_stage_is_saved_and_never_goes_back() -> None:
    router = build("stablemoe", k=2)
    tokens, context = batch()
    router.progress(0.05)
    assert not distilled(router).frozen
    router.progress(0.1)
    router.progress(0.0)
    assert distilled(router).frozen
    loaded = build("stablemoe", k=2)
    loaded.load_state_dict(router.state_dict())
    loaded.train()
    assert not distilled(loaded).embedding.requires_grad
    assert torch.equal(loaded(tokens, context).experts, router(tokens, context).experts)
    assert "distill" not in loaded(tokens, context).losses


def test_a_model_in_another_dtype_keeps_the_assignment_of_stage_2() -> None:
    router = build("stablemoe", k=2)
    router.progress(1.0)
    tokens, context = batch()
    before = router.eval()(tokens, context).chosen
    rounded = copy.deepcopy(router).to(torch.bfloat16)
    assert torch.equal(rounded(tokens.bfloat16(), context).chosen, before)


def test_parameters_that_a_user_froze_do_not_begin_stage_2() -> None:
    """PEFT freezes all parameters of a model."""
    router = build("stablemoe").requires_grad_(False)
    tokens, context = batch()
    routing = router(tokens, context)
    assert torch.equal(routing.experts, routing.logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize("name", ["hash", "stablemoe"])
def test_no_perturbation_changes_the_sets_and_certificates_and_near_ties_say_so(name: str) -> None:
    router = build(name, k=2).eval()
    tokens, context = batch()
    found = certify(router, tokens, context)
    assert found.kind == "exact" and (found.radius == torch.inf).all()
    assert not undecided(router, tokens, torch.bfloat16, context).any()
    near = NearTies(boundary=boundary_of(router))
    near.update(router(tokens, context))
    assert near.result().explained == 1 and all(strip.share == 0 for strip in near.result().strips)


@pytest.mark.slow
def test_two_processes_distil_what_one_does_and_freeze_the_same() -> None:
    script = Path(__file__).with_name("fixed_on_ranks.py")
    printed = [line for line in on_ranks(script).splitlines() if line.startswith("equal")]
    assert printed == ["equal"] * 2
