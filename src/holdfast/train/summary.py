"""The rows of a comparison: one for each router, with means over seeds and paired differences to the baseline."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.metrics import Cost, cost_over_seeds, paired
from holdfast.routing.grammar import split_options

COMPUTE_TOLERANCE = 0.005  # relative to the baseline's experts per token; a smaller difference does not count
Seeds = Mapping[int, dict[str, Any]]  # results by seed

ERRORS = ("figure", "top5")  # of a curve
METRICS = {  # key of a row: the keys of its value in a result
    "clean": ("clean", "figure"),
    "attacked": ("attacked", "figure"),
    "clean, kept": ("clean", "figure_of_kept"),
    "attacked, kept": ("attacked", "figure_of_kept"),
    "clean, bits per byte": ("clean", "bits_per_byte"),
    "attacked, bits per byte": ("attacked", "bits_per_byte"),
    "predictions changed": ("attacked", "predictions_changed"),
}


def summarise(results: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Return a row for each router: means over seeds, and paired differences to the baseline with their 95% intervals.

    In a sweep there is a row for each router in each setting, and the baseline is the one of the same setting.

    Only seeds that both routers have are compared. A router that uses more experts per token than the baseline has a further
    difference, "equal compute", to the baseline with more experts (`smoe[k=3]`, or `matched_name`), if that was trained.
    """
    routers = list(dict.fromkeys(result["router"] for result in results))
    if baseline not in routers:
        raise ValueError(f"there is no result of the baseline {baseline}; the routers are {', '.join(routers)}.")
    settings: list[dict[str, Any]] = []
    for result in results:
        if (setting := result.get("settings", {})) not in settings:
            settings.append(setting)
    return [
        {**row, **({"settings": setting} if setting else {})}
        for setting in settings
        for row in _rows_of_setting([result for result in results if result.get("settings", {}) == setting], baseline)
    ]


