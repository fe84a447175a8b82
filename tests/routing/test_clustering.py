"""AC: spreads by hand, identities, layers without a predecessor."""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from references import interquartile_range, optimal
from torch import Tensor

import holdfast
from holdfast import Context, Routing
from holdfast.hub.specs import LayerInfo, LayerSpec, build_routers, linked_in_order
from holdfast.kernels.clusters.naive import optimal_scales, quartile_ranges
from holdfast.routing import Clustered, Frozen, Linear, Previous
from holdfast.routing.clustering import feature_scales
from holdfast.routing.registry import HostModel


def previous(tokens: Tensor, first: Tensor, experts: int = 4) -> Previous:
    """A previous layer that sent each token to `first` (T,)."""
    gates = torch.nn.functional.one_hot(first, experts + 1)[:, :experts].float() * 0.9 + 0.1 / experts
    return Previous(tokens, Routing(gates.log(), gates, first.unsqueeze(1), torch.ones(len(first), 1)))


@pytest.mark.parametrize("spread", ["mad", "variance", "iqr"])
def test_running_spreads_follow_the_rule(spread: str) -> None:
    """EMA 0.9 from 1; a cluster with fewer than 8 real tokens in a batch keeps its value."""
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
            amounts = {
                "mad": deviation.abs().mean(0),
                "variance": (deviation**2).mean(0),
                "iqr": interquartile_range(members),
            }
            expected[c] = 0.9 * expected[c] + 0.1 * amounts[spread]
    score.eval()
    torch.testing.assert_close(score.spreads, expected)
    assert torch.equal(score.spreads[3], torch.ones(6))


