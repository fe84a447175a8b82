"""Telling images of unknown classes apart: the area under the precision-recall curve, as ImageNet-O defines it."""

from typing import Self

import torch
from torch import Tensor

from holdfast.metrics.rows import kept


class AnomalyPrecision:
    """AUPR = sum_n (R_n - R_(n-1)) P_n over the thresholds n, falling (Hendrycks et al. 2021, ImageNet-O).

    The anomaly score is minus the largest softmax probability and out-of-distribution is the positive class. The curve needs
    every score, so memory grows with the number of examples, 9 bytes each, unlike that of the other metrics.
    """

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._positive: list[Tensor] = []

    def update(self, logits: Tensor, out_of_distribution: Tensor | bool, token_mask: Tensor | None = None) -> None:
        """`logits (...,C)`; out_of_distribution (...) bool, or one bool for all."""
        rows = logits.detach().reshape(-1, logits.shape[-1])
        positive = torch.as_tensor(out_of_distribution, dtype=torch.bool).cpu().expand(logits.shape[:-1]).reshape(-1)
        rows, positive = kept(rows, token_mask), kept(positive, token_mask)
        scores = -torch.softmax(rows.double(), dim=-1).amax(-1).cpu()
        if scores.isnan().any():
            raise ValueError(f"{int(scores.isnan().sum())} examples have NaN or infinite logits; they cannot be ranked.")
        self._scores.append(scores)
        self._positive.append(positive)

    def merge(self, other: Self) -> Self:
        """Add what `other` has seen. Changes and returns this metric."""
        self._scores += other._scores
        self._positive += other._positive
        return self

    def result(self) -> float:
        scores = torch.cat([torch.empty(0, dtype=torch.float64), *self._scores])
        positive = torch.cat([torch.empty(0, dtype=torch.bool), *self._positive])
        found = int(positive.sum())
        if found in (0, len(positive)):
            raise ValueError(
                f"AnomalyPrecision has seen {found} out-of-distribution examples and {len(positive) - found} others; "
                "it needs both kinds."
            )
        scores, order = scores.sort(descending=True)
        last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])  # equal scores fall together
        caught = positive[order].cumsum(0)[last].double()
        flagged = (torch.arange(len(scores)) + 1)[last]
        gained = torch.diff(caught, prepend=torch.zeros(1, dtype=torch.float64))
        return float((gained * caught / flagged).sum() / found)
