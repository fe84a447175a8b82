"""A router outside the package is checked, audited, certified, planned, saved and loaded."""

from pathlib import Path
from typing import Any

import outside_score
import pytest
import torch
from auditing.audited_models import batches
from test_docs import ROOT, blocks
from tiny import tiny

import holdfast
from holdfast.planning import plan
from holdfast.routing import ScoreDeclarations
from holdfast.routing.presets import REGISTRY
from holdfast.testing import CHECKS, check_router

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Any:
    """Register the router only while these tests run: other tests count the registered routers."""
    holdfast.register("distance", stage="score", about="", paper="")(outside_score.Distance)
    yield
    REGISTRY.remove("distance")


def test_it_is_the_example_of_the_contributing_page() -> None:
    text = Path(__file__).with_name("outside_router.py").read_text()
    example, *_ = blocks(ROOT / "CONTRIBUTING.md", "python")
    assert text[text.index("@holdfast.register") :] in example


def test_it_passes_the_conformance_suite() -> None:
    wanted = [check for check in CHECKS if check not in ("compile", "naive reference")]
    assert check_router("distance", only=wanted).passed == tuple(wanted)


def test_it_is_planned_with_its_cost() -> None:
    one, other = plan("mixtral", ["distance", "smoe"], sizes=SIZES).columns
    assert "not declared" not in one.about
    assert one.forward.parts["score"] == other.forward.parts["score"] == 2 * 2.0 * 64 * 8
    assert one.training.total == other.training.total


def test_a_part_that_declares_no_cost_is_planned_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_score.Distance, "declares", ScoreDeclarations())
    (column,) = plan("mixtral", ["distance"], sizes=SIZES).columns
    assert "distance: memory not declared" in column.about
    assert column.forward.parts["distance"] == 2 * 2.0 * 64 * 8 and column.router_parameters >= 2 * 64 * 8


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model, inputs = holdfast.reroute(tiny("mixtral", num_hidden_layers=2), "distance").eval(), next(iter(batches(1)))
    holdfast.save(model, tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(holdfast.load(tmp_path / "model").eval()(**inputs).logits, model(**inputs).logits)
