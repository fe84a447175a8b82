"""Perturbations of texts: words swapped or misspelt. What is compared are the tokens that were left alone."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import final

import numpy as np
import torch

from holdfast.attacks import AttackedText, AttackWarning, misspell, swap_words
from holdfast.attacks.text import Spans
from holdfast.audit.comparing import Rows, Tally
from holdfast.audit.observing import Observation, observe
from holdfast.audit.perturbation import Perturbation
from holdfast.audit.samples import Reader, Sample
from holdfast.audit.subject import Audited

ATTACKS: dict[str, Callable[..., AttackedText]] = {"words": swap_words, "typos": misspell}


@final
class Words(Perturbation):
    """Some words of each text replaced. A token is compared where its characters, and it, are the same in both texts."""

    def __init__(self, name: str, reader: Reader | None, rate: float, seed: int, length: int) -> None:
        self.name, self.reader, self.rate, self.seed, self.length = name, reader, rate, seed, length
        self.about = f"{rate:.0%} of the words {'swapped' if name == 'words' else 'misspelt'}; of the tokens left alone"

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        if sample.texts is None or self.reader is None:
            return "there are no texts, only inputs."
        if sample.spans is None:
            return "the tokenizer is slow and does not say where its tokens are in a text."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        assert sample.texts is not None and sample.spans is not None and self.reader is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttackWarning)
            attacked = ATTACKS[self.name](sample.texts, rate=self.rate, seed=self.seed)
        if not attacked.changed:
            return
        changed = self.reader.batch(sample.number, attacked.texts, self.length)
        first, second = aligned(sample, changed, attacked)
        device = clean.layers[0].tokens.device
        rows: Rows = (first.to(device), second.to(device))
        into.compare(clean, observe(audited, changed), [rows] * len(clean.layers))
        into.details.append({"words": sum(attacked.words), "changed": attacked.changed, "checksum": attacked.checksum})


def aligned(before: Sample, after: Sample, attacked: AttackedText) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the two batches that hold the same untouched token at the same place of the text."""
    assert before.ids is not None and after.ids is not None and before.spans is not None and after.spans is not None
    first, second = [], []
    for document, (old, new) in enumerate(zip(before.spans, after.spans, strict=True)):
        there = _places(new, ~attacked.touched(document, new))
        kept = ~attacked.touched(document, old, clean=True)
        for (start, end, nth), place in _places(_shifted(old, attacked, document), kept).items():
            found = there.get((start, end, nth))
            if found is not None and before.ids[document, place] == after.ids[document, found]:
                first.append(document * before.ids.shape[1] + place)
                second.append(document * after.ids.shape[1] + found)
    return torch.tensor(first, dtype=torch.int64), torch.tensor(second, dtype=torch.int64)


def _shifted(spans: Spans, attacked: AttackedText, document: int) -> Spans:
    """Places in the clean text as places in the attacked one: moved by what words before them gained or lost."""
    changes = attacked.changes[document]
    ends = np.array([change.before[1] for change in changes], dtype=np.int64)
    gained = np.array([0, *(change.after[1] - change.before[1] for change in changes)], dtype=np.int64)
    moved: Spans = spans + gained[np.searchsorted(ends, spans[:, :1], side="right")]
    return moved


def _places(spans: Spans, kept: np.ndarray) -> dict[tuple[int, int, int], int]:  # type: ignore[type-arg]
    """By characters, and how many tokens before have the same: the bytes of one character do."""
    found, seen = {}, Counter[tuple[int, int]]()
    for place, (start, end) in enumerate(spans.tolist()):
        if kept[place] and start < end:
            found[start, end, seen[start, end]] = place
            seen[start, end] += 1  # of those left alone: a replaced word's old characters are others now
    return found