def test_feature_scales_have_mean_1_and_a_floor() -> None:
    spreads = torch.tensor([[1.0, 2.0, 4.0, 0.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    scales = feature_scales(spreads)
    torch.testing.assert_close(scales.mean(1), torch.ones(3))
    torch.testing.assert_close(scales[0, 3] / scales[0, 0], torch.tensor(1 / 0.175))
    assert torch.equal(scales[1:], torch.ones(2, 4))


def test_quartiles_are_order_statistics_whatever_the_sizes() -> None:
    """Ties, both zeros, huge and tiny values, clusters of 0 to 9 tokens, tokens without a cluster, padding."""
    clusters_of = torch.cat([torch.full((count,), count) for count in range(10)] + [torch.full((4,), 12)])
    values = torch.randn(len(clusters_of), 7) * torch.tensor([1.0, 1e-30, 1e30, 1.0, 1.0, 0.0, -1.0])
    values[:, 3] = values[:, 3].round()
    values[::2, 4] = -0.0
    real = torch.rand(len(clusters_of)) < 0.8
    values[~real, 0] = torch.nan
    ranges, counts = quartile_ranges(values, real, clusters_of, 10, None)
    for cluster in range(10):
        members = values[(clusters_of == cluster) & real]
        assert counts[cluster] == len(members)
        expected = interquartile_range(members) if len(members) else torch.zeros(7)
        assert torch.equal(ranges[cluster], expected), cluster


def test_exact_scales_solve_the_equation_of_theorem_1() -> None:
    spreads = torch.exp(2 * torch.randn(6, 33))
    spreads[1] = 3.0
    spreads[2, :30] = 0.0
    spreads[3] = 0.0
    scales = optimal_scales(spreads)
    torch.testing.assert_close(scales.mean(1), torch.ones(6))
    assert (scales > 0).all()
    assert torch.equal(scales[1], torch.ones(33)) and torch.equal(scales[3], torch.ones(33))
    for got, spread in zip(scales, spreads, strict=True):
        torch.testing.assert_close(got.double(), optimal(spread.double()), rtol=1e-5, atol=1e-7)
    order = spreads[0].argsort()
    assert (scales[0][order].diff() <= 0).all()  # a smaller spread never has a smaller scale


def test_random_features_are_drawn_once_and_saved() -> None:
    base = Linear(400, 8)
    score = Clustered(400, 8, base=base, features="random")
    drawn = score.random_scales
    assert (drawn >= 0).all() and float((drawn == 0).float().mean()) == pytest.approx(0.0228, abs=0.01)
    assert float(drawn.mean()) == pytest.approx(1.004, abs=0.02) and float(drawn.std()) == pytest.approx(0.49, abs=0.02)
    tokens, first = torch.randn(1, 20, 400), torch.arange(20) % 8
    context = Context(previous=previous(torch.randn(1, 20, 400), first, experts=8))
    expected = (tokens * drawn[first]) @ base.matrix.t()
    torch.testing.assert_close(score(tokens, context), expected, rtol=1e-4, atol=1e-5)
    before = {name: value.clone() for name, value in score.state_dict().items()}
    assert "spreads" not in before
    score(tokens, context)
    assert all(torch.equal(value, before[name]) for name, value in score.eval().state_dict().items())
    other = Clustered(400, 8, base=Linear(400, 8), features="random")
    other.load_state_dict(before)
    assert torch.equal(other(tokens, context), score(tokens, context))


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["mad", "iqr"])
def test_two_processes_learn_the_spreads_of_one(spread: str) -> None:
    script = Path(__file__).with_name("learning_on_ranks.py")
    assert on_ranks(script, "2", spread) == on_ranks(script, "1", spread, processes=1)


@pytest.mark.parametrize("name", ["ac", "xmoe+ac", "ac+smoe-dropout", "ac+top-p"])
def test_equal_spreads_give_the_base_router_to_the_bit(name: str) -> None:
    clustered = holdfast.create_router(name, dim=16, experts=4).eval()
    plain = holdfast.create_router("+".join({*name.split("+")} - {"ac"}) or "smoe", dim=16, experts=4).eval()
    plain.score.load_state_dict(clustered.score.base.state_dict())  # type: ignore[union-attr, operator]
    tokens, first = torch.randn(2, 10, 16), torch.randint(0, 4, (20,))
    got, expected = clustered(tokens, Context(previous=previous(torch.randn(2, 10, 16), first))), plain(tokens)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.experts, expected.experts)


def test_the_first_layer_and_skipped_layers_use_the_base_score() -> None:
    tokens, first = torch.randn(2, 10, 16), torch.randint(0, 4, (20,))
    context = Context(previous=previous(torch.randn(2, 10, 16) * torch.arange(16), first))
    cases = ((0, 0, True), (1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True), (0, 3, True), (None, 3, False))
    for place, skip, plain in cases:
        score = Clustered(16, 4, base=Linear(16, 4), place=place, skip=skip)
        score.spreads.copy_(torch.rand(4, 16) + 0.1)
        same = torch.equal(score.eval()(tokens, context), score.base(tokens, context))
        assert same == plain, (place, skip)
        assert torch.equal(score(tokens, Context()), score.base(tokens, Context()))
        assert score.reads == (() if plain else ("previous",))


@pytest.mark.parametrize(
    ("layers", "skip", "clustered"),
    [
        (6, 0, [2, 3, 4, 5, 6]),  # Switch, "Full"
        (6, 1, [3, 4, 5, 6]),  # Switch, "Skip 1"
        (9, 0, [2, 3, 4, 5, 6, 7, 8, 9]),  # Swin's nine MoE layers (2, 4, ..., 18), "Full": layers 4 to 18
        (9, 1, [3, 4, 5, 6, 7, 8, 9]),  # "Skip 1": layers 6 to 18
        (9, 2, [4, 5, 6, 7, 8, 9]),  # "Skip 2": layers 8 to 18
    ],
)
def test_skip_counts_as_the_tables_of_the_paper(layers: int, skip: int, clustered: list[int]) -> None:
    infos = linked_in_order([LayerInfo(f"layers.{index}", 8, 4, 2) for index in range(layers)])
    specs = {info.name: LayerSpec("ac", 2, {"skip": skip}) for info in infos}
    built = build_routers(infos, specs, {info.name: HostModel() for info in infos})
    reading = [number for number, router in enumerate(built.values(), 1) if router is not None and router.reads]
    assert reading == clustered


def test_layers_after_a_change_of_width_are_plain_and_do_not_count() -> None:
    widths = [8, 8, 16, 16, 16, 32]
    infos = linked_in_order([LayerInfo(f"layers.{index}", width, 4, 2) for index, width in enumerate(widths)])
    assert [info.place for info in infos] == [0, 1, 0, 2, 3, 0]


def test_a_token_without_a_previous_expert_gets_the_base_score() -> None:
    score = Clustered(6, 4, base=Linear(6, 4)).eval()
    score.spreads.copy_(torch.rand(4, 6) + 0.1)
    tokens, first = torch.randn(1, 3, 6), torch.tensor([4, 1, 4])
    got = score(tokens, Context(previous=previous(tokens, first)))
    plain = score.base(tokens, Context())
    torch.testing.assert_close(got[0, [0, 2]], plain[0, [0, 2]])
    assert (got[0, 1] != plain[0, 1]).any()


def test_no_gradient_flows_through_the_scales() -> None:
    score = Clustered(6, 4, base=Frozen(6, 4), stats="batch")
    inputs = torch.randn(2, 20, 6, requires_grad=True)
    tokens = torch.randn(2, 20, 6, requires_grad=True)
    score(tokens, Context(previous=previous(inputs, torch.randint(0, 4, (40,))))).sum().backward()
    assert inputs.grad is None and tokens.grad is not None


def test_layers_that_do_not_fit_are_one_clear_sentence() -> None:
    router = holdfast.create_router("ac", dim=8, experts=4)
    with pytest.raises(ValueError, match=r"\b6\b.*\b8\b"):
        router(torch.randn(1, 3, 8), Context(previous=previous(torch.randn(1, 3, 6), torch.zeros(3).long())))
    with pytest.raises(ValueError, match="clusters=5"):
        router(torch.randn(1, 3, 8), Context(previous=previous(torch.randn(1, 3, 8), torch.zeros(3).long(), experts=5)))
