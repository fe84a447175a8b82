"""Models larger than memory, whose weights accelerate offloads to disk and loads layer by layer."""

from pathlib import Path
from typing import Any

import pytest
from auditing.audited_models import batches, hooks, sparse, state
from commands import Command
from tiers import quick_or_slow
from tiny import tiny

import holdfast
from holdfast.auditing import audit, certify_model, what_if
from holdfast.hub import load


def on_disk(model: Any, folder: Path) -> Any:
    """Save the model and load it with memory for a third of its weights."""
    holdfast.save(model, folder / "model")
    room = sum(parameter.numel() * 4 for parameter in model.parameters()) // 3
    loaded = load(folder / "model", device_map="auto", max_memory={"cpu": room}, offload_folder=str(folder / "rest"))
    assert "disk" in loaded.hf_device_map.values() and any(parameter.is_meta for parameter in loaded.parameters())
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("model_type", quick_or_slow(["mixtral", "deepseek_v3", "gpt_oss"], ["deepseek_v3"]))
def test_an_audit_of_a_model_on_disk_is_that_of_the_model_in_memory(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    away = on_disk(model, tmp_path)
    there = {name: parameter.device.type for name, parameter in away.named_parameters()}
    found, expected = audit(away, batches()), audit(model, batches())
    assert found.skipped["model.bf16"].reason == (
        "some weights are offloaded to disk, so the model cannot be run in another dtype."
    )
    skipped = set(found.skipped)
    assert skipped == {"model.bf16", "words", "typos"}
    same = {name: value for name, value in expected.numbers().items() if ".model.bf16" not in name}
    assert {name: found.numbers()[name] for name in same} == pytest.approx(same, rel=1e-5, abs=1e-7)
    assert {name: parameter.device.type for name, parameter in away.named_parameters()} == there
    again = audit(away, batches())
    assert again.numbers() == found.numbers()


def test_the_commands_take_a_device_map_and_an_offload_folder(
    folder: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    """The numbers are the same as without; this model fits, so nothing is offloaded."""
    given = ["certify", folder, "--source", text, "--tokens", "64"]
    mapped = command.printed(*given, "--device-map", "auto", "--offload", tmp_path / "rest", "--dtype", "float32")
    assert mapped == command.printed(*given) != command.printed(*given, "--dtype", "bfloat16")


@pytest.mark.slow
def test_a_sparsified_model_on_disk_is_certified_and_audited_with_another_router(tmp_path: Path) -> None:
    model = sparse("symphony")
    away = on_disk(model, tmp_path)
    for one, two in zip(certify_model(away, batches()).layers, certify_model(model, batches()).layers, strict=True):
        assert one.summary() == two.summary()
    before, watching = state(model), hooks(away)
    found = what_if(away, list(batches(1)), "smooth", perturb=["none", "noise"])
    cost: Any = found.cost["experts_per_token"]
    assert cost.after > cost.before
    assert hooks(away) == watching
    assert audit(away, batches(), perturb=["none"]).numbers() == audit(model, batches(), perturb=["none"]).numbers()
    assert all((before[name] == tensor).all() for name, tensor in model.state_dict().items())
