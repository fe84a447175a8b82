"""Quantised models: routers read the numbers that act in the forward, or a sentence says that they cannot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from changed_models import IDS, logits, trainer_of
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor, nn
from wording import assert_refused

import holdfast
from holdfast.hub.replacements import as_linear

WIDTH = {"hidden_size": 64}  # bitsandbytes' blocks of 4-bit weights are 64 wide


def bitsandbytes(bits: int) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes quantises")
    return transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})


def torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao quantises")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())


def quanto() -> Any:
    pytest.importorskip("optimum.quanto", reason="quanto quantises")
    return transformers.QuantoConfig(weights="int8")


CONFIGS: dict[str, Callable[[], Any]] = {
    "bitsandbytes 8-bit": lambda: bitsandbytes(8),
    "bitsandbytes 4-bit": lambda: bitsandbytes(4),
    "torchao int8": torchao,
    "quanto int8": quanto,
}
quantisers = pytest.mark.parametrize("quantiser", CONFIGS)


def quantised(quantiser: str, folder: Path) -> Any:
    tiny("mixtral", **WIDTH).save_pretrained(folder / "plain")
    kind = transformers.MixtralForCausalLM
    return kind.from_pretrained(folder / "plain", quantization_config=CONFIGS[quantiser]()).eval()


def probed(linear: nn.Module, width: int) -> Tensor:
    """The weight that a layer's own forward acts with: what it makes of the rows of the identity."""
    with torch.no_grad():
        out: Tensor = linear(torch.eye(width)).t().float()
    return out


def with_the_layers_of(other: Any) -> Any:
    """A float model whose linear layers hold the numbers of a quantised model's, and return what these return.

    Quantised layers also round what they are given, so products with the same numbers differ in the third digit.
    """
    model = tiny("mixtral", **WIDTH)
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and name != "lm_head":
            with torch.no_grad():
                linear.weight.copy_(probed(other.get_submodule(name), linear.in_features))
            linear.register_forward_hook(lambda _, given, __, name=name: other.get_submodule(name)(given[0]))
    return model


@quantisers
def test_the_output_projection_is_read_as_the_numbers_that_act(quantiser: str, tmp_path: Path) -> None:
    model = quantised(quantiser, tmp_path)
    plain = tiny("mixtral", **WIDTH)
    for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
        for linear in (layer.self_attn.o_proj, layer.self_attn.k_proj):
            read = as_linear(linear).weight
            torch.testing.assert_close(read.float(), probed(linear, 64), atol=2e-3, rtol=2e-3)
        error = (as_linear(layer.self_attn.o_proj).weight - other.self_attn.o_proj.weight).abs().max()
        assert 1e-4 < error < 0.12  # quantised, but these weights


@quantisers
@pytest.mark.parametrize("router", ["attention", "smooth"])
def test_a_quantised_model_routes_as_a_float_one_with_the_same_numbers(router: str, quantiser: str, tmp_path: Path) -> None:
    model = quantised(quantiser, tmp_path)
    reference = holdfast.reroute(with_the_layers_of(model), router)
    holdfast.reroute(model, router)
    with holdfast.trace(model) as routes, holdfast.trace(reference) as expected:
        ours, theirs = logits(model), logits(reference)
    same = [(mine.chosen == other.chosen).all(1).float().mean() for mine, other in zip(routes, expected, strict=True)]
    assert min(same) == 1, same
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=5e-3)


def test_quanto_is_read_before_it_is_frozen_too() -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="quanto quantises")
    model = tiny("mixtral")
    quanto.quantize(model, weights=quanto.qint8)
    holdfast.reroute(model, "attention")
    before = logits(model)
    quanto.freeze(model)
    assert torch.equal(logits(model), before)


@quantisers
@pytest.mark.parametrize("kind", ["rerouted", "sparse"])
def test_a_changed_folder_is_loaded_quantised_with_routers_as_they_were(kind: str, quantiser: str, tmp_path: Path) -> None:
    model: Any
    if kind == "rerouted":
        model = holdfast.reroute(tiny("mixtral", **WIDTH), "xmoe+symphony+smooth")
    else:
        model = holdfast.sparsify(tiny_dense("llama", **WIDTH), experts=4, k=2, router="attention", noise=0.5)
    holdfast.save(model, tmp_path / "saved")
    loaded = holdfast.load(tmp_path / "saved", quantization_config=CONFIGS[quantiser]())
    assert not torch.equal(logits(loaded), logits(model))
    routers = {name: module for name, module in model.named_modules() if isinstance(module, holdfast.Router)}
    assert len(routers) == 3
    for name, router in routers.items():
        same = loaded.get_submodule(name).state_dict()
        for key, value in router.state_dict().items():
            assert same[key].dtype == value.dtype and torch.equal(same[key], value), (name, key)
    if quantiser == "quanto int8":
        assert_refused("not serializable", holdfast.save, loaded, tmp_path / "again")  # of any model, says transformers
    else:
        again = holdfast.load(holdfast.save(loaded, tmp_path / "again"))
        assert torch.equal(logits(again), logits(loaded))


