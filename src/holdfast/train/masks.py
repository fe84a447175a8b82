"""Attention masks in a training step on a GPU, without waiting for it.

transformers looks at the values of position ids and masks in every forward, to use a faster attention kernel if it can, and
so waits for the GPU. While a CUDA graph is captured it cannot, and then always builds a mask. In a training step of ours the
inputs say enough:

    no position ids        no row has several sequences, so there is nothing to look for
    no attention mask      every token is real, and no mask is built, captured or not
    an attention mask      a mask is built, captured or not
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from holdfast.train.task import Inputs


@contextmanager
def masks_without_waiting(inputs: Sequence[Inputs]) -> Iterator[None]:
    """Inside the `with`, make transformers decide by the names of the inputs which masks it builds."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    has_mask = any("attention_mask" in batch for batch in inputs)
    with ExitStack() as changes:
        _replace(changes, import_utils, "is_cuda_stream_capturing", lambda: has_mask)
        if not any("position_ids" in batch for batch in inputs):
            _replace(changes, masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
        yield


def _replace(changes: ExitStack, module: Any, name: str, function: Any) -> None:
    """Replace a function of a module until the end of `changes`; do nothing in a version that does not have it."""
    if hasattr(module, name):
        changes.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, function)
