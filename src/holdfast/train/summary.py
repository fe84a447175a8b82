"""The rows of a comparison: one for each router, with means over seeds and paired differences to the baseline.

A router that lets a token read later ones has an easier task than the others in a causal model. Its row says so (`apart`)
and has no differences; if it is the baseline, no row has.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.metrics import Difference, difference_of, level_of
from holdfast.train.results import (
    COMPUTE_TOLERANCE,
    CurveRow,
    EqualCompute,
    MetricRow,
    Row,
    RowCost,
    ScoreRow,
    ShiftRow,
)

Result = Mapping[str, Any]  # of a cell, as its result.json has it
Seeds = Mapping[int, Result]  # by seed
Read = Callable[[Result], Mapping[str, Any]]  # from a result to a score: "figure", "per_example"
APART = "sees later tokens"


def summarise(results: Sequence[Result], baseline: str) -> list[Row]:
    """Return a row for each router: means over seeds, and paired differences to the baseline with their 95% intervals.

    In a sweep there is a row for each router in each setting, and the baseline is the one of the same setting.

    Only seeds that both routers have are compared. A router that uses more experts per token than the baseline has a further
    difference, `equal_compute`, to the baseline with more experts (`smoe[k=3]`, or `matched_name`), if that was trained.
    """
    routers = list(dict.fromkeys(result["router"] for result in results))
    if baseline not in routers:
        raise ValueError(f"there is no result of the baseline {baseline}; the routers are {', '.join(routers)}.")
    settings: list[dict[str, Any]] = []
    for result in results:
        if (setting := result.get("settings", {})) not in settings:
            settings.append(setting)
    return [
        row
        for setting in settings
        for row in _rows_of_setting([result for result in results if result.get("settings", {}) == setting], baseline)
    ]


def _rows_of_setting(results: Sequence[Result], baseline: str) -> list[Row]:
    """Return the rows of one setting; without differences if the baseline has not been trained in it."""
    by_router: dict[str, dict[int, Result]] = {}
    for result in results:
        by_router.setdefault(result["router"], {})[result["seed"]] = result
    theirs = by_router.get(baseline, {})
    rows = [_row(seeds, {} if name == baseline else theirs) for name, seeds in by_router.items()]
    rows.sort(key=lambda row: row.apart is not None and row.router != baseline)
    for place, row in enumerate(rows if theirs else []):
        if row.uses_more_compute and not row.is_baseline_with_other_k(baseline):
            needed = row.experts_per_token - COMPUTE_TOLERANCE
            enough = [one for one in rows if one.is_baseline_with_other_k(baseline) and one.experts_per_token >= needed]
            smallest = min(enough, key=lambda one: one.experts_per_token, default=None)
            if smallest and (found := _difference(by_router[smallest.router], by_router[row.router], _reader("clean"))):
                rows[place] = replace(row, equal_compute=EqualCompute(smallest.router, found))
    return rows


def _row(mine: Seeds, theirs: Seeds) -> Row:
    """Return the row of a router; `theirs` are the results of the baseline, empty for the baseline itself."""
    first, results = next(iter(mine.values())), list(mine.values())
    apart = APART if any(map(_is_apart, results)) else None
    experts = _experts_per_token(results)
    cost = level_of([_cost(result) for result in results])
    names = dict.fromkeys(name for result in results for name in result["clean"].get("metrics", {}))
    return Row(
        router=first["router"],
        settings=first.get("settings", {}),
        seeds=sorted(mine),
        parameters=first["parameters"],
        apart=apart,
        experts_per_token=experts,
        more_compute=experts / _experts_per_token(list(theirs.values())) - 1 if theirs and apart is None else 0.0,
        examples={text: first[text].get("examples") for text in ("clean", "attacked")},
        clean=_mean(results, "clean", "figure"),
        clean_difference=_difference(theirs, mine, _reader("clean")),
        attacked=_mean(results, "attacked", "figure"),
        attacked_difference=_difference(theirs, mine, _reader("attacked")),
        attacked_clean=_mean(results, "attacked", "clean"),
        clean_kept=_mean(results, "clean", "figure_of_kept"),
        attacked_kept=_mean(results, "attacked", "figure_of_kept"),
        clean_bits_per_byte=_mean(results, "clean", "bits_per_byte"),
        attacked_bits_per_byte=_mean(results, "attacked", "bits_per_byte"),
        predictions_changed=_mean(results, "attacked", "predictions_changed"),
        cost=None if cost is None else RowCost(**vars(cost)),
        cost_difference=None if cost is None else _difference(theirs, mine, _cost),
        metrics={name: _metric(mine, theirs, name) for name in names},
        shifts={
            name: ShiftRow(
                shift["measure"],
                shift["better"],
                _mean(results, "shifts", name, "figure"),
                _difference(theirs, mine, _reader("shifts", name)),
            )
            for name, shift in first.get("shifts", {}).items()
        },
        scores=_scores(mine, theirs),
        curves=_curves(results),
    )


def _is_apart(result: Result) -> bool:
    return bool(result.get("sees_later_tokens"))


def _cost(result: Result) -> Mapping[str, Any]:
    return result["attacked"].get("cost") or {}


def _metric(mine: Seeds, theirs: Seeds, name: str) -> MetricRow:
    def difference(text: str) -> Difference | None:
        return _difference(theirs, mine, lambda result: {"figure": _at(result, text, "metrics", name)})

    results = list(mine.values())
    places = (("clean", "metrics"), ("attacked", "metrics"), ("attacked", "clean_metrics"))
    clean, attacked, attacked_clean = (_mean(results, *place, name) for place in places)
    return MetricRow(clean, attacked, attacked_clean, difference("clean"), difference("attacked"))


def _scores(mine: Seeds, theirs: Seeds) -> dict[str, ScoreRow]:
    """Return the figure on clean data and under every attack, with its interval and its paired difference."""
    results = list(mine.values())
    trials = dict.fromkeys(name for result in results for name in result.get("trials", {}))
    places = {"clean": ("clean",), **{name: ("trials", name) for name in trials}}
    return {
        name: ScoreRow(
            level_of([_reader(*place)(result) for result in results]),
            _difference(theirs, mine, _reader(*place)),
            _mean(results, *place, "clean"),
        )
        for name, place in places.items()
    }


def _curves(results: Sequence[Result]) -> dict[str, CurveRow]:
    """Return the curves of attacks, with intervals, that all seeds have with the same budgets."""
    found = {}
    for name, first in results[0].get("curves", {}).items():
        curves = [result.get("curves", {}).get(name, {}) for result in results]
        if all(curve.get("budgets") == first["budgets"] for curve in curves):
            figure, top5 = (
                [
                    level_of([{"figure": curve[key][at], "per_example": curve["per_example"][key][at]} for curve in curves])
                    for at in range(len(first["budgets"]))
                ]
                for key in ("figure", "top5")
            )
            found[name] = CurveRow(first["budgets"], first["examples"], figure, top5)
    return found


def _at(result: Result, *keys: str) -> Any:
    """Return the value at these keys; None if there is none."""
    value: Any = result
    for key in keys:
        value = None if value is None else value.get(key)
    return value


def _reader(*keys: str) -> Read:
    return lambda result: _at(result, *keys) or {}


def _difference(theirs: Seeds, mine: Seeds, read: Read) -> Difference | None:
    """Return the paired difference over common seeds; None if there are none, if a run has no value, or if one is apart."""
    shared = sorted(mine.keys() & theirs.keys())
    if any(_is_apart(seeds[seed]) for seeds in (theirs, mine) for seed in shared):
        return None
    return difference_of(*([read(seeds[seed]) for seed in shared] for seeds in (theirs, mine)))


def _mean(results: Sequence[Result], *keys: str) -> float | None:
    """Return the mean of the values at these keys; None if one of the results has none."""
    values = [_at(result, *keys) for result in results]
    return None if None in values else statistics.fmean(values)


def _experts_per_token(results: Sequence[Result]) -> float:
    return statistics.fmean(result["clean"]["routing"]["overall"]["experts_per_token"]["mean"] for result in results)
