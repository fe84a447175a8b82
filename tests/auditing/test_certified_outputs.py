"""Bounds of the outputs of a model's layers hold for the layers themselves, as transformers and Holdfast run them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from tiny import EXTRA, tiny
from tiny_dense import tiny_dense
from torch import Tensor, nn

import holdfast
from holdfast.auditing import certify_model
from holdfast.certificates import OutputCertificate
from holdfast.hub.layers import moe_layers

RADII = (0.003, 0.03, 0.3)
NATIVE = "native"


def inputs() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))}


def outputs(model: Any, layer: int, step: Tensor | None = None) -> Tensor:
    """Return the outputs (T,d) of one MoE layer whose input is perturbed by `step (T,d)`."""
    found: list[Tensor] = []

    def perturb(module: nn.Module, given: tuple[Tensor, ...]) -> Any:
        return given if step is None else (given[0] + step.view(given[0].shape), *given[1:])

    def record(module: nn.Module, given: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        found.append(output.reshape(-1, output.shape[-1]))

    block = moe_layers(model)[layer].block
    hooks = [block.register_forward_pre_hook(perturb), block.register_forward_hook(record)]
    with torch.no_grad():
        model(**inputs())
    for hook in hooks:
        hook.remove()
    return found[0]


def require_sound(model: Any, bounds: OutputCertificate, layer: int, tries: int = 8) -> None:
    """Perturb the layer's input at random and in one direction for all tokens, and compare with the bounds."""
    before, width = outputs(model, layer), outputs(model, layer).shape[1]
    for place in range(len(RADII)):
        for seed in range(tries):
            shape = (1, width) if seed % 2 else (len(before), width)
            step = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).expand(len(before), -1)
            step = 0.999 * bounds.radii[:, place : place + 1].float() * nn.functional.normalize(step, dim=1)
            change = (outputs(model, layer, step) - before).double().norm(dim=1)
            assert (change <= bounds.bound[:, place] * (1 + 1e-4) + 1e-6).all()
            assert (change > 1e-4 * bounds.bound[:, place]).float().mean() > 0.9  # the layer was perturbed


CASES = [("mixtral", "smooth"), ("olmoe", "smooth"), ("mixtral", "smoe"), ("olmoe", "smoe")]
CASES += [(family, NATIVE) for family in EXTRA if family not in ("gpt_oss", "phimoe")]
CASES += [("olmoe", "symphony+smooth"), ("qwen2_moe", "xmoe"), ("deepseek_v3", "smoe")]


@pytest.mark.parametrize(("family", "router"), CASES)
def test_no_layer_changes_its_output_by_more_than_the_bound(family: str, router: str) -> None:
    model = tiny(family)
    model = model if router == NATIVE else holdfast.reroute(model, router=router).eval()
    found = certify_model(model, [inputs()], outputs=RADII)
    for layer, each in enumerate(found.layers):
        assert each.no_outputs is None
        bounds = each.outputs
        assert bounds is not None and bounds.bound.shape == (24, 3) and bounds.reach.shape == (24, 3, each.experts)
        torch.testing.assert_close(bounds.lengths, outputs(model, layer).double().norm(dim=1), rtol=1e-3, atol=1e-6)
        require_sound(model, bounds, layer)


def test_a_sparsified_model_with_a_shared_expert_is_bounded_too() -> None:
    model = holdfast.sparsify(tiny_dense("gpt2"), experts=4, k=2, router="smooth", shared=1).eval()
    for layer, each in enumerate(certify_model(model, [inputs()], outputs=RADII).layers):
        assert each.no_outputs is None and each.outputs is not None
        require_sound(model, each.outputs, layer, tries=4)


@pytest.mark.parametrize(("family", "reason"), [("gpt_oss", "the experts of a GptOssExperts"), ("phimoe", "SparseMixer")])
def test_what_has_no_known_bound_is_said_in_one_sentence_and_routes_are_still_certified(family: str, reason: str) -> None:
    layer = certify_model(tiny(family), [inputs()], outputs=RADII).layers[0]
    assert layer.outputs is None and layer.certificates is not None
    assert layer.no_outputs is not None and reason in layer.no_outputs
    assert layer.summary()["outputs"] == {"skipped": layer.no_outputs}


def test_a_layer_that_computes_something_else_besides_its_experts_is_not_bounded() -> None:
    model = tiny("mixtral")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, output: output + given[0])
    assert "its output is not that of its router" in str(
        certify_model(model, [inputs()], outputs=RADII).layers[0].no_outputs
    )
    model = tiny("mixtral")
    model.model.layers[0].mlp.extra = nn.Linear(4, 4)
    assert "with extra" in str(certify_model(model, [inputs()], outputs=RADII).layers[0].no_outputs)


def test_batches_are_joined_and_padding_is_left_out() -> None:
    model, mask = tiny("olmoe"), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    whole = certify_model(model, [inputs(), {**inputs(), "attention_mask": mask}], outputs=(0.01,)).layers[0]
    alone = certify_model(model, [inputs()], outputs=(0.01,)).layers[0]
    assert whole.outputs is not None and alone.outputs is not None and whole.outputs.bound.shape == (44, 1)
    torch.testing.assert_close(whole.outputs.bound[:24], alone.outputs.bound)
    torch.testing.assert_close(whole.outputs.bound[24:44], alone.outputs.bound[:20], rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="expected finite radii"):
        certify_model(model, [inputs()], outputs=(-1.0,))


def test_the_command_prints_a_section_and_stores_it(folder: Path, text: Path, tmp_path: Path, command: Command) -> None:
    given = ["certify", folder, "--source", text, "--tokens", "32", "--length", "16"]
    shown = command.printed(*given, "--outputs", "0.001", "0.01", "--out", tmp_path / "some.json")
    assert "layer outputs" in shown and "0.001" in shown
    stored = json.loads((tmp_path / "some.json").read_text())
    assert [row["radius"] for row in stored["layers"][0]["outputs"]["radii"]] == [0.001, 0.01]
    assert "layer outputs" not in command.printed(*given)
