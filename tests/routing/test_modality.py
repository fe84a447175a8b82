"""A score for each modality: its weights, its balance loss and its exact certificate."""

from typing import Any

import pytest
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context, Losses, Router
from holdfast.certificates import certify
from holdfast.layers import losses
from holdfast.routing import Routing

DIM, EXPERTS = 10, 6


def build(name: str = "modality", **options: Any) -> Router:
    torch.manual_seed(0)
    return holdfast.create_router(name, **{"dim": DIM, "experts": EXPERTS, "k": 2, **options})


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 11, DIM, generator=generator), torch.randint(2, (3, 11), generator=generator)


def test_weights_of_a_modality_that_is_absent_get_a_gradient_of_zero() -> None:
    router, (tokens, modality) = build(losses=Losses(balance=1.0)), batch()
    routing = router(tokens, Context(modality=torch.zeros_like(modality)))
    (routing.weights.square().sum() + routing.loss).backward()
    gradient = router.score.get_parameter("weight").grad
    assert gradient is not None
    assert (gradient[EXPERTS:] == 0).all() and (gradient[:EXPERTS] != 0).any()


@pytest.mark.parametrize("term", ["balance", "importance", "load"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_loss_of_the_load_is_the_mean_over_the_modalities_present(term: str, padded: bool) -> None:
    router, (tokens, modality) = build(modalities=3), batch()  # the third is absent
    real = torch.rand(3, 11) < 0.7 if padded else None
    x = tokens.requires_grad_()
    routing = router(x, Context(modality=modality, token_mask=real))
    wanted = []
    for number in (0, 1):
        own = (modality == number).flatten() & (real.flatten() if real is not None else torch.tensor(True))
        alone = Routing(routing.logits[own], routing.gates[own], routing.experts[own], routing.weights[own])
        wanted.append(losses.TERMS[term](alone))
    expected, found = torch.stack(wanted).mean(), losses.TERMS[term](routing, real)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(value, x, retain_graph=True)[0] for value in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(found, losses.TERMS[term](Routing(**{**vars(routing), "balance_groups": None}), real))


def test_the_other_losses_are_those_of_all_tokens() -> None:
    router, (tokens, modality) = build(), batch()
    routing = router(tokens, Context(modality=modality))
    plain = Routing(routing.logits, routing.gates, routing.experts, routing.weights)
    for term in ("z", "entropy"):
        assert torch.equal(losses.TERMS[term](routing), losses.TERMS[term](plain))


def test_a_missing_or_wrong_modality_is_one_sentence() -> None:
    router, (tokens, modality) = build(), batch()
    assert_refused("the context has no modality", router, tokens)
    assert_refused("values from 0 to 2; this router was built for 0 to 1", router, tokens, Context(modality=modality * 2))
    with pytest.raises(ValueError, match=r"modality has dtype torch.float32 and shape \(3, 11\)"):
        router(tokens, Context(modality=modality.float()))
    assert_refused("modalities is 0", build, modalities=0)


def test_one_modality_is_a_linear_score() -> None:
    router, (tokens, modality) = build(modalities=1), batch()
    plain = build("smoe")
    plain.load_state_dict(router.state_dict())
    assert torch.equal(router(tokens, Context(modality=0 * modality)).weights, plain(tokens).weights)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_its_certificate_is_exact_given_the_modality(norm: Any) -> None:
    """It is that of a plain router with the weights of the token's modality."""
    router, (tokens, modality) = build().eval(), batch()
    context = Context(modality=modality)
    found = certify(router, tokens, context, norm=norm)
    assert found.kind == "exact"
    for number in (0, 1):
        plain = build("smoe").eval()
        weight = router.score.get_parameter("weight")[number * EXPERTS : (number + 1) * EXPERTS]
        plain.score.load_state_dict({"weight": weight})
        expected, own = certify(plain, tokens, norm=norm), modality == number
        torch.testing.assert_close(found.distance[own], expected.distance[own])
        # The bound of the rounding errors is twice as large.
        torch.testing.assert_close(found.radius[own], expected.radius[own], rtol=1e-3, atol=1e-4)
        assert torch.equal(found.lengths[own], expected.lengths[own])
