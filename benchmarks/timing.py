"""Time several contestants in one run, turn about, so that a machine that slows down slows them all."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def time_in_turns(contestants: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contestant in each round, after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, run in contestants.items():
            elapsed = _time_once(run, device)
            if turn >= 2:
                times[name].append(elapsed)
    return times


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def _time_once(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3
