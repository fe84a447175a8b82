"""Memory: exact where it is counted, close where it is estimated."""

from typing import Any

import pytest
import torch
import transformers
from tiers import quick_or_slow
from tiny import tiny
from tiny_dense import tiny_dense

import holdfast
from holdfast.planning.model_shape import Setting, measure_shape
from holdfast.planning.planning import activation_bytes, inference_memory, training_memory

TOKENS = 24


def ids(high: int = 64, length: int = 12) -> torch.Tensor:
    return torch.randint(3, high, (2, length), generator=torch.Generator().manual_seed(0))


def test_weights_gradients_and_the_optimizers_moments() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="xmoe+symphony").train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    planned = training_memory(measure_shape(model, Setting(12, 4)), TOKENS, 4)
    assert planned.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert planned.gradients == sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    assert planned.moments == sum(state.nbytes for state in states)
    assert planned.master == 0  # float32 weights are their own


def test_shorter_weights_have_a_master_copy() -> None:
    shape = measure_shape(holdfast.sparsify(tiny_dense("llama"), experts=8, k=2), Setting(12, 2))
    planned = training_memory(shape, TOKENS, 2)
    assert (planned.weights, planned.master) == (2 * shape.parameters, 4 * shape.parameters)
    assert planned.held == 16 * shape.parameters


def test_a_gate_that_is_not_used_has_no_gradient() -> None:
    shape = measure_shape(holdfast.reroute(tiny("olmoe"), "xmoe"), Setting(12, 4))
    assert shape.parameters - shape.trained == 3 * 8 * 32
    assert training_memory(shape, TOKENS, 4).gradients == 4 * shape.trained


@pytest.mark.parametrize("model_type", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_the_kv_cache(model_type: str) -> None:
    model = tiny(model_type)
    with torch.no_grad():
        cache = model(input_ids=ids(), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert inference_memory(measure_shape(model, Setting(12, 4)), TOKENS, 4).cache == held


VARIANTS = [
    "similarity[of=attention]",
    "similarity[rank=4,form=bilinear]",
    "similarity[from=confident]",
    "attention[heads=all,from=confident]",
]


@pytest.mark.parametrize("router", ["smoe", "similarity", "attention", *VARIANTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_caches_while_decoding(router: str, dtype: torch.dtype) -> None:
    model = holdfast.sparsify(tiny_dense("llama").to(dtype), experts=8, router=router)
    with torch.no_grad():
        cache = model(input_ids=ids(), use_cache=True).past_key_values
    held = [rows.bytes for layer in cache.layers if (rows := getattr(layer, "router_rows", None)) is not None]
    number = dtype.itemsize
    assert inference_memory(measure_shape(model, Setting(12, number)), TOKENS, number).router_cache == sum(held)


@pytest.mark.slow
@pytest.mark.parametrize(
    "router", quick_or_slow(["smoe", "symphony", "similarity", "attention", "ac", *VARIANTS], ["smoe", "similarity"])
)
def test_activations_are_close_to_what_autograd_saves(router: str) -> None:
    """On a CPU, where an expert's activation saves more than the GPU kernel; docs/scaling.md has GPU measurements."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    model = holdfast.sparsify(transformers.LlamaForCausalLM(config).bfloat16(), experts=8, router=router).train()
    planned = training_memory(measure_shape(model, Setting(64, 2)), 128, 2).activations
    assert planned == pytest.approx(_kept(model, ids(64, 64)), rel=0.2)


def _kept(model: Any, given: torch.Tensor) -> int:
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.Tensor] = {}  # they are kept here too, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=given, labels=given, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in own)


def test_checkpointing_saves_one_layer_and_the_inputs_of_all() -> None:
    shape = measure_shape(holdfast.sparsify(tiny_dense("llama"), experts=8, k=2), Setting(12, 4))
    assert activation_bytes(shape, 4, True) < activation_bytes(shape, 4, False)


def expert_rows(router: str) -> float:
    """Return the rows per token that the plan counts beyond those of `smoe`: 3 layers, experts of width 48, float32."""

    def kept(router: str) -> float:
        model = holdfast.sparsify(tiny_dense("llama"), experts=8, router=router)
        shape = measure_shape(model, Setting(12, 4))
        routers = sum(cost.kept for sparse in shape.sparse for cost in sparse.costs)
        return activation_bytes(shape, 4, checkpointing=False) - routers

    return (kept(router) - kept("smoe")) / (3 * 3 * 48 * 4)


def test_a_ragged_router_reserves_memory_for_every_expert() -> None:
    assert expert_rows("top-p") == pytest.approx(8 - 2)


@pytest.mark.parametrize(
    ("options", "rows"),
    [("", 1.0), ("[budget=0.3]", 0.6), ("[budget=99]", 6.0), ("[most=3]", 1.0), ("[control=loss,rows=all]", 6.0)],
)
def test_smooth_reserves_memory_for_twice_its_budget_or_for_all_rows(options: str, rows: float) -> None:
    assert expert_rows(f"smooth{options}") == pytest.approx(rows)
