"""The interface of `certify`: shapes, records, padding, and one-line errors."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from certificates.certified_routers import build, generator, linear_score
from wording import assert_refused

from holdfast.certificates import Gate, MajorityVote, NoCertificate, Smoothing, certify, undecided
from holdfast.routing import Context, Cosine, Linear, Router, RouterCache, TopK, create_router


def plain(dim: int = 6, experts: int = 5, k: int = 2) -> Router:
    torch.manual_seed(0)
    return create_router("smoe", dim=dim, experts=experts, k=k).eval()


def test_leading_dimensions_are_those_of_the_tokens() -> None:
    made, tokens = plain(), torch.randn(3, 7, 6, generator=generator(0))
    found = certify(made, tokens)
    for values in (found.radius, found.distance, found.relative, found.margin, found.lengths, found.real):
        assert values.shape == (3, 7)
    assert found.pair.shape == (3, 7, 2)
    flat = certify(made, tokens.flatten(0, 1))
    assert flat.radius.shape == (21,) and torch.equal(flat.radius, found.radius.flatten())
    assert certify(made, tokens[:0]).radius.shape == (0, 7)
    gate = certify(Gate(made.score.weight, 2), tokens)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(gate.distance, found.distance)


def test_a_certificate_does_not_depend_on_the_other_tokens() -> None:
    for name in ("linear", "symphony row", "top-p", "xmoe+symphony"):
        made, tokens, _ = build(name)
        whole, part = certify(made, tokens), certify(made, tokens[1:2, 3:5])
        torch.testing.assert_close(whole.radius[1:2, 3:5], part.radius, rtol=1e-9, atol=1e-12)


def test_certifying_changes_nothing_in_the_router() -> None:
    for name in ("ac", "symphony row", "smooth"):
        made, tokens, context = build(name)
        before = {key: value.clone() for key, value in made.state_dict().items()}
        certify(made, tokens, context)
        assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
        assert not any(parameter.grad is not None for parameter in made.parameters())


def test_padding_has_radius_zero_and_may_be_nan() -> None:
    made, tokens = plain(), torch.randn(2, 4, 6, generator=generator(0))
    real = torch.tensor([[True, True, True, False], [True, False, False, False]])
    wild = tokens.where(real.unsqueeze(-1), math.nan)
    found, clean = certify(made, wild, Context(token_mask=real)), certify(made, tokens)
    assert torch.equal(found.radius[real], clean.radius[real]) and (found.radius[~real] == 0).all()
    summary = found.summary()
    assert summary["tokens"] == 4 and summary["certified"] == 1.0


def test_the_summary_is_json_and_the_share_falls_with_the_radius() -> None:
    made, tokens, context = build("symphony row")
    found = certify(made, tokens, context, norm="linf")
    summary = json.loads(json.dumps(found.summary(), allow_nan=False))
    assert summary["kind"] == "lower bound" and summary["norm"] == "linf" and summary["arithmetic"] == "float32"
    assert summary["radius"]["50%"] == pytest.approx(float(found.radius.flatten().sort().values[round(0.5 * 63)]))
    assert set(summary["bounds"]) == {"pairwise", "proposition 1"} and summary["confidence"] is None
    assert found.share(0.0) == 1.0 and found.share(math.inf) == 0.0
    middle = float(found.radius.median())
    assert found.share(middle) == pytest.approx(0.5, abs=0.02) and found.share(0.01, relative=True) > 0.5
    everything = certify(plain(k=5), torch.ones(2, 6))
    assert json.dumps(everything.summary(), allow_nan=False) and everything.summary()["radius"] == dict.fromkeys(
        ("5%", "25%", "50%", "75%", "95%")
    )
    assert certify(made, tokens[:0], context).summary()["certified"] == 0.0


def test_a_zero_token_has_no_finite_relative_radius() -> None:
    made = Router(linear_score(torch.eye(2), [1.0, 0.0]), select=TopK(2, 1)).eval()
    found = certify(made, torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert found.relative.tolist() == [math.inf, 0.0]


def test_the_float32_radius_is_smaller_by_rounding_errors() -> None:
    made, tokens, context = build("linear")
    exact, rounded = certify(made, tokens, context, arithmetic=None), certify(made, tokens, context)
    assert torch.equal(exact.radius, exact.distance) and torch.equal(exact.distance, rounded.distance)
    assert (rounded.radius < exact.radius).all() and exact.arithmetic == "real numbers"
    likely = certify(made, tokens, context, rounding="likely")
    assert likely.arithmetic == "float32, likely rounding"


def test_a_growing_k_is_certified_at_its_current_value() -> None:
    torch.manual_seed(0)
    made = create_router("smoe-dropout", dim=6, experts=5, k=1).eval()
    tokens = torch.randn(20, 6)
    made.progress(0.5)
    assert made(tokens).used.sum(-1).unique().tolist() == [3]
    found = certify(made, tokens)
    assert found.kind == "exact" and (found.radius > 0).all()
    made.progress(1.0)
    assert certify(made, tokens).radius.isinf().all()


def test_a_router_that_contradicts_its_declarations_is_refused() -> None:
    class Contrary(TopK):
        def forward(self, scores, tokens, context):  # type: ignore[no-untyped-def]
            flipped = type(scores)(-scores.logits, scores.gates, informed=False, raw=scores.raw)
            return super().forward(flipped, tokens, context)

    made = Router(Linear(6, 4), select=Contrary(4, 1)).eval()
    with pytest.raises(ValueError, match="other experts than the router's parts declare"):
        certify(made, torch.randn(20, 6, generator=generator(0)))


def test_a_zero_projection_has_radius_zero() -> None:
    made = Router(Cosine(6, 4), select=TopK(4, 2)).eval()
    found = certify(made, torch.zeros(2, 6))
    assert found.radius.tolist() == [0.0, 0.0]
    informed = create_router("xmoe+symphony", dim=6, experts=4, k=2, init="identity").eval()
    assert certify(informed, torch.zeros(2, 6)).radius.tolist() == [0.0, 0.0]


MADE, TOKENS, VOTES = plain(), torch.randn(4, 6), Smoothing(sigma=1.0, samples=10)
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: certify(MADE, TOKENS, norm="l_2"), r"'l_2'.*'l2'"),  # type: ignore[arg-type]
    (lambda: certify(MADE, TOKENS.index_fill(0, torch.tensor([2]), math.nan)), r"1 of 4 tokens.*NaN"),
    (lambda: certify(MADE, TOKENS[:, :5]), r"\(4, 5\).*\(B, N, 6\).*\(T, 6\)"),
    (lambda: certify(build("similarity")[0], torch.randn(4, 12)), r"\(B, N, 12\)"),
    (lambda: certify(plain().train(), TOKENS), "eval"),
    (lambda: certify(MADE, TOKENS, Context(cache=RouterCache())), "cache"),
    (lambda: certify(Gate(torch.eye(6), 1), TOKENS, Context()), "Gate"),
    (lambda: certify("smoe", TOKENS), r"Router.*Gate"),  # type: ignore[arg-type]
    (lambda: Gate(torch.eye(6), 7), r"\bk\b.* 7"),
    (lambda: Gate(torch.eye(6), 1, bias=torch.zeros(2)), r"bias.*\(2,\).*\b6\b"),
    (lambda: Gate(torch.full((2, 2), math.nan), 1), "finite"),
    (lambda: certify(MADE, TOKENS, arithmetic=torch.int32), "floating-point"),
    (lambda: undecided(MADE, TOKENS, torch.int64), "floating-point"),
    (lambda: undecided(MADE, TOKENS, torch.float32, accumulate=torch.bfloat16), "no kernel sums in a shorter type"),
    (lambda: undecided(MADE, TOKENS, torch.float32, rounding="wors"), "'worst'"),  # type: ignore[arg-type]
    (lambda: Smoothing(sigma=-1.0), r"sigma.* -1"),
    (lambda: Smoothing(sigma=1.0, alpha=0.0), r"alpha.* 0"),
    (lambda: Smoothing(sigma=1.0, samples=0), "at least 1"),
    (lambda: certify(MajorityVote(MADE, VOTES), TOKENS * math.nan), "NaN"),
    (lambda: certify(MajorityVote(MADE, VOTES), TOKENS.long()), "floating"),
    (lambda: certify(MajorityVote(plain().train(), VOTES), TOKENS), "eval"),
    (lambda: MajorityVote(lambda rows: MADE(rows), VOTES, context=Context()), "callable"),
    (lambda: MajorityVote(MADE, VOTES, context=Context(cache=RouterCache())), "cache"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_raise_one_line_errors(call: Callable[[], object], says: str) -> None:
    assert_refused(says, call)


@pytest.mark.parametrize("name", ["softmoe", "smear", "softmoe+symphony"])
def test_a_router_that_uses_all_experts_is_refused_without_advice(name: str) -> None:
    """A vote of such a router would be certified for any noise, and would say nothing."""
    made, tokens = create_router(name, dim=6, experts=4).eval(), torch.randn(2, 5, 6, generator=generator(0))
    for smoothing in (None, Smoothing(sigma=1.0)):
        with pytest.raises(NoCertificate, match="every token uses every expert") as caught:
            certify(made, tokens, smoothing=smoothing)
        assert "smoothing" not in str(caught.value) and "vote" not in str(caught.value)
