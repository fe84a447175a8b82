"""Perturbations of a token's company: the sequences it shares a batch with, and padding. None of it is about the token."""

from dataclasses import replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from holdfast.auditing.comparing import Rows, Tally
from holdfast.auditing.observing import Observation, observe
from holdfast.auditing.perturbation import Perturbation
from holdfast.auditing.samples import Sample
from holdfast.auditing.subject import Audited
from holdfast.metrics.likelihood import IGNORED

PADDED = 5  # tokens of padding: not a multiple of anything that kernels like


@final
class Alone(Perturbation):
    """Each sequence by itself, without padding, against the batch it was in."""

    name, about = "batch.alone", "each sequence alone against the whole batch"
    harmless: ClassVar[bool] = True

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        mask = clean_mask(sample)
        if sample.size == 1 and (mask is None or bool(mask.all())):
            return "every batch is one sequence without padding, which is alone already."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        mask = clean_mask(sample)
        for sequence in range(sample.size):
            real = None if mask is None else mask[sequence].bool().nonzero().flatten()
            if real is not None and not len(real):
                continue
            seen = observe(audited, _one(sample, sequence, real))
            rows = [self._rows(clean, layer, sequence, real) for layer in range(len(clean.layers))]
            if clean.predictions is None or clean.predictions.per_token:
                into.compare(clean, seen, rows)
                continue
            for layer, pair in enumerate(rows):
                into.compare_layer(layer, clean, seen, pair)
            into.compare_pictures(clean, seen, (torch.tensor([sequence]), torch.tensor([0])))

    def _rows(self, clean: Observation, layer: int, sequence: int, real: Tensor | None) -> Rows:
        length = len(clean.layers[layer].tokens) // clean.sequences  # windowed models have other lengths further up
        device = clean.layers[layer].tokens.device
        places = torch.arange(length, device=device) if real is None else real.to(device)
        return sequence * length + places, torch.arange(len(places), device=device)


@final
class Padded(Perturbation):
    """The same batch with more padding, before or after."""

    harmless: ClassVar[bool] = True

    def __init__(self, side: Literal["left", "right"]) -> None:
        self.side = side
        self.name, self.about = f"batch.{side}", f"{PADDED} more tokens of padding on the {side}"

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        if sample.ids is None:
            return "pictures have no padding."
        if sample.inputs.keys() - {"input_ids", "attention_mask", "token_type_ids"}:
            return "its inputs hold more than tokens and their mask, which cannot be padded here."
        if not audited.takes_positions and self.side == "left":
            return "its forward takes no position_ids, so that padding on the left would move every token."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        assert sample.ids is not None
        length = sample.ids.shape[1]
        mask = torch.ones_like(sample.ids) if clean_mask(sample) is None else sample.inputs["attention_mask"]
        inputs = {name: self._pad(tensor, 0) for name, tensor in sample.inputs.items()}
        inputs |= {"input_ids": self._pad(sample.ids, audited.pad), "attention_mask": self._pad(mask, 0)}
        if audited.takes_positions:
            inputs["position_ids"] = (inputs["attention_mask"].long().cumsum(1) - 1).clamp_min(0)
        labels = None if sample.labels is None else self._pad(sample.labels, IGNORED)
        seen = observe(audited, replace(sample, inputs=inputs, labels=labels))
        first = clean.real(0)
        shift = PADDED if self.side == "left" else 0
        there = first // length * (length + PADDED) + first % length + shift
        into.compare(clean, seen, [(first, there)] * len(clean.layers))

    def _pad(self, tensor: Tensor, value: int) -> Tensor:
        more = tensor.new_full((tensor.shape[0], PADDED), value)
        return torch.cat([more, tensor] if self.side == "left" else [tensor, more], dim=1)


def clean_mask(sample: Sample) -> Tensor | None:
    mask = sample.inputs.get("attention_mask")
    return mask if mask is not None and mask.dim() == 2 else None


def _one(sample: Sample, sequence: int, real: Tensor | None) -> Sample:
    def cut(name: str, tensor: Tensor) -> Tensor:
        row = tensor[sequence : sequence + 1]
        return row if real is None or tensor.dim() != 2 or tensor.shape[1] <= int(real.max()) else row[:, real]

    inputs = {name: cut(name, tensor) for name, tensor in sample.inputs.items()}
    return replace(sample, inputs=inputs, labels=None if sample.labels is None else cut("labels", sample.labels))
