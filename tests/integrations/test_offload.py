"""Models that accelerate offloads: routers read weights outside the forward of the module that owns them."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import IDS, logits, places
from tiny import tiny
from tiny_dense import tiny_dense
from wording import assert_refused

import holdfast
from holdfast.hub.replacements import as_linear

accelerate = pytest.importorskip("accelerate", reason="accelerate offloads")

WAYS = ["cpu_offload", "disk_offload", "disk_offload of buffers", "dispatch_model", "device_map auto"]


def offloaded(model: Any, way: str, folder: Path) -> Any:
    """The changed model with its weights elsewhere: a model at hand, or one that is loaded so."""
    if way == "cpu_offload":
        return accelerate.cpu_offload(model)
    if way.startswith("disk_offload"):
        return accelerate.disk_offload(model, folder / "offload", offload_buffers="buffers" in way)
    if way == "dispatch_model":
        return accelerate.dispatch_model(model, places("disk"), main_device="cpu", offload_dir=folder / "offload")
    holdfast.save(model, folder / "saved")
    budget = {"cpu": 40_000}
    return holdfast.load(folder / "saved", device_map="auto", max_memory=budget, offload_folder=folder / "offload")


def stateful(model: Any) -> Any:
    """A model whose routers have learnt something, so that state that is lost or on `meta` shows."""
    with torch.no_grad():
        for _ in range(2):
            model.train()(input_ids=IDS)
    return model.eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("router", ["attention", "ac", "xmoe+ac+symphony+attention+smooth", "top-p", "remoe"])
def test_an_offloaded_model_routes_as_the_model_in_memory(router: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = stateful(holdfast.reroute(tiny("mixtral"), router))
    expected = logits(model)
    away = offloaded(model, way, tmp_path)
    assert any(parameter.is_meta for parameter in away.parameters())
    torch.testing.assert_close(logits(away), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS[:4])
@pytest.mark.parametrize(("family", "router"), [("llama", "ac"), ("llama", "xmoe+ac+attention"), ("gpt2", "attention")])
def test_an_offloaded_sparse_model_routes_as_the_model_in_memory(family: str, router: str, way: str, tmp_path: Path) -> None:
    if family == "gpt2" and way == "dispatch_model":
        pytest.skip("its modules have other names")
    torch.manual_seed(1)
    model = stateful(holdfast.sparsify(tiny_dense(family), experts=8, router=router, noise=0.5))
    expected = logits(model)
    torch.testing.assert_close(logits(offloaded(model, way, tmp_path)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_family_with_biases_routes_as_in_memory_when_they_are_offloaded(family: str, tmp_path: Path) -> None:
    """DeepSeek's correction bias is a buffer of the gate, gpt-oss's bias a parameter: routers read both."""
    model = tiny(family)
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if "e_score_correction_bias" in name or "router.bias" in name:
            torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(3))
    holdfast.reroute(model, "attention+smooth")
    expected = logits(model)
    away = offloaded(model, "disk_offload of buffers", tmp_path)
    torch.testing.assert_close(logits(away), expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_was_offloaded_first_is_rerouted(tmp_path: Path) -> None:
    model = accelerate.cpu_offload(tiny("mixtral"))
    holdfast.reroute(model, "attention")
    torch.testing.assert_close(logits(model), logits(holdfast.reroute(tiny("mixtral"), "attention")))


def test_an_offloaded_model_is_saved_if_transformers_can_find_its_weights(tmp_path: Path) -> None:
    model = stateful(holdfast.reroute(tiny("mixtral"), "symphony+attention"))
    expected = logits(model)
    holdfast.save(model, tmp_path / "whole")
    away = holdfast.load(tmp_path / "whole", device_map=places("disk"), offload_folder=tmp_path / "offload")
    torch.testing.assert_close(logits(holdfast.load(holdfast.save(away, tmp_path / "again"))), expected)
    assert_refused(r"save.*offload", holdfast.save, accelerate.cpu_offload(model), tmp_path / "never")


def test_an_adapter_on_an_offloaded_projection_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the adapter is PEFT's")

    def adapted() -> Any:
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
        return peft.get_peft_model(holdfast.reroute(tiny("mixtral"), "attention"), config)

    torch.testing.assert_close(logits(accelerate.cpu_offload(adapted())), logits(adapted()), atol=1e-5, rtol=1e-5)


def test_nothing_that_was_loaded_for_a_router_outlives_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading is for models larger than memory: what one layer loads must be gone when the next one runs."""
    model = offloaded(holdfast.reroute(tiny("mixtral"), "attention"), "disk_offload", tmp_path)
    read: list[Any] = []
    alive: list[int] = []

    def watched(module: Any) -> Any:
        gc.collect()
        alive.append(sum(weight() is not None for weight in read))
        projection = as_linear(module)
        read.append(weakref.ref(projection.weight))
        return projection

    monkeypatch.setattr("holdfast.hub.context.as_linear", watched)
    logits(model)
    gc.collect()
    assert len(read) == 3
    assert alive == [0, 0, 0] and all(weight() is None for weight in read)
    assert all(layer.self_attn.o_proj.weight.is_meta for layer in model.model.layers)
