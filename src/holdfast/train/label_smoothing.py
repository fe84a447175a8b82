"""Label smoothing: a target is 1 - e of its class and e of the uniform distribution over all C classes.

The smoothed loss of an example with logits l and class y is -(1 - e) log p_y - (e / C) sum_c log p_c. It differs from the
cross entropy by e (l_y - mean_c l_c), because the logarithm of the softmax's denominator cancels. This term is added to
`outputs.loss` in training mode, so the loss on held-out data is the cross entropy. Szegedy et al. 2016.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100


@contextmanager
def smoothed_labels(model: nn.Module, smoothing: float) -> Iterator[None]:
    """Inside the `with`, the model's loss in training mode is that of smoothed labels."""
    if not smoothing:
        yield
        return

    def add_term(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            labels = options["shift_labels"] if "shift_labels" in options else options["labels"]
            term = smoothing_term(outputs.logits, labels, options.get("num_items_in_batch"))
            outputs.loss = outputs.loss + smoothing * term
        return outputs

    handle = model.register_forward_hook(add_term, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def smoothing_term(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean over labels of l_y - mean_c l_c; with a `count`, the sum divided by it."""
    require_classes(labels)
    rows, classes = logits.float().flatten(0, -2), labels.flatten()
    in_use = classes != IGNORED_LABEL
    own = rows.gather(-1, classes.where(in_use, 0).unsqueeze(-1)).squeeze(-1)
    total = (own - rows.mean(-1)).where(in_use, 0.0).sum()
    return total / (in_use.sum() if count is None else count)


def require_classes(labels: Tensor) -> None:
    """Raise ValueError if the labels are numbers to be predicted, which cannot be smoothed."""
    if labels.is_floating_point():
        raise ValueError("label smoothing is for classes, and these labels are numbers: set training.label_smoothing to 0.")
