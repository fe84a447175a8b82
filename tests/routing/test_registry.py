"""Names, the + grammar, options and the sentences for mistakes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from router_names import WITHOUT_CONTEXT
from wording import assert_refused

import holdfast
from holdfast.routing import Cosine, Frozen, Linear, ReLU, Score, Similarity, SmoothTopK, TopK, TopP
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import Preset


@pytest.fixture
def scratch_name() -> Iterator[str]:
    yield "scratch"
    REGISTRY.remove("scratch")


@pytest.mark.parametrize(
    ("name", "score", "select"),
    [
        ("smoe", Linear, TopK),
        ("switch", Linear, TopK),
        ("xmoe", Cosine, TopK),
        ("smoe-dropout", Frozen, TopK),
        ("random", Frozen, TopK),
        ("top-p", Linear, TopP),
        ("remoe", Linear, ReLU),
        ("xmoe+top-p", Cosine, TopP),
        ("top-p+xmoe", Cosine, TopP),
        (" xmoe + remoe ", Cosine, ReLU),
        ("smoe+xmoe", Cosine, TopK),
    ],
)
def test_names_replace_the_stages_they_list(name: str, score: type, select: type) -> None:
    built = holdfast.create_router(name, dim=8, experts=4)
    assert (type(built.score), type(built.select)) == (score, select)


def test_k_is_two_unless_the_name_says_otherwise() -> None:
    ks = {name: holdfast.create_router(name, dim=8, experts=4).select.k for name in ("smoe", "xmoe", "switch")}
    assert ks == {"smoe": 2, "xmoe": 2, "switch": 1}
    assert holdfast.create_router("switch", dim=8, experts=4, k=3).select.k == 3
    assert holdfast.create_router("smoe", dim=8, experts=1).select.k == 1


def test_options_reach_the_part_that_has_them() -> None:
    built = holdfast.create_router("xmoe+top-p", dim=8, experts=4, p=0.2, temperature=0.5)
    assert isinstance(built.select, TopP) and built.select.fixed_p == 0.2
    assert isinstance(built.score, Cosine)
    torch.testing.assert_close(built.score.log_temperature.exp(), torch.tensor([0.5]))


def test_options_in_brackets_and_by_keyword_build_the_same_router() -> None:
    written = holdfast.create_router("similarity[tau=2]+smooth[budget=0.5]", dim=8, experts=4, rank=3)
    by_keyword = holdfast.create_router("similarity+smooth", dim=8, experts=4, tau=2.0, budget=0.5, rank=3)
    for one in (written, by_keyword):
        similarity, smooth = one.inform[0], one.select
        assert isinstance(similarity, Similarity) and isinstance(smooth, SmoothTopK)
        assert (similarity.tau, smooth.budget) == (2.0, 0.5)


def test_brackets_may_follow_any_of_the_joined_names() -> None:
    resolved = ("xmoe+top-p", {"p": 0.2, "temperature": 0.5})
    assert REGISTRY.resolve("xmoe[p=0.2]+top-p[temperature=5e-1]") == resolved
    assert REGISTRY.resolve(" xmoe + top-p [p=0.2, temperature=0.5]") == resolved
    assert REGISTRY.resolve("xmoe+top-p[p=.2]", {"temperature": 0.5}) == resolved


def test_an_option_overrides_the_default_of_a_name() -> None:
    built = holdfast.create_router("switch", dim=8, experts=4, weights="softmax")
    assert isinstance(built.select, TopK) and built.select.weights == "softmax"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("smo", {}, "unknown router 'smo': did you mean 'smoe'"),
        ("xmoe+topp", {}, "unknown router 'topp': did you mean 'top-p'"),
        ("", {}, "unknown router ''"),
        (None, {}, "the name of a router is a string"),
        ("similarity[rank=4", {}, "is not a router"),
        ("similarity[rank=4]", {"rank": 4}, "the option rank is given twice, in 'similarity.rank=4.' and by keyword"),
        ("similarity[tau=2]+smooth[tau=3]", {}, "gives the option tau twice"),
        ("similarity[rank=1.5]+smooth", {}, "the option rank is 1.5, not a whole number or empty"),
        ("smoe[k=1.5]", {}, "the option k is 1.5, not a whole number"),
        ("smoe[k=3]", {"k": 3}, "the option k is given twice, in 'smoe.k=3.' and by keyword"),
        ("ac@1", {}, "'ac@1' names layers of a model, but one router is needed here"),
        ("smoe@even|switch", {}, "names layers of a model"),
        ("top-p+remoe", {}, "'top-p' and 'remoe' both replace the stage 'select'"),
        ("xmoe+smoe-dropout", {}, "'xmoe' and 'smoe-dropout' both replace the stage 'score'"),
        ("smoe", {"k": 5}, "k is 5; it must be between 1 and the number of experts, 4"),
        ("smoe", {"k": 0}, "k is 0; it must be between 1"),
        ("smoe", {"dim": 0}, "dim is 0"),
        ("smoe", {"experts": 0}, "experts is 0"),
        ("top-p", {"q": 0.1}, "'q'"),
        ("xmoe", {"temprature": 0.1}, "'xmoe'.*'temprature'.*'temperature'"),
        ("smoe", {"temperature": 0.1}, "'temperature'"),
        ("expert-choice+capacity[factor=0.5]", {}, "both have an option factor"),
        ("xmoe+stablemoe[width=20]", {}, "both have an option width"),
        ("top-p[k=3]", {}, "has no k"),
        ("sparsemax[k=3]", {}, "has no k"),
        ("softmoe[k=2]", {}, "has no k"),
        ("smear[k=2]", {}, "has no k"),
        ("capacity", {"factor": "much"}, "the option factor is 'much', not "),
        ("smoe", {"k": 2.5}, "the option k is 2.5, not "),
    ],
)
def test_mistakes_are_one_clear_sentence(name: str, options: dict[str, int], says: str) -> None:
    assert_refused(says, holdfast.create_router, name, **{"dim": 8, "experts": 4, **options})


def test_a_new_part_joins_the_grammar(scratch_name: str) -> None:
    @holdfast.register(scratch_name, stage="score", about="twice the linear score", paper="none")
    class Twice(Linear):
        pass

    built = holdfast.create_router("scratch+top-p", dim=8, experts=4, p=0.3)
    assert type(built.score) is Twice and isinstance(built.select, TopP)
    assert holdfast.list_routers()["scratch"] == "twice the linear score (none)"


def test_a_score_without_its_sizes_is_named(scratch_name: str) -> None:
    @holdfast.register(scratch_name, stage="score", about="", paper="")
    class Unsized(Score):
        def __init__(self) -> None:
            super().__init__()

        def forward(self, tokens: torch.Tensor, context: holdfast.Context) -> torch.Tensor:
            return tokens

    with pytest.raises(ValueError, match=r"^Unsized must set self\.dim and self\.experts in its constructor\.$"):
        holdfast.create_router(scratch_name, dim=8, experts=8)


def test_a_part_without_a_constructor_of_its_own_has_no_options(scratch_name: str) -> None:
    @holdfast.register(scratch_name, stage="score", about="the same score for every expert", paper="")
    class Sum(Score):
        dim, experts = 8, 4

        def forward(self, tokens: torch.Tensor, context: Any) -> torch.Tensor:
            return tokens.sum(-1, keepdim=True).expand(*tokens.shape[:-1], 4)

    assert isinstance(holdfast.create_router(scratch_name, dim=8, experts=4).score, Sum)


def test_a_name_can_replace_several_stages(scratch_name: str) -> None:
    """As `smoe-dropout` does."""
    holdfast.register(
        scratch_name,
        stage="score",
        also={"select": TopK},
        about="frozen scores, k grows",
        paper="a test",
        defaults={"k_final": "all"},
    )(Frozen)
    built, same = (holdfast.create_router(name, dim=8, experts=4) for name in (scratch_name, "smoe-dropout"))
    assert [type(part) for part in built.parts] == [type(part) for part in same.parts]
    assert isinstance(built.select, TopK) and built.select.slots == 4
    assert_refused("both replace the stage 'select'", holdfast.create_router, f"{scratch_name}+top-p", dim=8, experts=4)
    with pytest.raises(ValueError, match="again in `also`"):
        holdfast.register("twice", stage="score", also={"score": Linear}, about="", paper="")(Frozen)


@pytest.mark.parametrize("name", WITHOUT_CONTEXT)
def test_routers_can_be_built_without_memory_and_keep_their_name(name: str) -> None:
    with torch.device("meta"):
        built = holdfast.create_router(name, dim=8, experts=4, layer="layers.3")
    assert "layers.3" in repr(built)
    built = built.to_empty(device="cpu")
    assert built.layer == "layers.3"
    assert bytes(built.get_buffer("_name").tolist()).startswith(b"layers.3")


def test_a_clash_of_names_raises() -> None:
    assert_refused("'smoe'", holdfast.register("smoe", stage="score", about="", paper=""), Linear)


@pytest.mark.parametrize("name", ["", "a+b", " a", "a[b", "a,b", "a@1", "a|b"])
def test_a_name_that_the_grammar_could_not_read_is_refused(name: str) -> None:
    assert_refused("cannot be the name of a router", Preset, name, "", "")


def test_an_unknown_stage_suggests_the_nearest() -> None:
    assert_refused(r"'scores'.*'score'", Preset, "new", "", "", {"scores": Score})


def test_an_option_of_a_name_is_not_also_for_the_default_parts() -> None:
    running = holdfast.create_router("sinkhorn[bias=running]", dim=8, experts=4)
    assert {name for name, _ in running.named_parameters()} == {"score.weight"}
    assert "score.bias" in dict(holdfast.create_router("smoe[bias=true]", dim=8, experts=4).named_parameters())
