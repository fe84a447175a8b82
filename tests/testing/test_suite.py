"""The conformance suite itself: toy informers pass it, and for every check there is a broken router that fails it."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import references
import torch
import toy_parts
from tiers import quick_or_slow
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.kernels.operators import refuse_second_derivatives
from holdfast.routing import (
    ActiveExperts,
    BaseAssignment,
    Conditions,
    Context,
    Cost,
    Informer,
    Linear,
    Router,
    Scores,
    Selection,
    SelectorDeclarations,
    Shares,
    SmoothTopK,
    TopK,
    Traits,
    keep_best,
)
from holdfast.testing import CHECKS, check_router

DIM, EXPERTS = 24, 7


def with_part(build: Callable[..., Any]) -> Router:
    """Return a router with one part made by `build`, a class or a partial call of one; its other parts are plain."""
    torch.manual_seed(0)
    kind: Any = getattr(build, "func", build)
    if issubclass(kind, Informer):
        return toy_parts.build(build())
    if issubclass(kind, Linear):
        return Router(build(DIM, EXPERTS), TopK(EXPERTS, 2))
    return Router(Linear(DIM, EXPERTS), build(EXPERTS, 2))


INFORMERS: dict[str, Callable[[], tuple[Informer, ...]]] = {
    "expert side": lambda: (toy_parts.FixedGraph(EXPERTS),),
    "token side": lambda: (toy_parts.RunningMean(),),
    "both sides": lambda: (toy_parts.FixedGraph(EXPERTS), toy_parts.RunningMean()),
    "both sides, the other order": lambda: (toy_parts.RunningMean(), toy_parts.FixedGraph(EXPERTS)),
}


UNDECLARED = ("declared certificate", "declared weights", "declared cost")  # toys declare neither
DECLARED = [check for check in CHECKS if check not in UNDECLARED]


@pytest.mark.parametrize("check", quick_or_slow(DECLARED, [check for check in DECLARED if check != "compile"]))
@pytest.mark.parametrize("informers", INFORMERS)
def test_toy_informers_conform(informers: str, check: str) -> None:
    report = check_router(toy_parts.build(*INFORMERS[informers]()), reference=toy_parts.reference, only=[check])
    assert report.passed == (check,)


@pytest.mark.parametrize("check", UNDECLARED)
def test_what_is_not_declared_is_left_out_with_a_reason(check: str) -> None:
    report = check_router(toy_parts.build(toy_parts.RunningMean()), only=[check])
    assert not report.passed and "RunningMean" in report.skipped[check]


def changed(kind: Any, **attributes: Any) -> Any:
    """Return a part like `kind` with other attributes."""
    return type(f"Changed{kind.__name__}", (kind,), attributes)


def claiming(kind: Any, **claims: Any) -> Any:
    """Return a part like `kind` with other declarations."""
    return changed(kind, declares=property(lambda part: replace(kind.declares.fget(part), **claims)))


def scoring(compute: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Any:
    """Return a score whose logits are `compute(linear, tokens)`."""
    return changed(Linear, forward=lambda part, x, context: compute(lambda rows: Linear.forward(part, rows, context), x))


def running_mean(**values: Any) -> Any:
    """Return the token-side toy, for which these fields of the context have other values."""
    mean: Any = toy_parts.RunningMean.forward
    return changed(toy_parts.RunningMean, forward=lambda *given: mean(*given[:-1], replace(given[-1], **values)))


class SeesTheBatch(Informer):
    side = "token"
    traits = Traits(sequence_aware=True)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        return gates + gates.mean(0, keepdim=True)


class MultipliesPadding(Informer):
    """Reads rows of the context that may hold anything."""

    side = "token"

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(DIM) / DIM)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        assert context.attention is not None
        return gates * (context.attention.output @ self.slope).sigmoid().unsqueeze(-1)


class CutsTheGraph(torch.autograd.Function):
    """Twice the input squared; its backward is right, and a constant to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (4 * x * grad).detach()


class FailsTwice(Linear):
    says = "trying to differentiate twice"

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        logits = super().forward(tokens, context).square()
        if logits.requires_grad:
            logits.register_hook(lambda grad: refuse_second_derivatives(grad, self.says))
        return logits


