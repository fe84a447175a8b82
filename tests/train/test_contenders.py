"""Routers as they are written on a command line."""

import pytest

from holdfast.train import Contender, contenders


def test_names_are_joined_by_commas_and_options_stand_in_brackets() -> None:
    written = "smoe, similarity[causal=false,tau=2],symphony+smooth[beta=0.5, budget=1e-1 ] ,ac"
    assert contenders(written) == [
        Contender("smoe", "smoe"),
        Contender("similarity[causal=false,tau=2]", "similarity", {"causal": False, "tau": 2}),
        Contender("symphony+smooth[beta=0.5, budget=1e-1 ]", "symphony+smooth", {"beta": 0.5, "budget": 0.1}),
        Contender("ac", "ac"),
    ]


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("similarity[causal=false]", {"causal": False}),
        ("similarity[causal=False]", {"causal": False}),
        ("similarity[causal=no]", {"causal": False}),
        ("similarity[ causal = true ]", {"causal": True}),
        ("similarity[tau=3]", {"tau": 3.0}),
        ("similarity[tau=.5]", {"tau": 0.5}),
        ("similarity[tau=1e-3]", {"tau": 0.001}),
        ("similarity[tau=2E3]", {"tau": 2000.0}),
        ("similarity[rank=4]", {"rank": 4}),
        ("similarity[rank=null]", {"rank": None}),
        ("smoe[weights=switch]", {"weights": "switch"}),
        ("smoe[k_final=all]", {"k_final": "all"}),
        ("smoe[k_final=4]", {"k_final": 4}),
        ("smoe[]", {}),
    ],
)
def test_values_are_read_as_what_the_router_asks_for(written: str, options: dict[str, object]) -> None:
    (found,) = contenders(written)
    assert found.options == options and [type(value) for value in found.options.values()] == [
        type(value) for value in options.values()
    ]
    assert (found.name, found.router) == (written, written.partition("[")[0])


def test_two_spellings_of_one_router_are_built_alike_and_told_apart_by_name() -> None:
    first, second = contenders("similarity[tau=2,causal=false],similarity [causal=False, tau=2]")
    assert (first.router, first.options) == (second.router, second.options)
    assert first.name != second.name


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("smoth", "'smoth'.*'smooth'"),
        ("similarity[tua=2]", "'tua'.*'tau'.*'similarity'"),
        ("smoe[beta=0.5]", "'beta'.*'smoe'"),
        ("similarity[tau=2", "is no router"),
        ("similarity]tau=2[", "is no router"),
        ("similarity[tau=2]]", "is no router"),
        ("similarity[[tau=2]]", "is no router"),
        ("similarity[tau=2]x", "is no router"),
        ("[tau=2]", "is no router"),
        ("smoe,similarity[tau=2,causal=false", "is no router"),
        ("smoe,tau=2]", "is no router"),
        ("similarity[tau]", "'tau' in 'similarity\\[tau\\]'.*option=value"),
        ("similarity[=2]", "option=value"),
        ("similarity[tau=2,tau=3]", "tau twice"),
        ("similarity[tau={]", "'tau={'.*value"),
        ('similarity[tau="2]', "value"),
        ("similarity[tau=a: b: c]", "value"),
        ("similarity[tau=*x]", "value"),
        ("similarity[tau=]", "tau.* None.*number"),
        ("similarity[tau=two]", "tau.*'two'.*number"),
        ("similarity[tau=true]", "tau.*True.*number"),
        ("similarity[causal=2]", "causal.* 2.*true or false"),
        ("similarity[rank=1.5]", "rank.* 1.5.*number"),
        ("smoe[weights=swich]", "weights.*'swich'.*'softmax' or 'switch'"),
        ("ac[skip=x]", "skip.*'x'.*number"),
    ],
)
def test_a_mistake_is_one_sentence(written: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        contenders(written)
    assert "\n" not in str(caught.value)


def test_a_router_of_ones_own_may_take_what_it_likes() -> None:
    from holdfast.routing import Informer, register
    from holdfast.routing.presets import REGISTRY

    class Own(Informer):
        def __init__(self, *, shift: float = 0.0, names: list[str] | None = None, anything=None) -> None:  # type: ignore[no-untyped-def]
            super().__init__()

    register("own", slot="token", about="mine", paper="none")(Own)
    try:
        (found,) = contenders("own[shift=-1.5,anything=x]")
        with pytest.raises(ValueError, match=r"names.*'y'"):
            contenders("own[names=y]")
    finally:
        REGISTRY.remove("own")
    assert found.options == {"shift": -1.5, "anything": "x"}


def test_nothing_is_no_contender() -> None:
    assert contenders("") == contenders(" , ") == []
