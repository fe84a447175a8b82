"""The plugin that runs the model tests of transformers on rerouted models."""

import pytest

pytest_plugins = ["pytester"]

# What the tests of transformers do with a model, in short.
MODEL_TEST = """
import transformers

def router_of(model):
    return getattr(model.model.layers[0].mlp.gate, "holdfast", None)

def build(kind):
    config = transformers.MixtralConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    return kind(config)

def test_a_causal_model_that_is_built_is_changed():
    assert (router_of(build(transformers.MixtralForCausalLM)) is not None) == CHANGED

def test_other_heads_are_as_they_were():
    assert router_of(build(transformers.MixtralForSequenceClassification)) is None

def test_a_folder_opens_as_it_was_saved(tmp_path):
    build(transformers.MixtralForCausalLM).save_pretrained(tmp_path)
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert (router_of(model) is not None) == CHANGED
"""


@pytest.mark.slow
@pytest.mark.parametrize("router", [None, "smooth"])
def test_every_causal_model_that_a_test_builds_is_rerouted(pytester: pytest.Pytester, router: str | None) -> None:
    pytester.makepyfile(MODEL_TEST.replace("CHANGED", str(router is not None)))
    options = [] if router is None else ["--holdfast-router", router]
    result = pytester.runpytest_subprocess("-p", "holdfast.testing.transformers_plugin", *options)
    result.assert_outcomes(passed=3)
    if router is not None:
        result.stdout.fnmatch_lines(["*rerouted to 'smooth'", "*holdfast: 2 models were rerouted"])


@pytest.mark.slow
def test_an_unknown_router_is_an_error_of_every_test_rather_than_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MODEL_TEST.replace("CHANGED", "False"))
    result = pytester.runpytest_subprocess("-p", "holdfast.testing.transformers_plugin", "--holdfast-router", "smoth")
    result.stdout.fnmatch_lines(["*unknown router 'smoth'*"])
    result.assert_outcomes(passed=1, failed=2)
