"""How many processes train together, as torchrun and accelerate launch tell each of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Of several processes, the one that writes and speaks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def own_process_group() -> Iterator[None]:
    """At the end, destroy the process group that was started inside the `with`, also after an error.

    The Trainer starts one under torchrun and accelerate launch, and leaves it to the script. A group's threads that still
    run while the interpreter ends can abort the process ("terminate called without an active exception"). A group that was
    there before belongs to whoever started it.
    """
    from torch import distributed

    theirs = distributed.is_available() and distributed.is_initialized()
    try:
        yield
    finally:
        if not theirs and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
