"""The loss of soft labels: smoothed ones, and those of mixed images (mixup and cutmix).

    smoothing   a target is 1 - e of its class and e of the uniform distribution over all C classes. The smoothed loss of an
                example with logits l and class y, -(1 - e) log p_y - (e / C) sum_c log p_c, differs from the cross entropy
                by e (l_y - mean_c l_c), because the logarithm of the softmax's denominator cancels. Szegedy et al. 2016
    mixing      a target is 1 - s of the class y and s of a second class z, and the loss differs by s (l_y - l_z) in the same
                way; with smoothed labels by (1 - e) s (l_y - l_z). Zhang et al. 2018, Yun et al. 2019

A hook adds these terms to `outputs.loss` in training mode, so the loss on held-out data is the cross entropy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100
SECOND_LABELS, SECOND_SHARES = "second_labels", "second_shares"  # further inputs of a batch: z and s of each example


@contextmanager
def soft_labels(model: nn.Module, smoothing: float) -> Iterator[None]:
    """Inside the `with`, the model's loss in training mode is that of smoothed labels, mixed where the inputs have a second.

    The model's own forward does not see these further inputs.
    """
    seconds: list[tuple[Tensor, Tensor] | None] = [None]  # of the forward that runs

    def take_seconds(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        seconds[0] = None
        if SECOND_LABELS not in options:
            return None
        kept = dict(options)
        seconds[0] = kept.pop(SECOND_LABELS), kept.pop(SECOND_SHARES)
        return given, kept

    def add_terms(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            count = options.get("num_items_in_batch")
            if seconds[0] is not None:
                term = mixing_term(outputs.logits, options["labels"], *seconds[0], count)
                outputs.loss = outputs.loss + (1 - smoothing) * term
            if smoothing:
                labels = options["shift_labels"] if "shift_labels" in options else options["labels"]
                outputs.loss = outputs.loss + smoothing * smoothing_term(outputs.logits, labels, count)
        return outputs

    handles = [
        model.register_forward_pre_hook(take_seconds, with_kwargs=True, prepend=True),
        model.register_forward_hook(add_terms, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def smoothing_term(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean over labels of l_y - mean_c l_c; with a `count`, the sum divided by it."""
    rows, classes = logits.float().flatten(0, -2), labels.flatten()
    in_use = classes != IGNORED_LABEL
    of_class = rows.gather(-1, classes.where(in_use, 0).unsqueeze(-1)).squeeze(-1)
    total = (of_class - rows.mean(-1)).where(in_use, 0.0).sum()
    return total / (in_use.sum() if count is None else count)


def mixing_term(logits: Tensor, labels: Tensor, second: Tensor, shares: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean over examples of s (l_y - l_z); with a `count`, the sum divided by it."""
    rows = logits.float()
    of_first, of_second = (rows.gather(-1, classes.unsqueeze(-1)).squeeze(-1) for classes in (labels, second))
    return (shares * (of_first - of_second)).sum() / (len(labels) if count is None else count)