def _rows_of_setting(results: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Return the rows of one setting; without differences if the baseline has not been trained in it."""
    by_router: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        by_router.setdefault(result["router"], {})[result["seed"]] = result
    theirs = by_router.get(baseline, {})
    rows = [_row(name, seeds, theirs, name == baseline) for name, seeds in by_router.items()]
    for row in rows if theirs else []:
        matched = _equal_compute_baseline(row, rows)
        if matched and (found := _difference(by_router[matched], by_router[row["router"]], _reader("clean", "figure"))):
            row["equal compute"] = {"router": matched, **found}
    return rows


def matched_name(baseline: str, k: int) -> str:
    """Return the name of the baseline with k experts per token, the equal-compute baseline of routers that use more."""
    return f"{baseline}, top {k}"


def _equal_compute_baseline(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str | None:
    """Return the smallest baseline with at least as many experts per token, if the router uses more than the baseline."""
    if not uses_more_compute(row) or is_baseline_with_other_k(row, rows[0]):
        return None
    needed = row["experts_per_token"] - COMPUTE_TOLERANCE
    enough = [other for other in rows if is_baseline_with_other_k(other, rows[0]) and other["experts_per_token"] >= needed]
    return min(enough, key=lambda other: other["experts_per_token"])["router"] if enough else None


def is_baseline_with_other_k(row: dict[str, Any], baseline: dict[str, Any]) -> bool:
    """Return whether a row is the baseline with another number of experts per token: `smoe[k=3]`, or a `matched_name`."""
    name, usual = row["router"], baseline["router"]
    if name.startswith(matched_name(usual, 0)[:-1]):
        return True
    try:
        mine, theirs = (split_options(router) for router in (name, usual))
    except ValueError:  # names with layers
        return False
    for _, options in (mine, theirs):
        options.pop("k", None)
    return bool(name != usual and mine == theirs)


def uses_more_compute(row: dict[str, Any]) -> bool:
    """Return whether a router uses more experts per token than the baseline."""
    return bool(row.get("more_compute", 0) > COMPUTE_TOLERANCE)


def _row(name: str, mine: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]], is_baseline: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"router": name, "seeds": sorted(mine), "parameters": next(iter(mine.values()))["parameters"]}
    row["experts_per_token"] = statistics.fmean(_experts_per_token(result) for result in mine.values())
    for metric, (text, key) in METRICS.items():
        if not all(key in result[text] for result in mine.values()):
            continue
        row[metric] = _mean([result[text][key] for result in mine.values()])
        if not is_baseline and (found := _difference(theirs, mine, _reader(text, key))):
            row[f"{metric}, difference"] = found
    row["scores"] = _scores(mine, theirs, is_baseline)
    if curves := _curves(mine):
        row["curves"] = curves
    if metrics := _metrics(mine, theirs, is_baseline):
        row["metrics"] = metrics
    if shifts := _shifts(mine, theirs, is_baseline):
        row["shifts"] = shifts
    costs = [cost for cost in map(_cost, mine.values()) if cost is not None]
    if len(costs) == len(mine):
        row["cost"] = cost_over_seeds(costs).summary()
        if not is_baseline and (found := _difference(theirs, mine, _mean_cost)):
            row["cost, difference"] = found
    if not is_baseline and theirs:
        usual = statistics.fmean(_experts_per_token(result) for result in theirs.values())
        row["more_compute"] = row["experts_per_token"] / usual - 1
    return row


def _metrics(mine: Seeds, theirs: Seeds, is_baseline: bool) -> dict[str, dict[str, Any]]:
    """Return the further metrics of a router: {"accuracy": {"clean": ..., "clean, difference": ..., "attacked": ...}}."""
    names = list(dict.fromkeys(name for result in mine.values() for name in result["clean"].get("metrics", {})))
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, row in found.items():
        for text in ("clean", "attacked"):
            read = _metric_reader(text, name)
            row[text] = _mean([read(result) for result in mine.values()])
            if not is_baseline and (difference := _difference(theirs, mine, read)):
                row[f"{text}, difference"] = difference
    return found


def _shifts(mine: Seeds, theirs: Seeds, is_baseline: bool) -> dict[str, dict[str, Any]]:
    """Return a router's results on shifted test sets: {"imagenet-a": {"measure", "better", "figure", "difference"}}."""
    first = next(iter(mine.values())).get("shifts", {})
    found: dict[str, dict[str, Any]] = {}
    for name, one in first.items():
        read = _shift_reader(name)
        found[name] = {"measure": one["measure"], "better": one["better"], "figure": _mean([*map(read, mine.values())])}
        if not is_baseline and (difference := _difference(theirs, mine, read)):
            found[name]["difference"] = difference
    return found


def _shift_reader(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda result: result.get("shifts", {}).get(name, {}).get("figure")


def _scores(mine: Seeds, theirs: Seeds, is_baseline: bool) -> dict[str, dict[str, Any]]:
    """Return the figure on clean data and under every attack, with its interval over seeds and its paired difference."""
    names = list(dict.fromkeys(name for result in mine.values() for name in result.get("trials", {})))
    readers = {"clean": _reader("clean", "figure"), **{name: _trial_reader(name) for name in names}}
    found = {}
    for name, read in readers.items():
        found[name] = _over_seeds([read(result) for result in mine.values()])
        if not is_baseline and (difference := _difference(theirs, mine, read)):
            found[name]["difference"] = difference
    return found


def _curves(mine: Seeds) -> dict[str, dict[str, Any]]:
    """Return the curves of attacks, with intervals over seeds: {"PGD": {"budgets": ..., "figure": ...}}."""
    results = list(mine.values())
    found: dict[str, dict[str, Any]] = {}
    for name, first in results[0].get("curves", {}).items():
        same = [curve for result in results if (curve := result.get("curves", {}).get(name))]
        if len(same) < len(results) or any(curve["budgets"] != first["budgets"] for curve in same):
            continue
        errors = {key: [_over_seeds(values) for values in zip(*(one[key] for one in same), strict=True)] for key in ERRORS}
        found[name] = {"budgets": first["budgets"], "examples": first["examples"], **errors}
    return found


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the mean over seeds and its 95% interval; None where a seed has no value, and no interval for one seed."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return {"mean": None, "low": None, "high": None}
    found = paired([0.0] * len(numbers), numbers)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _trial_reader(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda result: result.get("trials", {}).get(name, {}).get("figure")


def _metric_reader(text: str, name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda result: result[text].get("metrics", {}).get(name)


def _difference(theirs: Seeds, mine: Seeds, read: Callable[[dict[str, Any]], float | None]) -> dict[str, Any]:
    """Return the paired difference over common seeds; empty if there are none, or if a run has no value."""
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


def _experts_per_token(result: dict[str, Any]) -> float:
    return float(result["clean"]["routing"]["overall"]["experts_per_token"]["mean"])
