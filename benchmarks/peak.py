"""How much memory a run takes."""

from collections.abc import Callable

import torch


def peak_mib(run: Callable[[], object], device: str) -> float | None:
    """MiB above what was allocated before, at the highest point of one run; None where nobody counts."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
