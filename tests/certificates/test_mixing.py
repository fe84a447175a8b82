"""Tokens that share their gates: radii are valid when the whole sequence is perturbed."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from certificates.certified_routers import attention, build, generator, linear_score
from certificates.naive import mixed_radii

from holdfast.certificates import NoCertificate, Smoothing, certify
from holdfast.routing import Context, Linear, Router, Similarity, TopK, create_router


def pair_of_tokens(strength: float = 1.0) -> tuple[Router, torch.Tensor, Context]:
    """Two experts with w = (1,0) and (-1,0), and two tokens whose u, from attention, makes them share equally."""
    score = linear_score([[1.0, 0.0], [-1.0, 0.0]])
    made = Router(score, TopK(2, 1), [Similarity(2, of="attention", strength=strength)]).eval()
    seen = replace(attention(1, 2, 2, seed=0), output=torch.zeros(1, 2, 2))
    return made, torch.tensor([[[0.6, 0.0], [0.2, 1.0]]]), Context(attention=seen)


def test_two_tokens_with_equal_weights_by_hand() -> None:
    """Both get the mean of their gates; g_1 - g_2 is the mean m of tanh(x), and all that can be lost is 2 tanh(2 r / 4)."""
    made, tokens, context = pair_of_tokens()
    mean = (math.tanh(0.6) + math.tanh(0.2)) / 2
    found = certify(made, tokens, context)
    assert found.kind == "lower bound"
    assert found.margin.flatten().tolist() == pytest.approx([mean, mean], rel=1e-6)
    assert found.distance.flatten().tolist() == pytest.approx([2 * math.atanh(mean / 2)] * 2, rel=1e-6)


@pytest.mark.parametrize("name", ["similarity", "similarity tau 1", "similarity bilinear", "similarity learned strength"])
def test_distances_equal_the_naive_ones_for_every_sequence(name: str) -> None:
    """Sequences of short and of long tokens: the longest of its own counts, not that of another."""
    made, tokens, _ = build(name, length=7)
    tokens = tokens * torch.tensor([0.1, 1.0, 3.0, 0.5]).view(4, 1, 1)
    informer = made.informers[0]
    assert isinstance(made.score, Linear) and isinstance(informer, Similarity)
    strength = 1.0
    if informer.strength_logit is not None:
        informer.strength_logit.data.fill_(0.7)
        strength = 1 / (1 + math.exp(-0.7))
    weight, routing = made.score.weight.detach().double(), made(tokens)
    found = certify(made, tokens)
    for sequence, gates, distances in zip(tokens, routing.gates.view(4, 7, -1), found.distance, strict=True):
        expected = mixed_radii(weight, sequence, gates, 2, informer, strength)
        torch.testing.assert_close(distances, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("name", ["similarity", "attention"])
def test_informing_from_confident_tokens_only_is_refused_with_a_reason(name: str) -> None:
    """Which tokens inform a token depends on entropies, and so on every token of the sequence, without a bound."""
    options: dict[str, Any] = {"heads": 2} if name == "attention" else {}
    made = create_router(f"{name}[from=confident]", dim=12, experts=8, k=2, **options).eval()
    tokens = torch.randn(1, 5, 12, generator=generator(0))
    with pytest.raises(NoCertificate, match=r"from=confident.*entropies.*smoothing=Smoothing"):
        certify(made, tokens, Context(attention=attention(1, 5, 12, seed=0)))


def test_the_most_sensitive_token_bounds_the_whole_sequence() -> None:
    """Of cosines the shortest projection turns fastest: with one in the sequence, the others are certified for less."""
    torch.manual_seed(0)
    made = create_router("xmoe+similarity[of=attention]", dim=12, experts=8, k=2).eval()
    seen = Context(attention=attention(1, 5, 12, seed=0))
    tokens = torch.randn(1, 5, 12, generator=generator(0))
    short = tokens.clone()
    short[:, 2] *= 0.05  # the same direction, and so the same gates
    before, after = certify(made, tokens, seen), certify(made, short, seen)
    torch.testing.assert_close(before.margin, after.margin, rtol=1e-3, atol=1e-6)
    assert (after.distance[:, :2] < 0.2 * before.distance[:, :2]).all()


def test_an_inert_token_graph_is_the_plain_router() -> None:
    made, tokens, context = pair_of_tokens(strength=0.0)
    found = certify(made, tokens, context)
    assert found.kind == "exact" and found.distance.flatten().tolist() == pytest.approx([0.6, 0.2])


def test_radii_are_smaller_if_the_mixing_weights_depend_on_the_tokens() -> None:
    made, tokens, context = build("similarity attention")
    with_attention, without = certify(made, tokens, context), certify(made, tokens)
    assert without.radius.median() < with_attention.radius.median()


def test_padding_neither_counts_nor_is_certified() -> None:
    made, tokens, _ = build("similarity", batch=2)
    real = torch.ones(2, 16, dtype=torch.bool)
    real[:, 12:] = False
    wild = torch.where(real.unsqueeze(-1), tokens, torch.full_like(tokens, math.nan))
    padded, alone = certify(made, wild, Context(token_mask=real)), certify(made, tokens[:, :12])
    torch.testing.assert_close(padded.distance[:, :12], alone.distance, rtol=1e-5, atol=1e-9)
    assert (padded.radius[:, 12:] == 0).all() and torch.equal(padded.real, real)
    assert padded.summary()["tokens"] == 24


def test_longer_sequences_of_the_same_tokens_are_certified_alike() -> None:
    """The bound asks for the token that is easiest to move, not for how many there are; only rounding does."""
    made, tokens, _ = build("similarity", batch=1)
    twice = tokens.repeat(1, 2, 1)
    torch.testing.assert_close(certify(made, twice).distance[:, :16], certify(made, tokens).distance, rtol=1e-3, atol=1e-7)


def test_mixed_gates_that_are_not_a_softmax_are_refused() -> None:
    torch.manual_seed(0)
    made = create_router("similarity+remoe", dim=6, experts=4, k=2).eval()
    tokens = torch.randn(1, 5, 6, generator=generator(0))
    with pytest.raises(NoCertificate, match="smoothing=Smoothing"):
        certify(made, tokens)
    smoothing = Smoothing(sigma=0.1, samples=50, selection=20)
    found = certify(made, tokens, smoothing=smoothing)
    assert found.kind == "probabilistic" and "majority vote" in found.about and (found.radius > 0).any()
    known = create_router("smoe", dim=6, experts=4, k=2).eval()
    assert certify(known, tokens, smoothing=smoothing).kind == "exact"  # a known bound comes first
