"""Attention masks in a training step on a GPU, without waiting for it.

transformers looks at the values of position ids and masks in every forward, to use a faster attention kernel if it can, and
so waits for the GPU. While a CUDA graph is captured it cannot, and then always builds a mask. In a training step of ours the
inputs say enough:

    no position ids        no row has several sequences, so there is nothing to look for
    no attention mask      every token is real, and no mask is built, captured or not
    an attention mask      a mask is built, captured or not

Under `torch.compile`, transformers builds a mask in every case (before torch 2.14), and then attention cannot use its flash
kernel. Here a compiled step has a mask only if a step that is not compiled has one.
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
    may_be_packed = any("position_ids" in batch for batch in inputs)
    with ExitStack() as changes:
        _replace(changes, import_utils, "is_cuda_stream_capturing", _yes if has_mask else _no)
        if not may_be_packed:
            _replace(changes, masking_utils, "find_packed_sequence_indices", _no_packed_rows)
        if not has_mask and not may_be_packed:
            for name in ("is_tracing", "is_torchdynamo_exporting"):
                _replace(changes, masking_utils, name, _no)
        yield


# Named functions, not lambdas: `torch.compile` would compile again for each new function object.
def _yes(*_: Any, **named: Any) -> bool:
    return True


def _no(*_: Any, **named: Any) -> bool:
    return False


def _no_packed_rows(position_ids: Any) -> None:
    return None


def _replace(changes: ExitStack, module: Any, name: str, function: Any) -> None:
    """Replace a function of a module until the end of `changes`; do nothing in a version that does not have it."""
    if hasattr(module, name):
        changes.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, function)