def test_adapters_on_a_quantised_projection_are_read(tmp_path: Path) -> None:
    """QLoRA: the base's numbers and what the adapter adds, DoRA's scales too.

    DoRA only on torchao: on weights of bitsandbytes, PEFT itself fails or misreads them on a CPU.
    """
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    for quantiser, dora in (("bitsandbytes 8-bit", False), ("bitsandbytes 4-bit", False), ("torchao int8", True)):
        model = quantised(quantiser, tmp_path / quantiser)
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, target_modules=["o_proj"], use_dora=dora, init_lora_weights=False)
        wrapped = peft.get_peft_model(holdfast.reroute(model, "attention"), config).eval()
        for layer in wrapped.get_base_model().model.layers:
            projection = layer.self_attn.o_proj
            torch.testing.assert_close(as_linear(projection).weight.float(), probed(projection, 64), atol=5e-3, rtol=5e-3)
        assert logits(wrapped).isfinite().all()


def torchao_int8(model: Any, *names: str) -> Any:
    """Quantise the parameters of these names in memory; none is every linear layer."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao quantises")
    config = quantization.Int8WeightOnlyConfig()
    if names:
        chosen = quantization.FqnToConfig({f"re:.*{name}": config for name in names})
        quantization.quantize_(model, chosen, filter_fn=None)
    else:
        quantization.quantize_(model, config)
    return model


def dequantised(model: Any, family: str, *names: str) -> Any:
    """The float model of the same numbers."""
    plain = tiny(family)
    for name, weight in model.named_parameters():
        if name.endswith(names):
            with torch.no_grad():
                plain.get_parameter(name).copy_(weight.dequantize())
    return plain


@pytest.mark.parametrize("router", ["native", "smooth", "ac+symphony"])
def test_a_quantised_gate_scores_as_its_numbers(router: str) -> None:
    model = torchao_int8(tiny("mixtral"), "gate.weight")
    reference = holdfast.reroute(dequantised(model, "mixtral", "gate.weight"), router)
    expected = logits(reference)
    torch.testing.assert_close(logits(holdfast.reroute(model, router)), expected, atol=1e-4, rtol=1e-4)
    later = torchao_int8(holdfast.reroute(tiny("mixtral"), router), "gate.weight")
    torch.testing.assert_close(logits(later), expected, atol=1e-4, rtol=1e-4)


def test_quantised_experts_run_as_their_numbers_with_routers_that_leave_slots_unused() -> None:
    """Transformers' own functions cannot run these experts, with its own router either."""
    names = ("experts.gate_up_proj", "experts.down_proj")
    model = torchao_int8(holdfast.reroute(tiny("mixtral"), "smooth"), *names)
    reference = holdfast.reroute(dequantised(model, "mixtral", *names), "smooth")
    torch.testing.assert_close(logits(model), logits(reference), atol=1e-4, rtol=1e-4)
    sparse = torchao_int8(holdfast.sparsify(tiny_dense("llama"), experts=4), *names)
    assert logits(sparse).isfinite().all()


def test_experts_in_a_format_that_is_not_known_are_refused() -> None:
    model = holdfast.reroute(tiny("mixtral"), "smooth")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert_refused(r"MixtralExperts.*float8_e4m3fn.*quantised", logits, model)


def test_a_projection_in_a_format_that_is_not_known_is_refused() -> None:
    model = holdfast.reroute(tiny("mixtral"), "attention")
    projection = model.model.layers[1].self_attn.o_proj
    numbers = projection.weight.detach().clone()
    projection.forward = lambda hidden: nn.functional.linear(hidden, numbers)
    projection.weight = nn.Parameter(numbers.to(torch.float8_e4m3fn), requires_grad=False)
    assert_refused(r"quantised.*attention.*'similarity'", logits, model)


@quantisers
@pytest.mark.parametrize("init", ["copy", "random"])
def test_sparsify_refuses_a_quantised_model(init: Any, quantiser: str, tmp_path: Path) -> None:
    tiny_dense("llama", **WIDTH).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=CONFIGS[quantiser]())
    assert_refused(r"quantised.*sparsify", holdfast.sparsify, model, experts=4, init=init)


def test_a_model_that_was_quantised_in_memory_is_not_saved(tmp_path: Path) -> None:
    model = torchao_int8(holdfast.reroute(tiny("mixtral"), "symphony"))
    assert_refused(r"q_proj\.weight.*torchao.*quantization_config", holdfast.save, model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert_refused("quantised in memory", model.save_pretrained, tmp_path / "saved")


def write_gguf(model: Any, file: Path) -> None:
    """A llama as llama.cpp writes it: rows of queries and keys in the order of its rotations."""
    gguf = pytest.importorskip("gguf", reason="gguf writes the file")
    import numpy

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(module)}.{kind}", numpy.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_from_gguf_is_sparsified_saved_and_loaded(tmp_path: Path) -> None:
    """Transformers counts it as quantised, though its weights are numbers, and would neither save nor train it."""
    dense = tiny_dense("llama")
    write_gguf(dense, tmp_path / "model.gguf")
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    assert model.is_quantized
    expected = logits(dense)
    holdfast.sparsify(model, experts=4, router="symphony+smooth")
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved"))
    assert torch.equal(logits(loaded), logits(model))
    trainer_of(model, tmp_path / "run", IDS, max_steps=1).train()
