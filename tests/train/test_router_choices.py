"""Router choices, as they are written on a command line."""

import pytest
from wording import assert_refused

from holdfast.train import RouterChoice, load_recipe, parse_routers
from holdfast.train.recipe import require_different


def test_names_are_separated_by_commas_and_options_are_in_brackets() -> None:
    written = "smoe, similarity[causal=false,tau=2],symphony+smooth[beta=0.5, budget=1e-1 ] ,ac"
    assert parse_routers(written) == [
        RouterChoice("smoe", "smoe"),
        RouterChoice("similarity[causal=false,tau=2]", "similarity", {"causal": False, "tau": 2}),
        RouterChoice("symphony+smooth[beta=0.5, budget=1e-1 ]", "symphony+smooth", {"beta": 0.5, "budget": 0.1}),
        RouterChoice("ac", "ac"),
    ]


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("similarity[causal=false]", {"causal": False}),
        ("similarity[ causal = true ]", {"causal": True}),
        ("similarity[tau=3]", {"tau": 3.0}),
        ("similarity[tau=1e-3]", {"tau": 0.001}),
        ("similarity[rank=4]", {"rank": 4}),
        ("similarity[rank=null]", {"rank": None}),
        ("smoe[weights=switch]", {"weights": "switch"}),
        ("smoe[k_final=all]", {"k_final": "all"}),
        ("smoe[]", {}),
    ],
)
def test_values_have_the_types_of_the_routers_options(written: str, options: dict[str, object]) -> None:
    (found,) = parse_routers(written)
    assert found.options == options and [type(value) for value in found.options.values()] == [
        type(value) for value in options.values()
    ]
    assert (found.name, found.router) == (written, written.partition("[")[0])


def test_two_spellings_of_one_router_have_equal_options_and_different_names() -> None:
    first, second = parse_routers("similarity[tau=2,causal=false],similarity [causal=False, tau=2]")
    assert (first.router, first.options) == (second.router, second.options)
    assert first.name != second.name


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("similarity[tua=2]", "router 'similarity': unknown option 'tua': did you mean 'tau'"),
        ("smoe[beta=0.5]", "router 'smoe': unknown option 'beta'"),
        ("similarity[tau=2", "is not a router: write a name"),
        ("similarity]tau=2[", "is not a router"),
        ("[tau=2]", "is not a router"),
        ("smoe,similarity[tau=2,causal=false", "is not a router"),
        ("similarity[tau]", "'tau' in 'similarity\\[tau\\]' is not an option: write option=value"),
        ("similarity[=2]", "is not an option: write option=value"),
        ("similarity[tau=2,tau=3]", "gives the option tau twice"),
        ("similarity[tau={]", "'tau={' in .* has a value that cannot be read"),
        ("similarity[tau=a: b: c]", "has a value that cannot be read"),
        ("similarity[tau=]", "the option tau is None, not a number"),
        ("similarity[tau=two]", "the option tau is 'two', not a number"),
        ("similarity[causal=2]", "the option causal is 2, not true or false"),
        ("smoe[weights=swich]", "the option weights is 'swich', not 'softmax' or 'switch'"),
        ("ac[skip=x]", "the option skip is 'x', not a whole number"),
    ],
)
def test_a_mistake_raises_a_one_line_error(written: str, sentence: str) -> None:
    assert_refused(sentence, parse_routers, written)


def test_a_registered_router_may_have_any_options() -> None:
    from holdfast.routing import Informer, register
    from holdfast.routing.presets import REGISTRY

    class Own(Informer):
        def __init__(self, *, shift: float = 0.0, names: list[str] | None = None, anything=None) -> None:  # type: ignore[no-untyped-def]
            super().__init__()

    register("own", stage="token", about="mine", paper="none")(Own)
    try:
        (found,) = parse_routers("own[shift=-1.5,anything=x]")
        assert_refused(r"names.*'y'", parse_routers, "own[names=y]")
    finally:
        REGISTRY.remove("own")
    assert found.options == {"shift": -1.5, "anything": "x"}


def test_an_empty_list_has_no_routers() -> None:
    assert parse_routers("") == parse_routers(" , ") == []


def test_k_in_brackets_is_the_k_of_the_choice() -> None:
    assert parse_routers("smoe[k=3],similarity[k=1,tau=2]") == [
        RouterChoice("smoe[k=3]", "smoe", {}, 3),
        RouterChoice("similarity[k=1,tau=2]", "similarity", {"tau": 2.0}, 1),
    ]


