"""Accuracy: is the right class among the k best?"""

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import kept


class Accuracy(Accumulator[float]):
    """The share of examples whose target is among the `k` largest logits; k=1 is accuracy, k=5 top-5 accuracy.

    Ties go to the lower class, as in `argmax`. Logits that are NaN rank above everything, so a broken model is wrong.
    """

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k is {k}; a target can be among the 1, 2, ... best.")
        self.k = k

    @property
    def settings(self) -> tuple[object, ...]:
        return (self.k,)

    def update(self, logits: Tensor, targets: Tensor, token_mask: Tensor | None = None) -> None:
        """`logits (...,C)`, `targets (...)`; for tokens as well as for whole examples."""
        right = hits(logits, targets, self.k, token_mask)
        self._add(right=right.sum(), examples=right.numel())

    def result(self) -> float:
        return self._mean("right", "examples")


@torch.no_grad()
def hits(logits: Tensor, targets: Tensor, k: int = 1, token_mask: Tensor | None = None) -> Tensor:
    """(R,) bool, for each real example: is its target among the k best?"""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}; expected targets of shape "
            f"{tuple(logits.shape[:-1])}, a class for each row."
        )
    rows, targets = kept(logits.reshape(-1, logits.shape[-1]), token_mask), kept(targets.reshape(-1), token_mask)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < rows.shape[1]:
        raise ValueError(
            f"targets run from {int(targets.min())} to {int(targets.max())}, but there are {rows.shape[1]} classes; "
            "mask targets that are not scored with padding."
        )
    own = rows.gather(1, targets.unsqueeze(1))
    ahead = ~(rows <= own)  # not `rows > own`: NaN must not make a target the best
    earlier = torch.arange(rows.shape[1], device=rows.device) < targets.unsqueeze(1)
    return (ahead | ((rows == own) & earlier)).sum(1) < k
