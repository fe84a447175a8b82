"""The rows of a comparison: one for each router, with means over seeds and paired differences to the baseline.

A router that lets a token read later ones has an easier task than the others in a causal model. Its row says so under
"apart" and has no differences; if it is the baseline, no row has.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.metrics import cost_over_seeds, difference_of, level_of
from holdfast.routing.grammar import split_options

COMPUTE_TOLERANCE = 0.005  # relative to the baseline's experts per token; a smaller difference does not count
Seeds = Mapping[int, dict[str, Any]]  # results by seed
Read = Callable[[dict[str, Any]], Mapping[str, Any]]  # from a result to a score: "figure", "per_example"
APART = "sees later tokens"

ERRORS = ("figure", "top5")  # of a curve
METRICS = {  # key of a row: the keys of its value in a result
    "clean": ("clean", "figure"),
    "attacked": ("attacked", "figure"),
    "attacked, clean": ("attacked", "clean"),
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
    rows.sort(key=lambda row: "apart" in row and row["router"] != baseline)
    for row in rows if theirs else []:
        matched = _equal_compute_baseline(row, rows)
        if matched and (found := _difference(by_router[matched], by_router[row["router"]], _score("clean"))):
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


def _row(name: str, mine: Seeds, theirs: Seeds, is_baseline: bool) -> dict[str, Any]:
    first = next(iter(mine.values()))
    row: dict[str, Any] = {"router": name, "seeds": sorted(mine), "parameters": first["parameters"]}
    if any(map(_is_apart, mine.values())):
        row["apart"] = APART
    row["experts_per_token"] = statistics.fmean(_experts_per_token(result) for result in mine.values())
    for metric, (text, key) in METRICS.items():
        if all(key in result[text] for result in mine.values()):
            row[metric] = _mean([result[text][key] for result in mine.values()])
    row["examples"] = {text: first[text].get("examples") for text in ("clean", "attacked")}
    others = {} if is_baseline else theirs
    for text in ("clean", "attacked"):
        row |= _named(f"{text}, difference", _difference(others, mine, _score(text)))
    row["scores"] = _scores(mine, others)
    row |= (
        _named("curves", _curves(mine)) | _named("metrics", _metrics(mine, others)) | _named("shifts", _shifts(mine, others))
    )
    costs = [result["attacked"].get("cost") or {} for result in mine.values()]
    if (cost := cost_over_seeds(costs)) is not None:
        row["cost"] = cost.summary()
        row |= _named("cost, difference", _difference(others, mine, lambda result: result["attacked"].get("cost") or {}))
    if others and "apart" not in row:
        usual = statistics.fmean(_experts_per_token(result) for result in theirs.values())
        row["more_compute"] = row["experts_per_token"] / usual - 1
    return row


def _named(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {name: value} if value else {}


def _is_apart(result: dict[str, Any]) -> bool:
    return bool(result.get("sees_later_tokens"))


def _metrics(mine: Seeds, theirs: Seeds) -> dict[str, dict[str, Any]]:
    """Return the further metrics of a router: {"accuracy": {"clean": ..., "clean, difference": ..., "attacked": ...}}.

    "attacked, clean" is of the attacked examples without the attack, if those are not all test examples.
    """
    names = list(dict.fromkeys(name for result in mine.values() for name in result["clean"].get("metrics", {})))
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, row in found.items():
        for text in ("clean", "attacked"):
            read = _metric_reader(text, name)
            row[text] = _mean([read(result).get("figure") for result in mine.values()])
            row |= _named(f"{text}, difference", _difference(theirs, mine, read))
        if all("clean_metrics" in result["attacked"] for result in mine.values()):
            row["attacked, clean"] = _mean([result["attacked"]["clean_metrics"].get(name) for result in mine.values()])
    return found


def _shifts(mine: Seeds, theirs: Seeds) -> dict[str, dict[str, Any]]:
    """Return a router's results on shifted test sets: {"imagenet-a": {"measure", "better", "figure", "difference"}}."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in next(iter(mine.values())).get("shifts", {}).items():
        read = _reader("shifts", name)
        figure = _mean([read(result).get("figure") for result in mine.values()])
        found[name] = {"measure": one["measure"], "better": one["better"], "figure": figure}
        found[name] |= _named("difference", _difference(theirs, mine, read))
    return found


def _scores(mine: Seeds, theirs: Seeds) -> dict[str, dict[str, Any]]:
    """Return the figure on clean data and under every attack, with its interval and its paired difference.

    "clean" of an attack is the figure of the attacked examples without it.
    """
    names = list(dict.fromkeys(name for result in mine.values() for name in result.get("trials", {})))
    found = {}
    for name, read in {"clean": _score("clean"), **{name: _reader("trials", name) for name in names}}.items():
        scores = [read(result) for result in mine.values()]
        found[name] = _over_seeds(scores) | _named("difference", _difference(theirs, mine, read))
        if all("clean" in score for score in scores):
            found[name]["clean"] = _mean([score["clean"] for score in scores])
    return found


def _curves(mine: Seeds) -> dict[str, dict[str, Any]]:
    """Return the curves of attacks, with intervals: {"PGD": {"budgets": ..., "figure": ...}}."""
    results = list(mine.values())
    found: dict[str, dict[str, Any]] = {}
    for name, first in results[0].get("curves", {}).items():
        same = [curve for result in results if (curve := result.get("curves", {}).get(name))]
        if len(same) < len(results) or any(curve["budgets"] != first["budgets"] for curve in same):
            continue
        points = range(len(first["budgets"]))
        errors = {key: [_over_seeds([_point(curve, key, place) for curve in same]) for place in points] for key in ERRORS}
        found[name] = {"budgets": first["budgets"], "examples": first["examples"], **errors}
    return found


def _point(curve: Mapping[str, Any], key: str, place: int) -> dict[str, Any]:
    """Return one point of a curve as a score."""
    return {"figure": curve[key][place], "per_example": curve.get("per_example", {}).get(key, {place: None})[place]}


def _over_seeds(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean over seeds and its 95% interval; None where a seed has no value."""
    level = level_of(scores)
    keys = ("mean", "low", "high", "over")
    return dict.fromkeys(keys) if level is None else {key: getattr(level, key) for key in keys}


def _score(text: str) -> Read:
    return lambda result: result[text]  # type: ignore[no-any-return]


def _reader(group: str, name: str) -> Read:
    return lambda result: result.get(group, {}).get(name, {})  # type: ignore[no-any-return]


def _metric_reader(text: str, name: str) -> Read:
    return lambda result: {"figure": result[text].get("metrics", {}).get(name)}


def _difference(theirs: Seeds, mine: Seeds, read: Read) -> dict[str, Any]:
    """Return the paired difference over common seeds; empty if there are none, if a run has no value, or if one is apart."""
    shared = sorted(mine.keys() & theirs.keys())
    if any(_is_apart(seeds[seed]) for seeds in (theirs, mine) for seed in shared):
        return {}
    difference = difference_of(*([read(seeds[seed]) for seed in shared] for seeds in (theirs, mine)))
    return {} if difference is None else difference.summary()


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if len(numbers) == len(values) else None


def _experts_per_token(result: dict[str, Any]) -> float:
    return float(result["clean"]["routing"]["overall"]["experts_per_token"]["mean"])
