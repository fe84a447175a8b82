"""Router names with layers: how they are split, which layer gets which router, and the sentences for mistakes."""

import pytest
from wording import assert_refused

from holdfast.routing.grammar import split_routers
from holdfast.routing.presets import (
    LayerRouter,
    preset_names,
    resolve_layers,
    routers_by_layer,
    written_name,
)
from holdfast.routing.registry import Preset


@pytest.mark.parametrize(
    ("written", "split"),
    [
        ("smoe,ac@1,3,5,xmoe", ["smoe", "ac@1,3,5", "xmoe"]),
        ("ac@1, 3 ,5", ["ac@1, 3 ,5"]),
        ("ac@1,3|smooth[budget=0.5,k=1]@2,4,smoe[k=3]", ["ac@1,3|smooth[budget=0.5,k=1]@2,4", "smoe[k=3]"]),
        ("similarity@even|attention@odd,smoe", ["similarity@even|attention@odd", "smoe"]),
        ("ac@0,smoe-dropout", ["ac@0", "smoe-dropout"]),
    ],
)
def test_a_comma_before_a_number_continues_a_list_of_layers(written: str, split: list[str]) -> None:
    assert split_routers(written) == split


@pytest.mark.parametrize(
    ("written", "count", "names"),
    [
        ("ac@1,3,5", 6, [None, "ac", None, "ac", None, "ac"]),
        ("ac @ 5, 1", 6, [None, "ac", None, None, None, "ac"]),
        ("similarity@even|attention@odd", 5, ["similarity", "attention", "similarity", "attention", "similarity"]),
        ("xmoe+symphony@last:2|smoe", 3, ["smoe", "xmoe+symphony", "xmoe+symphony"]),
        ("smoe | ac@first:1", 3, ["ac", "smoe", "smoe"]),
        ("ac@all", 2, ["ac", "ac"]),
        ("ac@all|smoe", 2, ["ac", "ac"]),
        ("ac@first:1|smooth@last:1", 3, ["ac", None, "smooth"]),
        ("native@0|ac", 2, ["native", "ac"]),
        ("ac", 2, ["ac", "ac"]),
    ],
)
def test_every_layer_gets_the_router_that_names_it(written: str, count: int, names: list[str | None]) -> None:
    found = routers_by_layer(resolve_layers(written, native=True), count)
    assert [None if one is None else one.router for one in found] == names


def test_options_and_k_belong_to_their_router() -> None:
    first, second = resolve_layers("similarity[tau=2,k=1]@even|smooth[budget=0.5]", k=3)
    assert first == LayerRouter("similarity", {"tau": 2.0}, 1, "even")
    assert second == LayerRouter("smooth", {"budget": 0.5}, 3, None)


def test_options_by_keyword_go_to_the_routers_that_have_them() -> None:
    ac, smooth = resolve_layers("ac@1|smooth@2", {"budget": 0.25})
    assert (dict(ac.options), dict(smooth.options)) == ({}, {"budget": 0.25})
    plain, cosine = resolve_layers("similarity@1|xmoe+similarity@2", {"tau": 2.0})
    assert plain.options == cosine.options == {"tau": 2.0}


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("ac@1|smooth@1", "layer 1 is named twice, by 'ac@1' and by 'smooth@1'"),
        ("ac@2,2", "layer 2 is named twice"),
        ("ac@even|smooth@0", "layer 0 is named twice, by 'ac@even' and by 'smooth@0'"),
        ("ac@1,4", "'ac@1,4': there is no layer 4; layers are counted from 0 to 3"),
        ("ac@last:5", "'ac@last:5' needs 5 layers; there are 4"),
        ("ac@first:0", "'ac@first:0' needs 0 layers"),
        ("ac@", "@ in 'ac@' is no choice of layers: write indices such as @1,3,5"),
        ("ac@-1", "@-1 in 'ac@-1' is no choice of layers"),
        ("ac@evn", "@evn in 'ac@evn' is no choice of layers"),
        ("ac@last", "is no choice of layers"),
        ("ac@last:x", "is no choice of layers"),
        ("ac@even:2", "is no choice of layers"),
        ("ac@1@2", "@1@2 in 'ac@1@2' is no choice of layers"),
        ("xmoe@1+symphony", "is no choice of layers: .* after the whole router and its options"),
        ("ac@1[mix=2]", "is no choice of layers: .* after the whole router and its options"),
        ("ac@1|smooth|smoe", "has two routers without @"),
        ("ac@1|", "unknown router ''"),
        ("ac@1|smoth", "unknown router 'smoth': did you mean 'smooth'"),
        ("ac[tau=2]@1|smoe", "router 'ac': unknown option 'tau'"),
        ("native@1|smoe", "unknown router 'native'"),
    ],
)
def test_a_mistake_is_one_sentence(written: str, sentence: str) -> None:
    assert_refused(sentence, lambda: routers_by_layer(resolve_layers(written), 4))


def test_odd_layers_of_a_model_with_one_layer_are_an_error() -> None:
    assert_refused("'ac@odd' names no layer: there is only layer 0", routers_by_layer, resolve_layers("ac@odd"), 1)


def test_an_option_that_no_router_of_the_name_has_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"router 'ac@1.smooth@2': unknown option 'budgt': did you mean 'budget'\?"):
        resolve_layers("ac@1|smooth@2", {"budgt": 0.5})
    assert_refused("the option budget is given twice", resolve_layers, "ac@1|smooth[budget=1]@2", {"budget": 0.5})


def test_a_k_in_brackets_and_by_keyword_is_an_error_for_a_name_without_layers() -> None:
    assert_refused("the option k is given twice", resolve_layers, "smoe[k=3]", k=2)


@pytest.mark.parametrize(
    "written",
    [
        "ac@1,3",
        "similarity[tau=2.5,causal=false]@even|smooth[budget=1e-05,k=3]@odd",
        "ac[mix=2]@last:2|similarity[rank=null]",
        "smoe[weights=switch]@0|smoe[weights='switch']",
    ],
)
def test_the_written_name_is_read_as_the_same_routers(written: str) -> None:
    routers = resolve_layers(written)
    assert resolve_layers(written_name(routers)) == routers


def test_two_spellings_have_one_written_name() -> None:
    names = ["similarity[tau=2,causal=no]@ 3, 1 | smoe", "similarity [causal=False, tau=2.0]@1,3|smoe[]"]
    first, second = (written_name(resolve_layers(name)) for name in names)
    assert first == second == "similarity[causal=false,tau=2.0]@1,3|smoe"


def test_the_names_that_a_router_uses_are_found_in_all_its_layers() -> None:
    assert preset_names("xmoe+symphony[beta=0.5]@last:2|smoe") == ["xmoe", "symphony", "smoe"]
    assert preset_names("native@1|ac") == ["ac"]
    assert preset_names("xmoe+ac[mix=2]") == ["xmoe", "ac"]


def test_a_misspelt_family_is_an_error() -> None:
    assert_refused("unknown family of routers 'robst': did you mean 'robust'", Preset, "mine", "", "", family="robst")
