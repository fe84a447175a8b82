"""Models that cannot be tried are refused by name, before anything is computed with them."""

import pytest
import torch
from tiny import tiny
from wording import assert_refused

from holdfast.auditing import audit, certify_model
from holdfast.hub.tracing import require_finite, require_known_tokens, require_positions

IDS = torch.arange(3, 15).view(1, 12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_weight_that_is_not_finite_is_named(bad: float) -> None:
    model = tiny("deepseek_v3")
    require_finite(model)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"  # a buffer, and of the checkpoint all the same
    with torch.no_grad():
        model.state_dict()[name][2] = bad
    for run in (audit, certify_model):
        assert_refused(f"^{name}: .*NaN", run, model, [{"input_ids": IDS}])


def test_large_weights_are_finite_though_their_sum_is_not() -> None:
    model = tiny("mixtral")
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    require_finite(model)


def test_products_that_overflow_raise_a_one_line_error_too() -> None:
    model = tiny("mixtral")
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight.fill_(3e38)
    assert_refused(r"layers\.0\.mlp\.gate: .*NaN", audit, model, [{"input_ids": IDS}], perturb=["none"])


def test_tokens_and_positions_end_where_the_model_does() -> None:
    model = tiny("mixtral")
    require_known_tokens(model, torch.tensor([0, 63]))
    require_positions(model, 128)
    assert_refused(r"64.*64", require_known_tokens, model, torch.tensor([64]))
    assert_refused(r"129.*128", require_positions, model, 129)
