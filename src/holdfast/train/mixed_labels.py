"""The loss of mixed images (mixup and cutmix): a target is 1 - s of the class y and s of a second class z.

The cross entropy with such a target differs from that with y by s (l_y - l_z), because the logarithm of the softmax's
denominator cancels. A hook adds this term to `outputs.loss` in training mode, as label smoothing adds its own. With labels
smoothed by e, the two terms are e (l_y - mean_c l_c) and (1 - e) s (l_y - l_z). Zhang et al. 2018, Yun et al. 2019.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.train.label_smoothing import smoothed_labels

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

    def add_term(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        if seconds[0] is not None and module.training and torch.is_grad_enabled():
            term = mixing_term(outputs.logits, options["labels"], *seconds[0], options.get("num_items_in_batch"))
            outputs.loss = outputs.loss + (1 - smoothing) * term
        seconds[0] = None
        return outputs

    handles = [
        model.register_forward_pre_hook(take_seconds, with_kwargs=True, prepend=True),
        model.register_forward_hook(add_term, with_kwargs=True),
    ]
    try:
        with smoothed_labels(model, smoothing):
            yield
    finally:
        for handle in handles:
            handle.remove()


def mixing_term(logits: Tensor, labels: Tensor, second: Tensor, shares: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the mean over examples of s (l_y - l_z); with a `count`, the sum divided by it."""
    rows = logits.float()
    own, other = (rows.gather(-1, classes.unsqueeze(-1)).squeeze(-1) for classes in (labels, second))
    return (shares * (own - other)).sum() / (len(labels) if count is None else count)
