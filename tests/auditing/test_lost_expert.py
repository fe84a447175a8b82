"""An audit with lost experts says what forwards without them say."""

from typing import Any

import pytest
import torch
from auditing.audited_models import batches, sparse
from tiny import tiny
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.metrics.tasks import token_nll


def predictions(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss and the most likely token of every real position that has a next one."""
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1]
    real = (batch["attention_mask"][:, :-1] * batch["attention_mask"][:, 1:]).bool()
    return token_nll(logits, batch["input_ids"][:, 1:])[real].double(), logits.argmax(-1)[real]


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "smoe", "symphony+smooth", "top-p"])
def test_an_audit_says_what_a_forward_without_the_most_used_experts_says(name: str) -> None:
    model = tiny(name) if name in ("mixtral", "deepseek_v3") else sparse(name)
    report = holdfast.audit(model, batches(), perturb=["none", "lost-expert"])
    found = report.perturbations["lost-expert"]
    lost = {detail["layer"]: detail["expert"] for detail in found.details}
    first = next(iter(batches()))
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(**first)
    real = first["attention_mask"].bool().flatten()
    assert lost == {layer: int(routing.chosen[real].sum(0).argmax()) for layer, routing in enumerate(routes)}
    before = [predictions(model, batch) for batch in batches()]
    with holdfast.disable(model, lost):
        after = [predictions(model, batch) for batch in batches()]
    change = torch.cat([two[0] - one[0] for one, two in zip(before, after, strict=True)])
    assert found.overall.loss is not None and found.overall.loss.change is not None
    torch.testing.assert_close(found.overall.loss.change, float(change.mean()), rtol=1e-6, atol=1e-9)
    moved = torch.cat([one[1] != two[1] for one, two in zip(before, after, strict=True)])
    assert found.overall.prediction_flips is not None and abs(found.overall.flips) > 0
    assert abs(float(change.mean())) > 0 and bool(moved.any())


def test_it_runs_on_request_only_and_says_why_it_cannot() -> None:
    assert "lost-expert" not in holdfast.audit(sparse(), batches(1), perturb=["none"]).perturbations
    hashed = sparse("hash")
    report = holdfast.audit(hashed, batches(1), perturb=["none", "lost-expert"])
    assert "chosen without scores" in report.skipped["lost-expert"].reason
    assert_refused("perturbation.*'lost-expert'", holdfast.audit, sparse(), batches(1), perturb=["lost-experts"])