class RefusesTwice(FailsTwice):
    says = "this score has no second derivatives"


class LearnsAtOnce(Informer):
    """Updates its state inside the forward, recomputed or not."""

    side = "expert"
    seen: Tensor

    def __init__(self, *, in_evaluation: bool = False, saved: bool = True) -> None:
        super().__init__()
        self.in_evaluation = in_evaluation
        self.register_buffer("seen", torch.zeros(EXPERTS), persistent=saved)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        before = self.seen.clone()
        if self.training or self.in_evaluation:
            self.seen += gates.detach().sum((0, 1))
        return gates + before


class Idle(Linear):
    """A parameter and a coefficient that do nothing."""

    coefficients = ("strength",)

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.strength, self.unused = 0.0, torch.nn.Parameter(torch.zeros(3))


class Ascending(TopK):
    """Slots in the wrong order."""

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        chosen = super().forward(scores, tokens, context)
        return chosen._replace(experts=chosen.experts.flip(-1), weights=chosen.weights.flip(-1))


class ReturnsATuple(TopK):
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Any:
        return super().forward(scores, tokens, context)[:2]


class DividesByZero(TopK):
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        chosen = super().forward(scores, tokens, context)
        weights = scores.gates.gather(-1, chosen.experts)
        return chosen._replace(weights=weights / weights.sum(-1, keepdim=True))


class HigherIndexFirst(TopK):
    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        mirrored = Scores(scores.logits.flip(-1), scores.gates.flip(-1), scores.informed)
        chosen = super().forward(mirrored, tokens, context)
        return chosen._replace(experts=EXPERTS - 1 - chosen.experts, gates=scores.gates)


class HoldsConstants(TopK):
    """Right on the live set, and without a gradient elsewhere."""

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return live.weights_if_same_set(experts, super().held_weights(experts, scores, live).detach(), scaled=True)


class HoldsEvenly(TopK):
    """Right on the live set, and even weights elsewhere."""

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        even = super().held_weights(experts, scores, live).mean(-1, keepdim=True).expand_as(experts)
        return live.weights_if_same_set(experts, even, scaled=True)


class ForgetsAnExpert(TopK):
    """Declares that its set is kept whatever the last expert's score becomes."""

    @property
    def declares(self) -> SelectorDeclarations:
        return replace(super().declares, conditions=self.too_few)

    def too_few(self, scores: Scores) -> Conditions:
        found = keep_best(scores.key, self.k, scores.compares)
        return replace(found, valid=found.valid & (found.behind != EXPERTS - 1).all(-1))


def half_precision(part: Any, tokens: Tensor, context: Context) -> Tensor:
    return torch.nn.functional.linear(tokens, part.weight.to(tokens.dtype)).float()


def gentle(shares: Shares | None) -> Shares:
    assert shares is not None
    return replace(shares, slope=1.0)


