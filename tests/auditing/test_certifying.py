"""Certificates of whole models, on the real inputs of each layer's router and in its own arithmetic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, sparse, texts, tokenizer
from commands import Command
from tiny import EXTRA, tiny

import holdfast
from holdfast.auditing import certify_model
from holdfast.certificates import Smoothing, certify
from holdfast.hub import router_calls


@pytest.mark.parametrize("model_type", sorted(EXTRA))
def test_every_layer_of_every_family_is_certified(model_type: str) -> None:
    found = certify_model(tiny(model_type), batches())
    assert found.status == "complete" and found.tokens == 2 * (17 + 11 + 17)
    for layer in found.layers:
        whole = layer.certificates
        assert whole is not None and whole.radius.shape == (found.tokens,) and (whole.radius > 0).float().mean() > 0.9
        assert set(layer.undecided) == {"bf16", "fp16"}
    stored = found.summary()
    assert json.loads(json.dumps(stored, allow_nan=False)) == stored
    assert all(0 <= share <= 1 for layer in stored["layers"] for share in layer["share_at"].values())


def test_a_layers_certificates_are_those_of_its_router_and_its_tokens() -> None:
    model, inputs = sparse("symphony"), list(batches(1))
    for norm in ("l2", "linf"):
        found = certify_model(model, inputs, norm=norm)  # type: ignore[arg-type]
        with router_calls(model) as heard:
            model(**inputs[0])
        for layer, call in zip(found.layers, heard, strict=True):
            direct = certify(call.route, call.tokens, call.context, norm=norm)  # type: ignore[arg-type]
            assert layer.certificates is not None
            assert torch.equal(layer.certificates.radius, direct.radius[inputs[0]["attention_mask"].bool()])


def test_batches_are_joined_in_order_whatever_their_size() -> None:
    whole, parts = (certify_model(tiny("olmoe"), texts(), tokenizer=tokenizer(), batch=size) for size in (6, 2))
    for one, two in zip(whole.layers, parts.layers, strict=True):
        assert one.certificates is not None and two.certificates is not None
        assert torch.allclose(one.certificates.radius, two.certificates.radius, rtol=1e-4, atol=1e-7)


def test_a_router_without_a_certificate_gets_a_vote_if_smoothing_is_given() -> None:
    model = holdfast.reroute(tiny("mixtral"), "similarity+remoe")
    refused = certify_model(model, batches(1))
    assert all(layer.certificates is None and "no certificate is known" in (layer.reason or "") for layer in refused.layers)
    assert all("no certificate" in layer["skipped"] for layer in refused.summary()["layers"])
    smoothing = Smoothing(sigma=0.02, samples=60, selection=20, alpha=0.01)
    found = certify_model(model, batches(1), smoothing=smoothing)
    assert {layer["kind"] for layer in found.summary()["layers"]} == {"probabilistic"}
    assert all(layer["confidence"] == 0.99 and layer["certified"] > 0 for layer in found.summary()["layers"])


def test_an_interruption_keeps_the_finished_batches() -> None:
    def some() -> Iterator[Any]:
        yield from batches(2)
        raise KeyboardInterrupt

    found = certify_model(tiny("mixtral"), some())
    assert found.status == "interrupted" and found.tokens == 90


def test_the_command_prints_a_table_and_writes_a_file(folder: Path, text: Path, tmp_path: Path, command: Command) -> None:
    given = ["certify", folder, "--source", text, "--tokens", "64", "--length", "16", "--out", tmp_path / "some.json"]
    shown = command.printed(*given, "--norm", "linf")
    assert "exact" in shown and "0.001" in shown
    stored = json.loads((tmp_path / "some.json").read_text())
    assert stored["schema"] == 1 and stored["how"]["norm"] == "linf" and len(stored["layers"]) == 3
    assert stored["data"]["checksum"] and stored["versions"]["holdfast"]
    assert "--force" in command.refused(*given)
