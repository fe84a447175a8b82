"""Replay on a GPU: own routes change nothing, and foreign routes are what the same model computes on the CPU."""

from typing import Any

import pytest
import torch
import transformers
from foreign_routes import random_routes
from router_names import IN_TEXT_MODELS
from tiny import MOE_LAYERS, tiny
from torch import Tensor

import holdfast

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LENGTH, SEQUENCES, VOCABULARY = 256, 8, 512
NATIVE = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss")


def olmoe(router: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = transformers.OlmoeForCausalLM(config).to("cuda", dtype)
    return holdfast.reroute(model, router)


def run(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and all gradients of the mean log-probability of the ids."""
    model.zero_grad(set_to_none=True)
    output = model(input_ids=ids, labels=ids, **inputs)
    output.loss.backward()
    gradients = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach().float(), gradients


def difference(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("router", ["native", "smoe", "symphony", "ac", "smooth", "similarity", "attention"])
def test_own_routes_change_nothing_beyond_what_a_second_live_forward_changes(router: str, dtype: torch.dtype) -> None:
    model = olmoe(router, dtype).eval()  # the state of routers is not learnt
    ids = torch.randint(1, VOCABULARY, (SEQUENCES, LENGTH), device="cuda")
    with torch.no_grad(), holdfast.trace(model) as trace:
        model(input_ids=ids)
    routes = holdfast.Routes.from_trace(trace, model)
    live, live_gradients = run(model, ids)
    second, second_gradients = run(model, ids)
    replayed, replayed_gradients = run(model, ids, routed_experts=routes)
    noise = difference(second, live), max(difference(second_gradients[n], g) for n, g in live_gradients.items())
    found = difference(replayed, live), max(difference(replayed_gradients[n], g) for n, g in live_gradients.items())
    assert found[0] == noise[0] == 0
    assert found[1] <= 2 * noise[1] + 1e-6


def assert_own_routes_give_the_same_bits(model: Any) -> None:
    ids = torch.randint(3, 32, (4, 16), device="cuda")
    with torch.no_grad(), holdfast.trace(model) as trace:
        live = model(input_ids=ids).logits
    with torch.no_grad():
        replayed = model(input_ids=ids, routed_experts=holdfast.Routes.from_trace(trace, model)).logits
    assert torch.equal(replayed, live)


@pytest.mark.parametrize("model_type", NATIVE)
def test_native_models_that_replay_their_own_routes_compute_the_same_bits(model_type: str) -> None:
    model = holdfast.reroute(tiny(model_type), "native").cuda().eval()
    assert_own_routes_give_the_same_bits(model)


@pytest.mark.parametrize("router", IN_TEXT_MODELS)
def test_every_router_that_replays_its_own_routes_computes_the_same_bits(router: str) -> None:
    model = holdfast.reroute(tiny("mixtral"), router).cuda().eval()
    assert_own_routes_give_the_same_bits(model)


@pytest.mark.parametrize("router", ["native", "smoe", "smooth"])
@pytest.mark.parametrize("model_type", ["mixtral", "olmoe"])
def test_foreign_routes_give_the_numbers_of_the_cpu(model_type: str, router: str) -> None:
    routes = random_routes(MOE_LAYERS.get(model_type, 3))
    ids = torch.randint(3, 32, routes.shape[:2])
    model = holdfast.reroute(tiny(model_type), router).eval()
    expected, expected_gradients = run(model, ids, routed_experts=routes)
    found, found_gradients = run(model.cuda(), ids.cuda(), routed_experts=routes.cuda())
    assert difference(found.cpu(), expected) < 1e-5
    for name, gradient in expected_gradients.items():
        assert difference(found_gradients[name].cpu(), gradient) < 1e-4, name
