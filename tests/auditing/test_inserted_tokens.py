"""Inserted tokens: the experts of following tokens, and gradients, against one forward for each text."""

from typing import Any

import pytest
import torch
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor

import holdfast
from holdfast.attacks import random_tokens, search_tokens
from holdfast.auditing.triggers import InsertedTokens
from holdfast.hub.families import routing_from_gate
from holdfast.hub.tracing import routing_modules

LAYER, EXPERT, PLACE = 1, 2, 1


def models() -> dict[str, Any]:
    return {
        "native": lambda: tiny("olmoe"),
        "sigmoid": lambda: tiny("deepseek_v3"),
        "rerouted": lambda: holdfast.reroute(tiny("mixtral"), "smooth"),
        "whole batch": lambda: holdfast.reroute(tiny("mixtral"), "sinkhorn"),
        "sparsified": lambda: holdfast.sparsify(tiny_dense("llama"), experts=4, router="symphony+similarity").eval(),
    }


def inserted(model: Any) -> InsertedTokens:
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 60, (3, 9), generator=generator), torch.ones(3, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    return InsertedTokens(model, lambda inputs: model(**inputs, use_cache=False), ids, mask, PLACE)


@pytest.mark.parametrize("name", models())
def test_shares_are_those_of_one_forward_for_each_candidate(name: str) -> None:
    model = models()[name]()
    some, tokens = inserted(model), torch.tensor([[5, 7], [40, 41], [9, 9]])
    for candidates in (tokens, tokens[:1, :0]):
        layers, count = some.shares(candidates), candidates.shape[1]
        for number, own in enumerate(candidates):
            ids = torch.cat([some.ids[:, :PLACE], own.repeat(3, 1), some.ids[:, PLACE:]], 1)
            mask = torch.cat([some.mask[:, :PLACE], torch.ones_like(own).repeat(3, 1), some.mask[:, PLACE:]], 1)
            with torch.no_grad(), holdfast.trace(model) as routes:
                model(input_ids=ids, attention_mask=mask, use_cache=False)
            for layer, found in enumerate(layers):
                for text in range(3):
                    real = [place for place in range(PLACE + count, ids.shape[1]) if mask[text, place]]
                    rows = [text * ids.shape[1] + place for place in real]
                    expected = routes[layer].chosen[rows].double().mean(0)
                    torch.testing.assert_close(found.chosen[number, text], expected)
                    gates = routes[layer].gates[rows].mean(0)
                    torch.testing.assert_close(found.gates[number, text], gates, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["native", "sigmoid", "rerouted", "sparsified"])
def test_slopes_are_the_gradient_of_one_hot_tokens(name: str) -> None:
    model = models()[name]()
    some, tokens, allowed = inserted(model), torch.tensor([5, 7, 11]), torch.tensor([3, 7, 30, 59])
    table = model.get_input_embeddings().weight
    hot = torch.nn.functional.one_hot(tokens, len(table)).float().requires_grad_()
    inputs = some.inputs(tokens[None])
    rows = torch.nn.functional.one_hot(inputs["input_ids"], len(table)).float()
    rows = torch.cat([rows[:, :PLACE], hot.expand(3, -1, -1), rows[:, PLACE + 3 :]], 1)
    routings = []
    _, module, rule = routing_modules(model)[LAYER]
    handle = module.register_forward_hook(
        lambda m, i, out: routings.append(out if rule is None else routing_from_gate(out, rule))
    )
    model(inputs_embeds=rows @ table, attention_mask=inputs["attention_mask"], use_cache=False)
    handle.remove()
    logs = routings[0].gates[:, EXPERT].log().view(3, -1)[:, PLACE + 3 :]
    mask = some.mask[:, PLACE:]
    value: Tensor = ((logs * mask).sum(1) / mask.sum(1)).mean()
    (expected,) = torch.autograd.grad(value, hot)
    with torch.no_grad():
        found = some.slopes(tokens, LAYER, EXPERT, allowed)
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected[:, allowed], atol=1e-6, rtol=1e-3)
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["native", "rerouted", "sparsified"])
def test_a_suffix_of_a_text_is_the_best_that_a_search_of_all_finds(name: str) -> None:
    """The tokens after it, here of one text, are sent to an expert by the best of all sequences of 3 among 12 tokens."""
    model, allowed = models()[name](), torch.arange(10, 22)
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(2))
    some = InsertedTokens(model, lambda inputs: model(**inputs, use_cache=False), ids, torch.ones_like(ids), place=5)

    def value(tokens: Tensor) -> Tensor:
        return some.shares(tokens)[LAYER].gates[:, 0, EXPERT].log()

    def slopes(tokens: Tensor) -> Tensor:
        return some.slopes(tokens, LAYER, EXPERT, allowed)

    every = torch.cartesian_prod(allowed, allowed, allowed)
    with torch.no_grad():
        found = search_tokens(value, slopes, allowed, random_tokens(allowed, 3, 3, seed=0), steps=8, width=12, tries=24)
        assert found.value == pytest.approx(float(value(every).max()), abs=1e-5)
    assert found.tried < len(every) and len(found.tokens) == 3


def test_a_router_that_reads_token_ids_only_has_no_slopes() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, router="hash").eval()
    some = inserted(model)
    assert not some.slopes(torch.tensor([5, 7]), 0, 0, torch.arange(10)).any()
    before, after = some.shares(torch.empty(1, 0, dtype=torch.int64)), some.shares(torch.tensor([[5, 7]]))
    assert all(one.chosen.equal(two.chosen) for one, two in zip(before, after, strict=True))
