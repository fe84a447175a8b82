"""Work at the same time as other work: on a GPU on a stream beside, elsewhere in its turn.

Memory goes back to the stream it was taken on: tensors that cross over are told to wait for the other.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}
_running: dict[torch.device, list[Callable[[], object]]] = {}
Result = TypeVar("Result")


def beside(like: Tensor, work: Callable[[], Result]) -> Result:
    """Run `work`, which launches kernels on `like`'s device, at the same time as what is launched until `join`.

    It may read what was launched before. What it writes or returns may be read after `join` only, or by more such work.
    """
    if not _has_streams(like):
        return work()
    result = _launch(like, work)
    _running.setdefault(like.device, []).append(work)  # it holds what it reads, whose memory must not go to others yet
    if isinstance(result, Tensor):
        result.record_stream(torch.cuda.current_stream(like.device))
    return result


def join(like: Tensor) -> None:
    """What is launched from here on comes after all the work beside."""
    if _has_streams(like) and _running.pop(like.device, None) is not None:
        torch.cuda.current_stream(like.device).wait_stream(_streams[like.device])


def with_backward_beside(tokens: Tensor, work: Callable[[], Tensor]) -> Tensor:
    """What `work` makes of the tokens, at once; its backward comes beside others, for that is where autograd saw it run."""
    if not (_has_streams(tokens) and torch.is_grad_enabled()):
        return work()
    result = beside(tokens, work)
    join(tokens)
    tokens.record_stream(_streams[tokens.device])
    return result


def backward_beside(like: Tensor, reads: Iterable[Tensor], work: Callable[[], object]) -> None:
    """In a backward, run `work` where those of `with_backward_beside` run, the only ones to read what it writes."""
    if not _has_streams(like):
        work()
        return
    _launch(like, work)
    for tensor in reads:
        tensor.record_stream(_streams[like.device])


def _has_streams(like: Tensor) -> bool:
    return like.is_cuda and not torch.compiler.is_compiling()


def _launch(like: Tensor, work: Callable[[], Result]) -> Result:
    if like.device not in _streams:
        _streams[like.device] = torch.cuda.Stream(like.device)
    stream = _streams[like.device]
    stream.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(stream):
        return work()