HalfPrecision = changed(Linear, forward=half_precision)
Unseeded = scoring(lambda linear, tokens: linear(tokens) * (1 + random.random()))
Breaks = scoring(lambda linear, tokens: linear(tokens) * (2 if tokens.sum().item() > 0 else 1))  # asks the host
NotWhenEmpty = scoring(lambda linear, tokens: linear(tokens) - tokens.amax().detach() * 0)
SwallowsNaN = scoring(lambda linear, tokens: linear(tokens.nan_to_num()))
Constant = scoring(lambda linear, tokens: linear(torch.ones_like(tokens)))  # the same scores for every token
RightOnce = scoring(lambda linear, tokens: CutsTheGraph.apply(linear(tokens)))
SeesTheFuture, SeesPadding = running_mean(causal=False), running_mean(token_mask=None)
ForgetsTheCache = running_mean(cache=None)
Undeclared, DeniesCache = changed(toy_parts.RunningMean, traits=Traits()), changed(Linear, traits=Traits(cacheable=False))
CheapCache = claiming(toy_parts.RunningMean, cost=lambda sizes: Cost("mean", cached=1))  # too few bytes
KeepsLittle = claiming(Linear, cost=lambda sizes: Cost("score", kept=9000))  # far more bytes than it saves
GathersSecretly = claiming(BaseAssignment, cost=lambda sizes: Cost("selection"))
ClaimsToIgnoreTokens = claiming(Linear, reads_tokens=False)
BalancesSecretly = changed(BaseAssignment, training_traits=Traits())  # it sees the whole batch in training
DeniesTraining = changed(TopK, training_traits=Traits(causal=False, batch_invariant=False))
ClaimsSequences = changed(Linear, traits=Traits(sequence_aware=True))
DeniesInvariance = changed(Linear, traits=Traits(batch_invariant=False))
LearnsAlways = partial(LearnsAtOnce, in_evaluation=True)
FewSlots = claiming(TopK, active=lambda sizes: ActiveExperts(1, 1, 1))
FewRows = changed(TopK, most_rows=lambda part, tokens: part.k * tokens - 1)
HoldsTooMuch = changed(TopK, held_weights=lambda *given: 1.01 * TopK.held_weights(*given))
ReplaysTooMuch = changed(TopK, replayed_weights=lambda *given: 1.01 * TopK.replayed_weights(*given))
OtherWeights = partial(claiming(TopK, shares=lambda: Shares(2)), weights="switch")
GentleSlope = changed(SmoothTopK, _shares=lambda part: gentle(SmoothTopK._shares(part)))
NarrowStrip = claiming(SmoothTopK, shares=lambda: Shares(2))
BROKEN: dict[str, tuple[Callable[..., Any], str, str]] = {
    "slots ascending": (Ascending, "contract", "sorted"),
    "returns a tuple": (ReturnsATuple, "contract", "ReturnsATuple must return a Selection, but it returned a tuple"),
    "divides by a sum of 0": (DividesByZero, "contract", "all gates 0"),
    "fails on T = 0": (NotWhenEmpty, "empty batch", "amax"),
    "swallows NaN": (SwallowsNaN, "bad input", "does not raise ValueError"),
    "half precision": (HalfPrecision, "float32 routing", "medium|bfloat16 model"),  # not every CPU rounds at "medium"
    "unseeded": (Unseeded, "determinism", "seed"),
    "higher index first": (HigherIndexFirst, "ties", "lower index"),
    "sees the future": (SeesTheFuture, "causality", "declares the trait causal"),
    "denies being causal": (changed(Linear, traits=Traits(causal=False)), "causality", "does not declare the trait causal"),
    "sees the future in training": (BalancesSecretly, "causality", "declares the trait causal in training"),
    "denies being causal in training": (DeniesTraining, "causality", "does not declare the trait causal in training"),
    "sees the batch in training": (BalancesSecretly, "batch invariance", "declares the trait batch_invariant in training"),
    "denies batch invariance in training": (DeniesTraining, "batch invariance", "not declare the trait batch_invariant in"),
    "gathers without declaring it": (GathersSecretly, "declared cost", "gathered"),
    "declares too many saved bytes": (KeepsLittle, "declared cost", r"\(kept\) is 9\d+ bytes"),
    "claims equal loads": (claiming(TopK, equal_loads=True), "no inert coefficient", "equal loads"),
    "declares what it does not do": (ClaimsSequences, "sequence awareness", "declares the trait sequence"),
    "does what it does not declare": (Undeclared, "sequence awareness", "does not declare the trait sequence"),
    "sees padding": (SeesPadding, "padding", "padding"),
    "multiplies padding": (MultipliesPadding, "padding", "NaN in padding"),
    "right once": (RightOnce, "second derivatives", "gradients"),
    "fails twice": (FailsTwice, "second derivatives", "differentiate twice"),
    "sees the batch": (SeesTheBatch, "batch invariance", "declares the trait batch_invariant"),
    "denies batch invariance": (DeniesInvariance, "batch invariance", "does not declare the trait"),
    "forgets the cache": (ForgetsTheCache, "cached decoding", "declares the trait cacheable"),
    "denies being cacheable": (DeniesCache, "cached decoding", "does not declare the trait cacheable"),
    "declares too little cost": (CheapCache, "declared cost", "is 1 bytes, but the counted cost is 32"),
    "claims fixed sets": (claiming(TopK, fixed_sets=True), "declared fixed sets", "other tokens change them"),
    "claims to ignore tokens": (ClaimsToIgnoreTokens, "declared fixed sets", "other tokens change them"),
    "denies fixed sets": (Constant, "declared fixed sets", "other tokens change no set"),
    "declares too few slots": (FewSlots, "declared number of experts", "1 slots"),
    "declares too few rows": (FewRows, "declared number of experts", "101 rows"),
    "holds too much": (HoldsTooMuch, "held weights", "exactly the live weights"),
    "holds constants": (HoldsConstants, "held weights", "no gradient"),
    "holds evenly": (HoldsEvenly, "held weights", "change by"),
    "replays too much": (ReplaysTooMuch, "replay", "changes its weights"),
    "certifies too much": (ForgetsAnExpert, "declared certificate", "within their certified radius"),
    "declares other weights": (OtherWeights, "declared weights", "other weights than the router's parts declare"),
    "declares a gentle slope": (GentleSlope, "declared weights", "above the declared one"),
    "declares a strip that is too narrow": (NarrowStrip, "declared weights", "other weights than"),
    "does not save": (partial(LearnsAtOnce, saved=False), "save and load", "after loading"),
    "learns in evaluation": (LearnsAlways, "evaluation keeps state", "evaluation changed inform.0.seen"),
    "counts twice": (LearnsAtOnce, "activation checkpointing", "recomputation"),
    "idle parameter": (Idle, "no inert parameter", "score.unused gets no gradient"),
    "idle coefficient": (Idle, "no inert coefficient", "'strength' changes no gradient"),
    "breaks the graph": (Breaks, "compile", "data-dependent"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_router_fails_its_check(fault: str) -> None:
    part, check, says = BROKEN[fault]
    with pytest.raises(AssertionError, match=f"(?s)fails '{check}'.*{says}"):
        check_router(partial(with_part, part), only=[check])


def test_a_wrong_reference_fails_its_check() -> None:
    def wrong(*arguments: Any) -> holdfast.Routing:
        routing = references.reference(*arguments)
        return holdfast.Routing(routing.logits, routing.gates, routing.experts, routing.weights * 1.001, routing.losses)

    with pytest.raises(AssertionError, match="naive reference"):
        check_router("smoe", reference=wrong, only=["naive reference"])


def test_every_check_has_a_router_that_fails_it() -> None:
    assert {check for _, check, _ in BROKEN.values()} | {"naive reference"} == set(CHECKS)


@pytest.mark.parametrize(
    ("informer", "check"),
    [(SeesTheFuture, "causality"), (SeesTheBatch, "batch invariance"), (ForgetsTheCache, "cached decoding")],
)
def test_a_denied_trait_that_is_really_missing_passes(informer: type[Informer], check: str) -> None:
    part = informer()
    part.traits = Traits(causal=False, batch_invariant=False, cacheable=False, sequence_aware=True)
    assert check_router(toy_parts.build(part), only=[check]).passed == (check,)


def test_second_derivatives_may_be_refused_in_words() -> None:
    report = check_router(with_part(RefusesTwice), only=["second derivatives"])
    assert report.notes == {"second derivatives": "refused: this score has no second derivatives"}


@pytest.mark.parametrize("name", ["smoe", "similarity", "symphony", "smooth", "ac"])
def test_second_derivatives_are_compared_without_a_reference_too(name: str) -> None:
    assert check_router(name, only=["second derivatives"]).passed == ("second derivatives",)


def test_the_reference_check_says_that_it_was_left_out() -> None:
    assert check_router("smoe", only=["naive reference"]).skipped == {"naive reference": "no naive reference was given"}


def test_an_unknown_check_suggests_the_nearest() -> None:
    assert_refused(r"'causal'.*'causality'", check_router, "smoe", only=["causal"])


def test_checking_leaves_the_random_state_alone() -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    check_router("smoe", only=["contract", "determinism"])
    assert torch.equal(torch.random.get_rng_state(), before)
