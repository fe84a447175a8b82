"""Expert dropout: in training only, the next best experts take the tokens of those that a forward drops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from wording import assert_refused

from holdfast import Context, Router, create_router
from holdfast.hub.families.moe import GateRule
from holdfast.routing import TopK
from holdfast.routing.dropout import StepDropout
from holdfast.routing.rules import Scores

NAMES = ("smoe", "switch", "xmoe", "top-p", "sparsemax", "symphony[init=identity]", "similarity", "grouped", "hierarchical")
ALL_NAMES = (*NAMES, "smooth[eps=0.5]", "symphony[init=kaiming]+smooth", "capacity[factor=6]")


def pair(name: str, **options: Any) -> tuple[Router, Router]:
    """Return a router with expert dropout and one without, of the same weights, both in training mode."""
    torch.manual_seed(0)
    plain = create_router(name, dim=8, experts=6)
    dropping = create_router(name, dim=8, experts=6, **{"drop": 0.4, **options})
    dropping.load_state_dict(plain.state_dict(), strict=False)
    return dropping, plain


def lost(router: Router, tokens: Tensor) -> Tensor:
    """Return bool (E,): the experts that the next forward drops."""
    assert isinstance(router.dropout, StepDropout)
    router.dropout.begin_training_forward()
    dropped: Tensor = router.dropout(tokens, Context())
    router.dropout.pending.zero_()  # this was not a forward of the router
    return dropped


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_expert_has_no_gate_and_the_next_best_move_up(name: str) -> None:
    dropping, plain = pair(name)
    tokens = torch.randn(3, 50, 8)
    for _ in range(4):
        gone = lost(dropping, tokens)
        routing, whole = dropping(tokens), plain(tokens)
        assert not bool(routing.gates[:, gone].any()) and not bool((routing.chosen & gone)[routing.dense_weights > 0].any())
        torch.testing.assert_close(routing.logits, whole.logits)
        if "sparsemax" not in name:  # whose gates are shared out among those that are left
            torch.testing.assert_close(routing.gates[:, ~gone], whole.gates[:, ~gone])
        if name in ("smoe", "switch", "xmoe", "symphony[init=identity]", "similarity"):
            k = routing.experts.shape[1]
            ranked = whole.gates.where(~gone, -1.0).sort(dim=-1, descending=True, stable=True)
            assert torch.equal(routing.experts, ranked.indices[:, :k])
            raw = ranked.values[:, :k]
            shares = raw if name.startswith(("switch", "symphony")) else raw / raw.sum(-1, keepdim=True)
            torch.testing.assert_close(routing.weights, shares)


@pytest.mark.parametrize("options", [{}, {"per": "token"}], ids=["per step", "per token"])
@pytest.mark.parametrize("name", ALL_NAMES)
def test_no_token_is_left_without_an_expert(name: str, options: dict[str, Any]) -> None:
    dropping, _ = pair(name, drop=0.99, **options)
    for _ in range(20):
        routing = dropping(torch.randn(2, 30, 8))
        assert bool((routing.weights.sum(-1) > 0).all())


def test_every_expert_is_dropped_at_its_rate_and_independently() -> None:
    dropout = StepDropout(8, 1, drop=0.3, layer="model.layers.0.mlp")
    masks = []
    for step in range(4000):
        dropout.forwards.fill_(step)
        masks.append(dropout(torch.zeros(1, 1, 4), Context()))
    dropped = torch.stack(masks).double()
    assert bool(((dropped.mean(0) - 0.3).abs() < 0.03).all())
    correlations = torch.corrcoef(torch.cat([dropped[1:], dropped[:-1]], dim=1).t())  # with the step before, too
    assert bool(((correlations - torch.eye(16)).abs() < 0.06).all())


def test_tokens_draw_their_own_experts_if_asked_to() -> None:
    dropping, _ = pair("smoe", per="token", drop=0.3)
    gone = dropping(torch.randn(4, 500, 8)).gates == 0
    assert bool(((gone.double().mean(0) - 0.3).abs() < 0.04).all()) and bool((gone.sum(-1) <= 4).all())


@pytest.mark.parametrize("options", [{}, {"per": "token"}], ids=["per step", "per token"])
@pytest.mark.parametrize("name", ALL_NAMES)
def test_evaluation_and_generation_drop_nothing(name: str, options: dict[str, Any]) -> None:
    dropping, plain = pair(name, **options)
    tokens = torch.randn(2, 20, 8)
    assert torch.equal(dropping.eval()(tokens).weights, plain.eval()(tokens).weights)
    dropping.train().learning = False
    assert torch.equal(dropping(tokens).gates, plain(tokens).gates)


def test_all_ranks_drop_the_same_experts_and_layers_different_ones() -> None:
    one, other = (create_router("smoe[drop=0.5]", dim=8, experts=16, layer="model.layers.0.mlp") for _ in range(2))
    deeper = create_router("smoe[drop=0.5]", dim=8, experts=16, layer="model.layers.1.mlp")
    seen = []
    for seed in range(5):  # other tokens, another number of them, another state of the generator
        torch.manual_seed(seed)
        masks = [(router(torch.randn(2, n, 8)).gates == 0).all(0) for router, n in ((one, 9), (other, 4), (deeper, 9))]
        assert torch.equal(masks[0], masks[1])
        seen.append(torch.stack([masks[0], masks[2]]))
    assert not torch.equal(*torch.stack(seen).unbind(1)) and not torch.equal(seen[0][0], seen[1][0])


def test_a_resumed_run_drops_what_it_would_have_dropped() -> None:
    whole, _ = pair("smoe")
    tokens = torch.randn(1, 9, 8)
    for _ in range(3):
        whole(tokens)
    resumed, _ = pair("smoe")
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(whole(tokens).gates, resumed(tokens).gates)


def test_what_is_learned_without_gradients_counts_every_expert() -> None:
    """The expert graph of symphony and the width of smooth are those that evaluation needs, which drops no expert."""
    dropping, plain = pair("symphony[init=identity]+smooth[budget=1.5]", drop=0.5)
    for informer in (dropping.informers[0], plain.informers[0]):
        informer.beta = 0.999999  # type: ignore[assignment]  # so that the gates of the second batch are equal
    for _ in range(3):
        tokens = torch.randn(2, 40, 8)
        dropping(tokens), plain(tokens)
        for part in ("inform.0.staged_together", "select.staged_width"):
            torch.testing.assert_close(dropping.get_buffer(part), plain.get_buffer(part), rtol=1e-4, atol=1e-6)


def test_a_bias_that_ranks_experts_never_selects_a_dropped_one() -> None:
    owner = SimpleNamespace(bias=torch.tensor([5.0, 0.0, 0.0, 5.0, 0.0, 0.0]), num_group=3, topk_group=2)
    for grouped in (False, True):
        rule = GateRule("sigmoid", renormalise=True, bias="bias", grouped=grouped)(owner)
        select, logits = TopK(6, 2, rule=rule), torch.randn(1, 40, 6)
        scores = Scores(logits, logits.sigmoid(), informed=False, raw=logits)
        without = select(
            scores.without(torch.tensor([True, False, False, True, False, False]), rule.gate), logits, Context()
        )
        assert bool(((without.experts != 0) & (without.experts != 3)).all()) and bool((without.weights > 0).all())


def test_recorded_routes_are_replayed_with_dropped_experts() -> None:
    dropping, plain = pair("smoe", drop=0.9)
    tokens = torch.randn(2, 10, 8)
    routes = Context(replayed=plain(tokens).experts.view(2, 10, -1))
    torch.testing.assert_close(dropping(tokens, routes).dense_weights, plain(tokens, routes).dense_weights)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hash", {"vocabulary": 9}, "EqualWeights takes no expert dropout: it chooses experts by token id"),
        ("stablemoe", {"vocabulary": 9}, "Distilled takes no expert dropout"),
        ("softmoe", {}, "Slots takes no expert dropout: it uses every expert"),
        ("smear", {}, "Merged takes no expert dropout"),
        ("remoe", {}, "ReLU takes no expert dropout: it has no next best expert"),
        ("base", {}, "BaseAssignment takes no expert dropout: it gives every expert its share"),
        ("sinkhorn+capacity", {}, "takes no expert dropout"),
        ("expert-choice", {}, "ExpertChoice takes no expert dropout"),
        ("smoe-dropout", {}, "TopK takes no expert dropout: it changes its number of experts"),
        ("smoe", {"drop": 1.0}, "drop is 1.0.*between 0 and 1"),
        ("smoe", {"drop": -0.1}, "drop is -0.1.*between 0 and 1"),
        ("smoe", {"per": "batch"}, "per is 'batch'"),
        ("smoe", {"drop": 0, "per": "token"}, "per is 'token', but no expert is dropped; add drop"),
    ],
)
def test_a_router_that_cannot_drop_experts_says_why(name: str, options: dict[str, Any], message: str) -> None:
    assert_refused(message, create_router, name, dim=8, experts=6, **{"drop": 0.1, **options})
