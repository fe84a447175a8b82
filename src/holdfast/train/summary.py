"""What a comparison found, in numbers that may be put side by side."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.metrics import Cost, cost_over_seeds, paired

MORE = 0.005  # of the baseline's experts a token; less is no difference in compute
Seeds = Mapping[int, dict[str, Any]]  # results by seed

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
    rows = [_row(name, seeds, by_router[baseline], name == baseline) for name, seeds in by_router.items()]
    for row in rows:
        matched = _equal_compute(row, rows)
        if matched and (found := _difference(by_router[matched], by_router[row["router"]], _reader("clean", "figure"))):
            row["equal compute"] = {"router": matched, **found}
    return rows


def matched_name(baseline: str, k: int) -> str:
    """The name of the baseline with k experts a token, which routers that use more than the baseline are held against."""
    return f"{baseline}, top {k}"


def _equal_compute(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the baseline with as many experts a token as this router, or more, if it uses more than the plain baseline."""
    prefix = matched_name(rows[0]["router"], 0)[:-1]
    if not uses_more(row) or row["router"].startswith(prefix):
        return None
    enough = [
        other
        for other in rows
        if other["router"].startswith(prefix) and other["experts_per_token"] >= row["experts_per_token"] - MORE
    ]
    return min(enough, key=lambda other: other["experts_per_token"])["router"] if enough else None


def uses_more(row: dict[str, Any]) -> bool:
    """Whether a router uses more experts a token than the baseline."""
    return bool(row.get("more_compute", 0) > MORE)


def _row(name: str, mine: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]], is_baseline: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"router": name, "seeds": sorted(mine), "parameters": next(iter(mine.values()))["parameters"]}
    row["experts_per_token"] = statistics.fmean(_experts(result) for result in mine.values())
    for figure, (text, key) in FIGURES.items():
        if not all(key in result[text] for result in mine.values()):
            continue
        row[figure] = _mean([result[text][key] for result in mine.values()])
        if not is_baseline and (found := _difference(theirs, mine, _reader(text, key))):
            row[f"{figure}, difference"] = found
    costs = [cost for cost in map(_cost, mine.values()) if cost is not None]
    if len(costs) == len(mine):
        row["cost"] = cost_over_seeds(costs).summary()
        if not is_baseline and (found := _difference(theirs, mine, _mean_cost)):
            row["cost, difference"] = found
    if not is_baseline:
        usual = statistics.fmean(_experts(result) for result in theirs.values())
        row["more_compute"] = row["experts_per_token"] / usual - 1
    return row


def _difference(theirs: Seeds, mine: Seeds, read: Callable[[dict[str, Any]], float | None]) -> dict[str, Any]:
    """Of the seeds that both have; empty where there are none, or where a run broke and has no figure."""
    shared = sorted(mine.keys() & theirs.keys())
    before, after = ([read(seeds[seed]) for seed in shared] for seeds in (theirs, mine))
    if not shared or None in (*before, *after):
        return {}
    difference = paired(before, after)  # type: ignore[arg-type]
    return {**asdict(difference), "words": difference.words}


def _reader(text: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda result: result[text].get(key)


def _cost(result: dict[str, Any]) -> Cost | None:
    stored = result["attacked"].get("cost")
    return None if stored is None or stored["mean"] is None else Cost(stored["mean"], stored["low"], stored["high"])


def _mean_cost(result: dict[str, Any]) -> float | None:
    cost = _cost(result)
    return None if cost is None else cost.mean


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if len(numbers) == len(values) else None


def _experts(result: dict[str, Any]) -> float:
    return float(result["clean"]["routing"]["overall"]["experts_per_token"]["mean"])
