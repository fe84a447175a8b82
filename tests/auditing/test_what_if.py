"""What another router would change is measured, and the model is restored."""

from typing import Any

import pytest
import torch
from auditing.audited_models import batches, hooks, sparse, state
from tiny import tiny
from wording import assert_refused

import holdfast
from holdfast.auditing import audit, what_if


def mixtral() -> Any:
    return tiny("mixtral")


@pytest.mark.parametrize("make", [mixtral, sparse])
def test_smooth_reduces_the_flip_part_and_the_model_is_restored(make: Any) -> None:
    """With a strip that is wide against the noise. The narrow one of an untrained model gains little: docs/audit.md."""
    model = make()
    kept, hooked, size = state(model), hooks(model), model.config.vocab_size
    with torch.no_grad():
        before = model(**next(batches(1))).logits
    inputs = list(batches(6, vocabulary=size))
    summary: Any = what_if(model, inputs, "smooth", options={"eps": 1.0}, perturb=["none", "noise"])
    for level in ("noise.0.01", "noise.0.05"):
        flips = summary.flip_output[level]
        assert flips.after < 0.3 * flips.before
        # What jumped now slides: the whole change need not be smaller, but must not be much larger.
        assert summary.output[level].after < 1.2 * summary.output[level].before
    assert summary.cost["experts_per_token"].before == 2 < summary.cost["experts_per_token"].after
    assert summary.cost["loss"].before != summary.cost["loss"].after
    with torch.no_grad():
        assert torch.equal(model(**next(batches(1))).logits, before)
    assert hooks(model) == hooked and state(model).keys() == kept.keys()
    assert type(model).__name__ == type(make()).__name__


def test_the_native_rule_changes_nothing() -> None:
    before = audit(tiny("olmoe"), batches(), perturb=["none", "noise", "batch"])
    found: Any = what_if(tiny("olmoe"), batches(), "native", before=before, perturb=["none", "noise", "batch"])
    assert found.overall == before.overall


def test_the_model_is_restored_when_the_second_audit_fails() -> None:
    model = tiny("mixtral")

    def refuse(done: int, what: str) -> None:
        if getattr(model.model.layers[0].mlp.gate, "holdfast", None) is not None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        what_if(model, batches(), "smooth", perturb=["none"], progress=refuse)
    assert_refused("rerouted", holdfast.restore, model)


def test_a_model_that_was_rerouted_before_is_refused() -> None:
    for model in (holdfast.reroute(tiny("mixtral"), "symphony"), holdfast.reroute(sparse(), "smooth")):
        assert_refused("restore", what_if, model, batches(), "smooth")


def test_another_router_may_be_for_some_layers_only() -> None:
    model = tiny("mixtral")
    found: Any = what_if(model, batches(), "switch[k=1]@2", perturb=["none"])
    assert found.cost["experts_per_token"].before == 2
    assert found.cost["experts_per_token"].after == pytest.approx(5 / 3)  # of three layers, one has a k of 1
    assert_refused("rerouted", holdfast.restore, model)


def test_a_mistake_in_the_name_of_the_router_is_found_before_the_first_audit() -> None:
    model, audited = tiny("mixtral"), []
    for name, says in (("smooth@9", "there is no layer 9"), ("smoth", "did you mean 'smooth'")):
        with pytest.raises(ValueError, match=says):
            what_if(model, batches(), name, perturb=["none"], progress=lambda done, what: audited.append(what))
        assert_refused("rerouted", holdfast.restore, model)
    assert audited == []
