"""Measure the peak memory of a run."""

from collections.abc import Callable

import torch


def peak_mib(run: Callable[[], object], device: str) -> float | None:
    """Return the peak of one run in MiB, beyond what was allocated before; None on a CPU, where it is not measured."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
