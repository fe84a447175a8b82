"""Remove the experts that some texts use least, and measure what that costs on them.

A pruned model is a new one with fewer experts: built from its config, with the weights of the experts that are left. So it
is saved and loaded as any other, and a family's own model stays one. Its outputs are those of the model with the others
disabled, except where the gates of a softmax are weights or are compared with a threshold: they grow with fewer experts.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from holdfast.auditing.baseline import Mean
from holdfast.auditing.forwards import observe
from holdfast.auditing.model_and_data import AuditBatch, Measurement
from holdfast.auditing.reports import DataSettings, Pair
from holdfast.checked import from_mapping
from holdfast.hub.convert import require_unwrapped
from holdfast.hub.disabling import routed_layers
from holdfast.hub.engines import is_sharded
from holdfast.hub.families import text_config
from holdfast.hub.families.moe import GROUPS
from holdfast.hub.install import mark_modified, specs_of
from holdfast.hub.layers import MoELayerRef, moe_layers
from holdfast.hub.specs import NATIVE, describe, reads
from holdfast.model_size import EXPERTS
from holdfast.routing.presets import REGISTRY


@final
@dataclass(frozen=True)
class Pruned:
    """A model with fewer experts, and what they cost."""

    model: Any
    kept: list[list[int]]  # by MoE layer, the former numbers of the experts that are left
    loss: Pair  # per token of the texts in nats, before and after; None where the model predicts nothing

    def __str__(self) -> str:
        kept = f"{len(self.kept[0])} experts are left in each of {len(self.kept)} layers"
        if self.loss.before is None or self.loss.after is None:
            return f"{kept}."
        change = self.loss.after - self.loss.before
        return f"{kept}; the loss on these texts goes from {self.loss.before:.4f} to {self.loss.after:.4f} ({change:+.4f})."


def prune(model: Any, texts_or_inputs: Iterable[Any], *, keep: int, tokenizer: Any = None, **settings: Any) -> Pruned:
    """Return a copy of an MoE model with the `keep` experts of each layer that most tokens use, and what this costs.

    texts_or_inputs   as for `audit`: strings with the model's `tokenizer`, or batches; the loss is measured on them too
    settings          batch, length, tokens: those of `audit`

        pruned = holdfast.prune(model, texts, keep=6, tokenizer=tokenizer)
        print(pruned)
        holdfast.save(pruned.model, "smaller/")

    Raise ValueError where experts cannot be removed: they are in groups, chosen by token id, quantised, or sharded; a router
    reads which experts the layer before selected (`ac`).
    """
    layers = _prunable_layers(model, keep)
    data = list(texts_or_inputs) if isinstance(texts_or_inputs, Iterator) else texts_or_inputs
    checked: DataSettings = from_mapping(DataSettings, settings)
    usage = _Usage(model, tokenizer, checked, None)
    usage.run(data)
    kept = [counts.argsort(descending=True, stable=True)[:keep].sort().values for counts in usage.counts]
    smaller = _with_experts(model, layers, kept)
    after = _Usage(smaller, tokenizer, checked, None)
    after.run(data)
    return Pruned(smaller, [one.tolist() for one in kept], Pair(usage.nll.result(), after.nll.result()))


@final
class _Usage(Measurement):
    """How many tokens use each expert, and the loss."""

    counts: list[Tensor]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.nll = Mean()

    def add(self, batch: AuditBatch) -> None:
        seen = observe(self.audited, batch)
        used = [record.routing.chosen[seen.real(layer)].sum(0).cpu() for layer, record in enumerate(seen.layers)]
        self.counts = used if not self.finished else [one + more for one, more in zip(self.counts, used, strict=True)]
        if seen.predictions is not None:
            self.nll.update(seen.predictions.scored)
        self.count(batch, batch.tokens)


def _prunable_layers(model: Any, keep: int) -> list[MoELayerRef]:
    """Return the MoE layers. Raise ValueError if they cannot have only `keep` experts."""
    require_unwrapped(model)
    found, specs = moe_layers(model), specs_of(model)
    if is_sharded(model) or getattr(model, "hf_quantizer", None) is not None or any(p.is_meta for p in model.parameters()):
        raise ValueError("the weights of this model are sharded, quantised or offloaded; prune it before that.")
    for layer, routed in zip(found, routed_layers(model), strict=True):
        spec, experts = specs.get(layer.name), layer.size[1]
        if (reason := routed.refusal()) is not None:
            raise ValueError(reason)
        router = NATIVE if spec is None else spec.router
        k = int(layer.gate.top_k) if spec is None or (router == NATIVE and layer.family is not None) else spec.k
        if not isinstance(keep, int) or not k <= keep < experts:
            raise ValueError(
                f"keep is {keep!r}; it must be a whole number, at least k, {k}, and less than the {experts} experts of "
                f"{layer.name}."
            )
        has_groups = layer.family is not None and int(getattr(layer.gate, GROUPS, 1) or 1) > 1
        if has_groups or (router != NATIVE and "groups" in REGISTRY.options(router)):
            raise ValueError(
                f"{layer.name}: its experts are in groups, which would have unequal sizes; it cannot be pruned."
            )
        if reads(router, "previous"):
            raise ValueError(
                f"{layer.name}: router {router!r} keeps statistics for each expert of the layer before; prune the model "
                "with another router, and then reroute it."
            )
    return found


@torch.no_grad()
def _with_experts(model: Any, layers: list[MoELayerRef], kept: list[Tensor]) -> Any:
    """Return a copy of the model with the experts `kept` in each layer."""
    keep, specs = len(kept[0]), specs_of(model)
    config, own = copy.deepcopy(model.config), {layer.size[1] for layer in layers if layer.family is not None}
    for name in EXPERTS:
        if getattr(text_config(model), name, None) in own:
            setattr(config.get_text_config(), name, keep)
    if specs:
        changed = {name: spec if spec.experts is None else replace(spec, experts=keep) for name, spec in specs.items()}
        config.holdfast = {**config.holdfast, "layers": describe(model, changed)["layers"]}
    smaller = type(model)(config)
    for layer, small in zip(layers, moe_layers(smaller), strict=True):
        if small.size[1] != keep:
            raise ValueError(f"{layer.name}: Holdfast does not know which entry of this config has its number of experts.")
    prefixes = {f"{layer.name}.": (layer.size[1], own) for layer, own in zip(layers, kept, strict=True)}
    former = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in [*smaller.named_parameters(), *smaller.named_buffers()]:
        value = former[name]
        if value.shape != tensor.shape:
            experts, indices = next((one for prefix, one in prefixes.items() if name.startswith(prefix)), (0, kept[0]))
            for dim, (old, new) in enumerate(zip(value.shape, tensor.shape, strict=True)):
                if old != new and (old != experts or new != keep):
                    why = "has another shape with fewer experts, and no row for each expert"
                    raise ValueError(f"{name} {why}; it cannot be pruned.")
                if old != new:
                    value = value.index_select(dim, indices.to(value.device))
        tensor.data = value.clone()
        tensor.requires_grad_(former[name].requires_grad)
    smaller.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    mark_modified(smaller)
    return smaller.to(model.device).train(model.training)
