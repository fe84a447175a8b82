"""`trace`: the routes of every family, as its experts received them; padding; generate; nothing left behind."""

from typing import Any

import pytest
import torch
from tiny import EXTRA, HYBRIDS, MOE_LAYERS, tiny
from torch import Tensor

import holdfast
from holdfast.hub.families import MOE_FAMILIES as FAMILIES
from holdfast.hub.padding import padding_of

IDS = torch.tensor([[5, 9, 13, 7, 3, 22], [0, 0, 4, 8, 15, 16]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def test_every_family_has_a_tiny_model() -> None:
    assert set(EXTRA | HYBRIDS) == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_routes_are_what_the_experts_received(model_type: str) -> None:
    model = tiny(model_type)
    received: list[tuple[Tensor, Tensor]] = []
    blocks = [
        module for module in model.modules() if hasattr(module, "experts") and not isinstance(module, torch.nn.ModuleList)
    ]
    for block in blocks:
        block.experts.register_forward_pre_hook(lambda _, args: received.append((args[1], args[2])))
    with holdfast.trace(model) as routes, torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK)
    assert len(routes) == len(received) == MOE_LAYERS.get(model_type, 3)
    assert routes.padding is not None and torch.equal(routes.padding, MASK.bool())
    for routing, (experts, weights) in zip(routes, received, strict=True):
        assert routing.experts.shape == (12, 2) and routing.logits.shape == routing.gates.shape == (12, 8)
        assert routing.logits.dtype == routing.weights.dtype == torch.float32
        dense = torch.zeros(12, 8).scatter(1, experts, weights.float())
        torch.testing.assert_close(routing.dense_weights, dense)
        assert (routing.weights.diff(dim=-1) <= 0).all()
        assert (routing.gates >= 0).all() and not routing.logits.requires_grad


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_traced_model_computes_what_it_computed_before(model_type: str) -> None:
    model = tiny(model_type)
    with torch.no_grad():
        before = model(input_ids=IDS, attention_mask=MASK).logits
        with holdfast.trace(model):
            during = model(input_ids=IDS, attention_mask=MASK).logits
    assert torch.equal(before, during)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_logits_are_those_that_the_family_records_itself(model_type: str) -> None:
    model = tiny(model_type)
    with holdfast.trace(model) as routes, torch.no_grad():
        recorded = model(input_ids=IDS, output_router_logits=True).router_logits
    for routing, logits in zip(routes, recorded, strict=True):
        torch.testing.assert_close(routing.logits, logits.float())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_step_of_generate_is_a_forward(model_type: str) -> None:
    """Left-padded, two sequences: a prompt of six tokens, then one token a step, and padding is known in all of them."""
    model = tiny(model_type)
    seen: list[tuple[int, int, int]] = []

    def each(layer: int, routing: holdfast.Routing, padding: Tensor | None) -> None:
        assert padding is not None
        seen.append((layer, routing.experts.shape[0], int(padding.sum())))

    with holdfast.trace(model, each=each) as routes:
        model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    layers = len(routes)
    assert seen == [(i, 12, 10) for i in range(layers)] + [(i, 2, 2) for i in range(layers)] * 3
    with pytest.raises(ValueError, match="recorded nothing"):
        routes[0]


def test_the_last_forward_is_the_one_that_is_kept() -> None:
    model = tiny("mixtral")
    with holdfast.trace(model) as routes, torch.no_grad():
        model(input_ids=IDS)
        model(input_ids=IDS[:1, :4])
    assert routes[0].experts.shape == (4, 2) and routes[-1].experts.shape == (4, 2)
    assert routes.padding is None
    with pytest.raises(IndexError):
        routes[3]


def test_holdfast_layers_are_traced_too() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [
                holdfast.MoE(holdfast.router(name, dim=16, experts=4), holdfast.Experts(16, 8, 4))
                for name in ("smoe", "top-p")
            ]
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, tokens: Tensor) -> Tensor:
            for layer in self.layers:
                tokens = tokens + layer(tokens)[0]
            return tokens

    with holdfast.trace(Model()) as routes:
        Model()(torch.randn(2, 3, 16))
    with pytest.raises(ValueError, match="recorded nothing"):
        routes[0]
    model = Model()
    with holdfast.trace(model) as routes:
        model(torch.randn(2, 3, 16))
    assert routes.names == ["layers.0.router", "layers.1.router"]
    assert [routing.experts.shape for routing in routes] == [(6, 2), (6, 4)]


def test_hooks_are_removed_when_the_forward_fails() -> None:
    model = tiny("mixtral")
    with pytest.raises(RuntimeError, match="stop"), holdfast.trace(model):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks for module in model.modules())


def test_models_that_cannot_be_traced_are_one_clear_sentence() -> None:
    import transformers

    llama = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    dense: Any = transformers.LlamaForCausalLM(llama)
    with pytest.raises(ValueError, match="unknown MoE family 'llama'"), holdfast.trace(dense):
        pass
    with pytest.raises(ValueError, match="Linear is no Hugging Face model"), holdfast.trace(torch.nn.Linear(2, 2)):
        pass


def test_padding_is_resolved_from_every_kind_of_mask() -> None:
    real = MASK.bool()
    assert padding_of(None, 2, 6) is None
    assert torch.equal(padding_of(MASK, 2, 6), real)  # type: ignore[arg-type]
    longer = torch.cat([torch.zeros(2, 3), MASK], dim=1)
    assert torch.equal(padding_of(longer, 2, 6), real)  # type: ignore[arg-type]
    causal = torch.ones(6, 6).tril().bool() & real[:, None, None, :]
    assert torch.equal(padding_of(causal, 2, 6), real)  # type: ignore[arg-type]
    added = torch.zeros(2, 1, 6, 6).masked_fill(~causal, torch.finfo(torch.float32).min)
    assert torch.equal(padding_of({"full_attention": added}, 2, 6), real)  # type: ignore[arg-type]
    static = torch.cat([causal, torch.zeros(2, 1, 6, 10).bool()], dim=-1)
    assert torch.equal(padding_of(static, 2, 6, past=0), real)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 dimensions"):
        padding_of(torch.ones(2, 6, 6), 2, 6)
