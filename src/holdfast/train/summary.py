"""What a comparison found, in numbers that may be put side by side."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holdfast.metrics import paired

FIGURES = {  # a row's figure: where it is in a result
    "clean": ("clean", "figure"),
    "attacked": ("attacked", "figure"),
    "clean, kept": ("clean", "figure_of_kept"),
    "attacked, kept": ("attacked", "figure_of_kept"),
    "clean, bits per byte": ("clean", "bits_per_byte"),
    "attacked, bits per byte": ("attacked", "bits_per_byte"),
}


def summarise(results: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """A row for each router: means over seeds, and paired differences to the baseline with their 95% intervals.

    Only seeds that both have are compared. A router that uses more experts a token than the baseline says so.
    """
    by_router: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        by_router.setdefault(result["router"], {})[result["seed"]] = result
    if baseline not in by_router:
        raise ValueError(f"there is no result of the baseline {baseline}; the routers are {', '.join(by_router)}.")
    return [_row(name, seeds, by_router[baseline], name == baseline) for name, seeds in by_router.items()]


def _row(name: str, mine: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]], is_baseline: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"router": name, "seeds": sorted(mine), "parameters": next(iter(mine.values()))["parameters"]}
    row["experts_per_token"] = statistics.fmean(_experts(result) for result in mine.values())
    shared = sorted(mine.keys() & theirs.keys())
    for figure, (text, key) in FIGURES.items():
        if not all(key in result[text] for result in mine.values()):
            continue
        row[figure] = _mean([result[text][key] for result in mine.values()])
        if not is_baseline and shared:
            before, after = ([seeds[seed][text].get(key) for seed in shared] for seeds in (theirs, mine))
            if None not in (*before, *after):  # a run that broke has no figure
                difference = paired(before, after)
                row[f"{figure}, difference"] = {**asdict(difference), "words": difference.words}
    if not is_baseline:
        usual = statistics.fmean(_experts(result) for result in theirs.values())
        row["more_compute"] = row["experts_per_token"] / usual - 1
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if len(numbers) == len(values) else None


def _experts(result: dict[str, Any]) -> float:
    return float(result["clean"]["routing"]["overall"]["experts_per_token"]["mean"])
