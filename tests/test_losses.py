"""Losses against hand-made routings, and that no coefficient is inert."""

import math

import pytest
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Losses, Routing
from holdfast.layers import losses

UNIFORM = torch.full((8, 4), 0.25)


def routing(gates: Tensor, experts: Tensor, logits: Tensor | None = None) -> Routing:
    weights = torch.ones(experts.shape) / experts.shape[1]
    return Routing(gates.log() if logits is None else logits, gates, experts, weights)


def evenly(tokens: int = 8, experts: int = 4, k: int = 2) -> Tensor:
    return torch.stack([(torch.arange(tokens) + slot) % experts for slot in range(k)], dim=1)


def test_uniform_routing_has_balance_1_and_no_variation() -> None:
    record = routing(UNIFORM, evenly())
    torch.testing.assert_close(losses.balance(record), torch.tensor(1.0))
    for term in (losses.importance, losses.load, losses.entropy):
        torch.testing.assert_close(term(record), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_collapsed_routing_has_balance_e_and_the_largest_variation() -> None:
    gates = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(8, 4)
    record = routing(gates, torch.zeros(8, 1, dtype=torch.long))
    torch.testing.assert_close(losses.balance(record), torch.tensor(4.0))
    torch.testing.assert_close(losses.importance(record), torch.tensor(3.0))
    torch.testing.assert_close(losses.load(record), torch.tensor(3.0))
    torch.testing.assert_close(losses.entropy(record), torch.tensor(math.log(4)))


def test_balance_counts_the_selections_that_were_made_not_the_largest_gates() -> None:
    gates = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    record = routing(gates, torch.full((8, 1), 3))
    torch.testing.assert_close(losses.balance(record), torch.tensor(0.4))


def test_gates_need_not_sum_to_one() -> None:
    record, doubled = routing(UNIFORM, evenly()), routing(2 * UNIFORM, evenly())
    for term in (losses.balance, losses.importance, losses.load, losses.entropy):
        torch.testing.assert_close(term(record), term(doubled))


def test_sentinels_are_not_counted() -> None:
    experts = torch.tensor([[0, 4], [1, 2]])
    torch.testing.assert_close(losses.balance(routing(UNIFORM[:2], experts)), torch.tensor(1.0))
    torch.testing.assert_close(losses.load(routing(UNIFORM[:2], experts)), torch.tensor(1 / 3))


def test_z_is_the_mean_squared_logsumexp() -> None:
    logits = torch.randn(8, 4)
    expected = logits.double().exp().sum(-1).log().square().mean()
    torch.testing.assert_close(losses.z(routing(UNIFORM, evenly(), logits)), expected.float())


@pytest.mark.parametrize("name", losses.TERMS)
def test_padding_is_as_if_the_token_were_not_there(name: str) -> None:
    torch.manual_seed(0)
    logits, experts = torch.randn(8, 4), torch.rand(8, 4).argsort(-1)[:, :2]
    logits[5:] *= 100
    real = torch.tensor([True] * 5 + [False] * 3)
    whole, part = routing(logits.softmax(-1), experts, logits), routing(logits[:5].softmax(-1), experts[:5], logits[:5])
    term = losses.TERMS[name]
    torch.testing.assert_close(term(whole, real), term(part))
    torch.testing.assert_close(term(whole, real.view(2, 4)), term(part))


@pytest.mark.parametrize("name", losses.TERMS)
def test_nothing_real_gives_a_finite_loss(name: str) -> None:
    assert losses.TERMS[name](routing(UNIFORM, evenly()), torch.zeros(8, dtype=torch.bool)).isfinite()


@pytest.mark.parametrize("name", ["balance", "importance", "load", "z", "entropy"])
def test_descending_a_loss_does_what_it_is_for(name: str) -> None:
    """Ten steps on each loss alone: load evens out, logits shrink, or gates become smoother."""
    torch.manual_seed(0)
    router = holdfast.create_router("smoe", dim=16, experts=8, losses=Losses(**{name: 1.0}), bias=True)
    with torch.no_grad():
        router.score.bias[:2] += 2  # type: ignore[union-attr, index, operator]
    tokens = torch.randn(4, 64, 16)

    def measure() -> float:
        return float(losses.TERMS[name](router(tokens)).detach())

    before = measure()
    optimizer = torch.optim.SGD(router.parameters(), lr=0.3)
    for _ in range(10):
        optimizer.zero_grad()
        router(tokens).loss.backward()
        optimizer.step()
    assert measure() < 0.97 * before


def test_weights_scale_the_terms_and_zero_leaves_them_out() -> None:
    record = routing(UNIFORM, evenly())
    terms = Losses(balance=0.01, z=0.5)(record)
    assert set(terms) == {"balance", "z"}
    torch.testing.assert_close(terms["balance"], torch.tensor(0.01))


def test_the_router_adds_its_losses_in_training_only() -> None:
    router = holdfast.create_router("smoe", dim=8, experts=4, losses=Losses(balance=0.5))
    training = router(torch.randn(2, 5, 8))
    assert set(training.losses) == {"balance"}
    assert torch.equal(training.loss, training.losses["balance"])
    evaluation = router.eval()(torch.randn(2, 5, 8))
    assert not evaluation.losses and evaluation.loss == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_coefficient_that_is_negative_or_not_finite_is_one_clear_sentence(value: float) -> None:
    assert_refused(f"z is {value}", Losses, z=value)


@pytest.mark.parametrize("name", losses.TERMS)
def test_a_term_of_several_processes_is_that_of_all_their_tokens(name: str) -> None:
    """Value on each, and the mean of the gradients, for shares of 2, 5 and 1 real tokens, as if three exchanged theirs."""
    torch.manual_seed(0)
    term, logits, experts = losses.TERMS[name], torch.randn(12, 4, requires_grad=True), torch.rand(12, 4).argsort(-1)[:, :2]
    real = torch.tensor([True, True, False, False] + [True] * 5 + [False, False, True])
    shares = [slice(0, 3), slice(3, 10), slice(10, 12)]

    def part(tokens: slice) -> Routing:
        return routing(logits[tokens].softmax(-1), experts[tokens], logits[tokens])

    whole = term(part(slice(0, 12)), real)
    (expected,) = torch.autograd.grad(whole, logits)
    sent: list[Tensor] = []

    def send(value: Tensor) -> Tensor:
        sent.append(value)
        return value

    for share in shares:
        term(part(share), real[share], send)
    mean = torch.stack(sent).mean(0)  # one message a term
    assert not mean.requires_grad
    terms = [term(part(share), real[share], lambda value: mean) for share in shares]
    for each in terms:
        torch.testing.assert_close(each, whole)
    (found,) = torch.autograd.grad(torch.stack(terms).mean(), logits)
    torch.testing.assert_close(found, expected)


def test_consistency_is_the_jensen_shannon_divergence_of_each_real_token() -> None:
    torch.manual_seed(0)
    one, other = torch.rand(6, 4, requires_grad=True), torch.rand(6, 4, requires_grad=True)
    with torch.no_grad():
        one[0, 1] = other[0, 1] = other[1, 2] = 0
    real = torch.tensor([True, True, False, True, True, True])
    total = torch.zeros(())
    for token in real.nonzero().flatten().tolist():
        p, q = one[token] / one[token].sum(), other[token] / other[token].sum()
        for expert in range(4):
            m = (p[expert] + q[expert]) / 2
            for part in (p[expert], q[expert]):
                if part > 0:
                    total = total + part * (part / m).log() / 2
    found = losses.consistency(routing(one, evenly(6)), routing(other, evenly(6)), real)
    torch.testing.assert_close(found, total / 5)
    for leaf in (one, other):
        (expected,) = torch.autograd.grad(total / 5, leaf, retain_graph=True)
        (gradient,) = torch.autograd.grad(found, leaf, retain_graph=True)
        assert gradient.isfinite().all()  # at a gate of 0 the slope is infinite, and the loss has a finite one
        torch.testing.assert_close(gradient[2:], expected[2:])


def test_consistency_of_equal_views_is_0_and_of_views_without_a_common_expert_log_2() -> None:
    torch.manual_seed(0)
    one = routing(torch.rand(8, 4), evenly())
    torch.testing.assert_close(losses.consistency(one, one), torch.tensor(0.0))
    left, right = torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 3.0, 0.0]])
    found = losses.consistency(routing(left.expand(8, 4), evenly()), routing(right.expand(8, 4), evenly()))
    torch.testing.assert_close(found, torch.tensor(math.log(2)))


def test_views_of_unequal_length_are_compared_by_their_mean_gates() -> None:
    torch.manual_seed(0)
    one, other = torch.rand(8, 4), torch.rand(5, 4)
    one_mask, other_mask = torch.arange(8) < 6, torch.arange(5) > 0
    found = losses.consistency(routing(one, evenly()), routing(other, evenly(5)), one_mask, other_mask=other_mask)
    p = (one[:6] / one[:6].sum(-1, keepdim=True)).mean(0)
    q = (other[1:] / other[1:].sum(-1, keepdim=True)).mean(0)
    m = (p + q) / 2
    torch.testing.assert_close(found, ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2)
