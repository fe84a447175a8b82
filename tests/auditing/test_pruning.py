"""Pruned models: fewer experts, the same as with the others disabled, saved and loaded as any model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, sparse, texts, tokenizer
from tiny import tiny
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers
from holdfast.model_size import EXPERTS

NATIVE: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "gpt_oss": {},
    "phimoe": {},
    "deepseek_v3": {"n_group": 1, "topk_group": 1},
}


def build(name: str) -> Any:
    if name in NATIVE:
        return tiny(name, **NATIVE[name])
    model = sparse(name) if not name.startswith("mixtral ") else holdfast.reroute(tiny("mixtral"), name.split()[1])
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return torch.cat([model(**batch).logits[batch["attention_mask"].bool()] for batch in batches()])


def counts(model: Any) -> list[Tensor]:
    used: dict[int, Tensor] = {}

    def add(layer: int, routing: holdfast.Routing, mask: Tensor | None) -> None:
        assert mask is not None
        used[layer] = used.get(layer, torch.zeros(routing.gates.shape[1])) + routing.chosen[mask.flatten()].sum(0)

    with torch.no_grad(), holdfast.trace(model, each=add):
        for batch in batches():
            model(**batch)
    return [used[layer] for layer in sorted(used)]


@pytest.mark.parametrize("name", [*NATIVE, "smoe", "xmoe", "smooth", "mixtral smoe", "mixtral smooth"])
def test_a_pruned_model_is_the_model_without_its_least_used_experts(name: str, tmp_path: Path) -> None:
    model = build(name)
    before = logits(model)
    pruned = holdfast.prune(model, batches(), keep=6)
    assert torch.equal(logits(model), before)
    removed: dict[int, list[int]] = {}
    for layer, (used, kept) in enumerate(zip(counts(model), pruned.kept, strict=True)):
        removed[layer] = sorted(set(range(8)) - set(kept))
        assert len(kept) == 6 and float(used[removed[layer]].max()) <= float(used[kept].min())
    after = logits(pruned.model)
    with holdfast.disable(model, removed):
        torch.testing.assert_close(after, logits(model), rtol=1e-4, atol=1e-5)
        expected = holdfast.audit(model, batches(), perturb=["none"]).overall.loss
    assert pruned.loss.after is not None and pruned.loss.before is not None and expected is not None
    assert abs(pruned.loss.after - expected) < 1e-5 and pruned.loss.before != pruned.loss.after
    assert f"{pruned.loss.after:.4f}" in str(pruned) and "6 experts" in str(pruned)
    holdfast.save(pruned.model, tmp_path / "smaller")
    loaded: Any = holdfast.load(tmp_path / "smaller")
    assert torch.equal(logits(loaded), after) and all(layer.size[1] == 6 for layer in moe_layers(loaded))
    assert all(spec.experts in (None, 6) for spec in specs_of(loaded).values())
    assert 6 in {getattr(loaded.config, entry, None) for entry in EXPERTS}


def test_the_state_of_a_router_is_pruned_with_its_experts() -> None:
    model = sparse("symphony").train()
    for batch in batches(3):
        model(**batch)
    graphs = [
        layer.router.informers[0].get_buffer("graph").clone()
        for layer in moe_layers(model.eval())
        if layer.router is not None
    ]
    pruned = holdfast.prune(model, batches(), keep=5)
    for layer, graph, kept in zip(moe_layers(pruned.model), graphs, pruned.kept, strict=True):
        assert layer.router is not None
        assert torch.equal(layer.router.informers[0].get_buffer("graph"), graph[kept][:, kept])


def test_texts_are_read_with_a_tokenizer_and_a_pruned_model_trains() -> None:
    words = tokenizer()
    given: Iterator[str] = iter(texts())
    pruned = holdfast.prune(sparse(), given, keep=2, tokenizer=words, batch=2)
    batch = next(iter(batches()))
    pruned.model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    assert [name for name, parameter in pruned.model.named_parameters() if parameter.grad is None] == []


def test_what_cannot_be_pruned_is_refused() -> None:
    def refuse(says: str, model: Any, keep: Any) -> None:
        assert_refused(says, holdfast.prune, model, batches(1), keep=keep)

    refuse("keep is 1; it must be a whole number, at least k, 2", tiny("mixtral"), 1)
    refuse("keep is 8.*less than the 8 experts", tiny("mixtral"), 8)
    refuse("experts are in groups", tiny("deepseek_v3"), 6)
    refuse("experts are in groups", sparse("grouped"), 6)
    refuse("experts are chosen without scores", sparse("hash"), 6)
    refuse("router 'ac' keeps statistics for each expert of the layer before", sparse("ac"), 6)
