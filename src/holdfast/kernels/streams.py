"""Work that nobody waits for yet: on a GPU on a stream beside what follows, elsewhere in its turn."""

from collections.abc import Callable
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
    if not like.is_cuda or torch.compiler.is_compiling():
        return work()
    if like.device not in _streams:
        _streams[like.device] = torch.cuda.Stream(like.device)
    stream = _streams[like.device]
    stream.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(stream):
        result = work()
    _running.setdefault(like.device, []).append(work)  # it holds what it reads, whose memory must not go to others yet
    if isinstance(result, Tensor):
        result.record_stream(torch.cuda.current_stream(like.device))  # nor may its own, before it was read here
    return result


def join(like: Tensor) -> None:
    """What is launched from here on comes after all the work beside."""
    if like.is_cuda and not torch.compiler.is_compiling() and _running.pop(like.device, None) is not None:
        torch.cuda.current_stream(like.device).wait_stream(_streams[like.device])
