"""Time several contestants in turns, so that a machine that becomes slower affects them all equally."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

BUSY = 10_000_000  # cycles that keep a GPU busy while the host queues work: about 6 ms


def time_in_turns(
    contestants: Mapping[str, Callable[[], object]], device: str, rounds: int, queued: int = 1
) -> dict[str, list[float]]:
    """Return the milliseconds of each contestant in each round, after two rounds of warm-up.

    `queued` runs are started without waiting for each other, and the time is that of one run.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, run in contestants.items():
            elapsed = _time(run, device, queued)
            if turn >= 2:
                times[name].append(elapsed)
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def waits(run: Callable[[], object]) -> bool:
    """Return whether the host waits for the GPU in `run`, so that no CUDA graph can record it."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The GPU's part of `run`, as a CUDA graph to replay: without what Python and the launches cost."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph.replay


def _time(run: Callable[[], object], device: str, queued: int) -> float:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if queued > 1:
            torch.cuda._sleep(BUSY)  # the queue fills up meanwhile
        start.record()
        for _ in range(queued):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / queued
    begin = time.perf_counter()
    for _ in range(queued):
        run()
    return (time.perf_counter() - begin) * 1e3 / queued
