"""How the tokens of images and of texts are routed in a vision-language model, and which of them flip, for each layer.

    overlap, one_modality       how both share the experts of a layer (`metrics.modalities`), on clean inputs
    image_CAUSE, text_CAUSE     the share of image tokens and of text tokens whose k experts change, by cause: "corrupted"
                                pictures, "reworded" questions
    image, text                 the loads of both, in percent

A corrupted picture leaves all tokens in their places. A reworded question has other words, so only tokens of both texts are
compared, those of the longest common blocks of token ids. Layers of a tower and of a connector have image tokens only, which
do not depend on the question. In a causal language model the tokens of a picture before its question do not either: a share
above 0 there means that a router, or a layer, reads later tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, final

import torch
from torch import Tensor

from holdfast.hub import trace
from holdfast.hub.tracing import layers_of_images, routing_modules
from holdfast.metrics import ModalityUse, RoutingChanges
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.selection import MODALITIES
from holdfast.routing import Router, Routing
from holdfast.train.task import Inputs, forward

CORRUPTED, REWORDED = "corrupted", "reworded"


@final
class ModalityRoutes:
    """Collect the routes of a model on batches of questions; `picture` is the token id of an image."""

    def __init__(self, model: Any, picture: int) -> None:
        self.model, self.picture = model, picture
        self.of_images = layers_of_images(model)
        modules = routing_modules(model)
        self.names = [name for name, _, _ in modules]
        # Experts that `smooth` adds below the k best enter and leave with weight 0, so they do not count as a flip.
        cores = [module.select.declares.core if isinstance(module, Router) else None for _, module, _ in modules]
        self.use = [ModalityUse() for _ in cores]
        self.changes = {
            (modality, cause): [RoutingChanges(core) for core in cores]
            for modality in MODALITIES
            for cause in (CORRUPTED, REWORDED)
        }

    @torch.no_grad()
    def add(self, clean: Inputs, corrupted: Iterable[Inputs], reworded: Inputs) -> None:
        """Add a batch of questions with pictures, clean, with corrupted pictures, and reworded; the model is evaluating."""
        before = self._routings(clean)
        is_image, real = clean["input_ids"] == self.picture, clean["attention_mask"].bool()
        for layer, routing in enumerate(before):
            if layer not in self.of_images:
                self.use[layer].update(routing, is_image, real)
        for inputs in corrupted:
            self._compare(CORRUPTED, before, self._routings(inputs), is_image, (real.flatten().nonzero().flatten(),) * 2)
        self._compare(REWORDED, before, self._routings(reworded), is_image, common_tokens(clean, reworded))

    def _routings(self, inputs: Inputs) -> list[Routing]:
        with trace(self.model) as routes:
            forward(self.model, inputs)
            return [routing.map_tokens(Tensor.cpu) for routing in routes]

    def _compare(
        self,
        cause: str,
        before: Sequence[Routing],
        after: Sequence[Routing],
        is_image: Tensor,
        same: tuple[Tensor, Tensor],
    ) -> None:
        """Add the changes from one forward to another; `same` are the rows of the tokens that both have."""
        for layer, (old, new) in enumerate(zip(before, after, strict=True)):
            if layer in self.of_images:
                if cause == CORRUPTED:
                    self.changes["image", cause][layer].update(old, new)
                continue
            own = is_image.flatten()[same[0]]
            for modality, chosen in (("image", own), ("text", ~own)):
                rows = [(record, which[chosen]) for record, which in zip((old, new), same, strict=True)]
                one, other = (record.map_tokens(lambda values, at=at: values[at]) for record, at in rows)  # type: ignore[misc]
                self.changes[modality, cause][layer].update(one, other)

    def result(self) -> list[dict[str, Any]]:
        """Return for each layer its name and the numbers above; None where a layer has no such tokens."""
        found = []
        for layer, name in enumerate(self.names):
            use = _result_of(self.use[layer])
            flips = {
                f"{modality}_{cause}": None if (changes := _result_of(each[layer])) is None else changes.fluctuation
                for (modality, cause), each in self.changes.items()
            }
            shared = {"overlap": use and use.overlap, "one_modality": use and use.one_modality}
            loads = {} if use is None else {"text": use.text, "image": use.image}
            found.append({"name": name, **shared, **flips, **loads})
        return found


def _result_of(metric: Accumulator[Any]) -> Any:
    return metric.result() if metric.tokens else None


def common_tokens(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the numbers of the tokens that two batches of texts have in common, among all tokens of each, in order.

    Two texts have in common the longest block of token ids that is in both, and what is in common before and after it.
    """
    found: tuple[list[int], list[int]] = ([], [])
    widths = [batch["input_ids"].shape[1] for batch in (before, after)]
    texts = [
        [ids[real.bool()].tolist() for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        for batch in (before, after)
    ]
    for row, (one, other) in enumerate(zip(*texts, strict=True)):
        for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
            for places, start, width in zip(found, (block.a, block.b), widths, strict=True):
                places.extend(range(row * width + start, row * width + start + block.size))
    return torch.tensor(found[0], dtype=torch.int64), torch.tensor(found[1], dtype=torch.int64)