def test_a_choice_with_layers_has_them_in_its_identity() -> None:
    first, second, third = parse_routers("ac@1,3,ac@ 3, 1,ac@1")
    assert first.describe()["router"] == second.describe()["router"] == "ac@1,3"
    assert third.describe()["router"] == "ac@1"
    (both,) = parse_routers("similarity[tau=2,k=1]@even|attention@odd")
    assert both == RouterChoice(both.name, "similarity[k=1,tau=2.0]@even|attention@odd")


def test_another_k_replaces_that_of_every_layer() -> None:
    (plain, layered) = parse_routers("smoe[k=3],smoe[k=1]@even|ac[k=2,mix=2]")
    assert plain.with_k(4, "other") == RouterChoice("other", "smoe", {}, 4)
    assert layered.with_k(4, "other") == RouterChoice("other", "smoe@even|ac[mix=2]", {}, 4)


def test_plugins_are_found_in_every_layer() -> None:
    from holdfast import plugins as loaded
    from holdfast.routing import Informer, register
    from holdfast.routing.presets import REGISTRY

    register("own", stage="token", about="mine", paper="none")(type("Own", (Informer,), {}))
    loaded._plugins.append(loaded.Plugin("own.py", {"routers": ("own",)}, "0" * 64))
    try:
        (choice,) = parse_routers("own@0|smoe")
        assert [plugin["routers"] for plugin in choice.describe()["plugins"]] == [["own"]]
    finally:
        loaded._plugins.pop()
        REGISTRY.remove("own")


def test_braces_hold_the_training_of_a_router() -> None:
    written = "smoe,ac@1,3{method=pgd,budget=1/255},smooth[budget=0.5]{losses.z=0.1, steps=3,method=none},ac@2|smoe@1,3"
    first, second, third, last = parse_routers(written)
    assert [first.training, last.training] == [{}, {}]
    assert (second.name, second.router) == ("ac@1,3{method=pgd,budget=1/255}", parse_routers("ac@1,3")[0].router)
    assert second.training == {"robust.method": "pgd", "robust.budget": "1/255"}
    assert third.options == {"budget": 0.5}
    assert third.training == {"losses.z": 0.1, "robust.steps": 3, "robust.method": "none"}
    assert "training" not in first.describe() and third.describe()["training"] == third.training


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("smoe{mehtod=pgd}", "unknown training setting 'mehtod': did you mean 'method'"),
        ("smoe{losses.zz=1}", "unknown training setting 'losses.zz': did you mean 'losses.z'"),
        ("smoe{}", "braces that cannot be read"),
        ("smoe{method=pgd", "braces that cannot be read"),
        ("smoe{method=pgd}[k=2]", "braces that cannot be read"),
        ("smoe{method}", "'method' in .* sets no value"),
        ("smoe{method=pgd,method=fast}", "sets method twice"),
    ],
)
def test_braces_that_cannot_be_read_are_refused(written: str, sentence: str) -> None:
    assert_refused(sentence, parse_routers, written)


@pytest.mark.parametrize(
    "written",
    [
        "smoe{method=fast,budget=0.1},smoe{budget=0.10,method=fast}",
        "smoe,smoe{method=none}",
        "smoe,smoe{losses.balance=0.01}",
        "ac,similarity[tau=2,causal=false],similarity[causal=no, tau=2.0]",
        "ac@1,3,ac@3,1{mix=0.5}",
    ],
)
@pytest.mark.every_combination
def test_one_router_in_two_spellings_is_refused(written: str) -> None:
    choices = parse_routers(written)
    said = assert_refused("are the same router", require_different, choices, load_recipe("tiny"))
    assert all(choice.name in said for choice in choices[-2:])


@pytest.mark.parametrize("written", ["smoe,smoe[k=1],ac", "smoe,smoe{method=fast,budget=0.1},smoe{method=fast,budget=0.2}"])
@pytest.mark.every_combination
def test_routers_that_differ_in_a_setting_are_different(written: str) -> None:
    require_different(parse_routers(written), load_recipe("tiny"))


def test_a_swept_key_completes_the_training_of_a_router() -> None:
    with_budget = load_recipe("tiny", {"robust.method": "noise", "robust.budget": 0.1})
    require_different(parse_routers("smoe,smoe{method=fast}"), with_budget)
    assert_refused("are the same router", require_different, parse_routers("smoe,smoe{method=noise}"), with_budget)
