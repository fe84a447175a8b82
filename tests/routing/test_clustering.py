"""AC: spreads by hand, identities, layers without a predecessor."""

from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import Context, Routing
from holdfast.routing import Clustered, Frozen, Linear, Previous
from holdfast.routing.clustering import feature_scales


def previous(tokens: Tensor, first: Tensor, experts: int = 4) -> Previous:
    """A previous layer that sent each token to `first` (T,)."""
    gates = torch.nn.functional.one_hot(first, experts + 1)[:, :experts].float() * 0.9 + 0.1 / experts
    return Previous(tokens, Routing(gates.log(), gates, first.unsqueeze(1), torch.ones(len(first), 1)))


@pytest.mark.parametrize("spread", ["mad", "variance"])
def test_running_spreads_follow_the_rule(spread: str) -> None:
    """EMA 0.9 from 1; a cluster with fewer than 8 real tokens in a batch keeps its value."""
    torch.manual_seed(0)
    score = Clustered(6, 4, base=Linear(6, 4), spread=spread)  # type: ignore[arg-type]
    expected = torch.ones(4, 6)
    for _ in range(3):
        inputs, first = torch.randn(2, 20, 6), torch.randint(0, 3, (40,))
        first[:5], first[5:] = 3, first[5:].clamp_max(2)  # five tokens in cluster 3
        real = torch.ones(2, 20, dtype=torch.bool)
        real[1, 15:] = False
        score.begin_training_forward()
        score(torch.randn(2, 20, 6), Context(token_mask=real, previous=previous(inputs, first)))
        for c in range(3):
            members = inputs.flatten(0, 1)[(first == c) & real.flatten()]
            assert len(members) >= 8
            deviation = members - members.mean(0)
            expected[c] = 0.9 * expected[c] + 0.1 * (deviation.abs() if spread == "mad" else deviation**2).mean(0)
    score.eval()
    torch.testing.assert_close(score.spreads, expected)
    assert torch.equal(score.spreads[3], torch.ones(6))


def test_feature_scales_have_mean_1_and_a_floor() -> None:
    spreads = torch.tensor([[1.0, 2.0, 4.0, 0.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    scales = feature_scales(spreads)
    torch.testing.assert_close(scales.mean(1), torch.ones(3))
    torch.testing.assert_close(scales[0, 3] / scales[0, 0], torch.tensor(1 / 0.175))
    assert torch.equal(scales[1:], torch.ones(2, 4))


@pytest.mark.parametrize("name", ["ac", "xmoe+ac", "ac+smoe-dropout", "ac+top-p"])
def test_equal_spreads_give_the_base_router_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    clustered = holdfast.create_router(name, dim=16, experts=4).eval()
    plain = holdfast.create_router("+".join({*name.split("+")} - {"ac"}) or "smoe", dim=16, experts=4).eval()
    plain.score.load_state_dict(clustered.score.base.state_dict())  # type: ignore[union-attr, operator]
    tokens, first = torch.randn(2, 10, 16), torch.randint(0, 4, (20,))
    got, expected = clustered(tokens, Context(previous=previous(torch.randn(2, 10, 16), first))), plain(tokens)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.experts, expected.experts)


def test_the_first_layer_and_skipped_layers_use_the_base_score() -> None:
    torch.manual_seed(0)
    tokens, first = torch.randn(2, 10, 16), torch.randint(0, 4, (20,))
    context = Context(previous=previous(torch.randn(2, 10, 16) * torch.arange(16), first))
    for depth, skip, plain in ((0, 1, True), (1, 1, False), (1, 2, True), (2, 2, False), (0, 0, False)):
        score = Clustered(16, 4, base=Linear(16, 4), depth=depth, skip=skip)
        score.spreads.copy_(torch.rand(4, 16) + 0.1)
        same = torch.equal(score.eval()(tokens, context), score.base(tokens, context))
        assert same == plain, (depth, skip)
        assert torch.equal(score(tokens, Context()), score.base(tokens, Context()))


def test_a_token_without_a_previous_expert_gets_the_base_score() -> None:
    torch.manual_seed(0)
    score = Clustered(6, 4, base=Linear(6, 4)).eval()
    score.spreads.copy_(torch.rand(4, 6) + 0.1)
    tokens, first = torch.randn(1, 3, 6), torch.tensor([4, 1, 4])
    got = score(tokens, Context(previous=previous(tokens, first)))
    plain = score.base(tokens, Context())
    torch.testing.assert_close(got[0, [0, 2]], plain[0, [0, 2]])
    assert (got[0, 1] != plain[0, 1]).any()


def test_mixing_averages_the_scales_by_the_previous_gates() -> None:
    torch.manual_seed(0)
    score = Clustered(6, 4, base=Linear(6, 4), mix=2).eval()
    score.spreads.copy_(torch.rand(4, 6) + 0.1)
    gates = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    tokens = torch.randn(1, 1, 6)
    routing = Routing(gates.log(), gates, torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.4]]))
    scales = feature_scales(score.spreads)
    expected = score.base(tokens * (0.625 * scales[0] + 0.375 * scales[1]), Context())
    torch.testing.assert_close(score(tokens, Context(previous=Previous(tokens, routing))), expected)


def test_batch_statistics_do_not_declare_batch_invariance() -> None:
    traits = holdfast.create_router("ac", dim=8, experts=4, stats="batch").traits
    assert not (traits.causal or traits.batch_invariant or traits.cacheable)
    assert holdfast.create_router("ac", dim=8, experts=4).traits.batch_invariant


def test_no_gradient_flows_through_the_scales() -> None:
    score = Clustered(6, 4, base=Frozen(6, 4), stats="batch")
    inputs = torch.randn(2, 20, 6, requires_grad=True)
    tokens = torch.randn(2, 20, 6, requires_grad=True)
    score(tokens, Context(previous=previous(inputs, torch.randint(0, 4, (40,))))).sum().backward()
    assert inputs.grad is None and tokens.grad is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spread": "madd"}, "'mad'"),
        ({"stats": "runing"}, "'running'"),
        ({"mix": 9}, "mix is 9.* 4"),
        ({"skip": -1}, "skip is -1"),
    ],
)
def test_bad_options_are_one_clear_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        holdfast.create_router("ac", dim=8, experts=4, **options)


def test_layers_that_do_not_fit_are_one_clear_sentence() -> None:
    router = holdfast.create_router("ac", dim=8, experts=4)
    with pytest.raises(ValueError, match=r"\b6\b.*\b8\b"):
        router(torch.randn(1, 3, 8), Context(previous=previous(torch.randn(1, 3, 6), torch.zeros(3).long())))
    with pytest.raises(ValueError, match="clusters=5"):
        router(torch.randn(1, 3, 8), Context(previous=previous(torch.randn(1, 3, 8), torch.zeros(3).long(), experts=5)))
