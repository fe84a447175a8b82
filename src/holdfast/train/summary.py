"""The rows of a comparison: one for each router, with means over seeds and paired differences to the baseline.

A router that lets a token read later ones has an easier task than the others in a causal model. Its row says so (`apart`)
and has no differences; if it is the baseline, no row has.

**Held-out domains** have a row for each router with the mean and the worst accuracy, with intervals over seeds. With a_d the
accuracy on domain d of the model that was trained on all others (one seed), the two figures of a seed are mean_d a_d and
min_d a_d. Only seeds for which every held-out domain has been trained are used. Accuracies are in percent. The domains have
images of their own. So with h_d the distance from a mean to an end of the interval of domain d over its images, that of the
mean over D domains is sqrt(sum_d h_d^2) / D, and for the worst domain the largest h_d is used.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.metrics import Difference, difference_of, level_of, paired
from holdfast.metrics.paired import over_examples
from holdfast.train.image_task import HELD_OUT
from holdfast.train.results import (
    COMPUTE_TOLERANCE,
    CurveRow,
    DomainRow,
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
Scores = Mapping[str, Mapping[str, Any]]  # of one seed, by held-out domain: "figure" is the error
OverDomains = tuple[Callable[[Sequence[float]], float], Callable[[Sequence[float]], float]]
# Of accuracies, and of distances to an end of the interval.
MEAN: OverDomains = (statistics.fmean, lambda distances: math.hypot(*distances) / len(distances))
WORST: OverDomains = (min, max)


def summarise(results: Sequence[Result], baseline: str) -> list[Row]:
    """Return a row for each router: means over seeds, and paired differences to the baseline with their 95% intervals.

    In a sweep there is a row for each router in each setting, and the baseline is the one of the same setting.

    Only seeds that both routers have are compared. A router that uses more experts per token than the baseline has a further
    difference, `equal_compute`, to the baseline with more experts (`smoe[k=3]`, or `matched_name`), if that was trained in
    the same way: plainly, or with the same braces.
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
            others = [one for one in rows if one.is_baseline_with_other_k(baseline) and one.training == row.training]
            enough = [one for one in others if one.experts_per_token >= needed]
            smallest = min(enough, key=lambda one: one.experts_per_token, default=None)
            if smallest and (found := _difference(by_router[smallest.router], by_router[row.router], _reader("clean"))):
                rows[place] = replace(row, equal_compute=EqualCompute(smallest.router, found))
    return rows


def _row(mine: Seeds, theirs: Seeds) -> Row:
    """Return the row of a router; `theirs` are the results of the baseline, empty for the baseline itself."""
    first, results = next(iter(mine.values())), list(mine.values())
    apart = APART if any(result.get("sees_later_tokens") for result in results) else None
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
        consistency=level_of([_reader("consistency")(result) for result in results]),
        consistency_difference=_difference(theirs, mine, _reader("consistency")),
        step_seconds=_mean(results, "origin", "step_seconds"),
        flops=_mean(results, "origin", "flops"),
        peak_bytes=_mean(results, "origin", "peak_bytes"),
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
    if any(seeds[seed].get("sees_later_tokens") for seeds in (theirs, mine) for seed in shared):
        return None
    return difference_of(*([read(seeds[seed]) for seed in shared] for seeds in (theirs, mine)))


def _mean(results: Sequence[Result], *keys: str) -> float | None:
    """Return the mean of the values at these keys; None if one of the results has none."""
    values = [_at(result, *keys) for result in results]
    return None if None in values else statistics.fmean(values)


def _experts_per_token(results: Sequence[Result]) -> float:
    return statistics.fmean(result["clean"]["routing"]["overall"]["experts_per_token"]["mean"] for result in results)


def summarise_domains(results: Sequence[Mapping[str, Any]], baseline: str) -> list[DomainRow]:
    """Return a row for each router, in each setting of a sweep; empty unless at least two domains were held out.

    A row has the accuracy on each domain, their mean and their worst, each over seeds with a 95% interval, and the paired
    differences of the mean and the worst to the baseline of the same setting.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if HELD_OUT in result.get("settings", {}):
            groups.setdefault(json.dumps(_without_domain(result), sort_keys=True), []).append(result)
    return [row for group in groups.values() for row in _rows(group, baseline)]


def _without_domain(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of a result without its held-out domain."""
    return {key: value for key, value in result["settings"].items() if key != HELD_OUT}


def _rows(results: Sequence[Mapping[str, Any]], baseline: str) -> Iterator[DomainRow]:
    domains = list(dict.fromkeys(result["settings"][HELD_OUT] for result in results))
    if len(domains) < 2:
        return
    routers: dict[str, dict[int, dict[str, Any]]] = {}
    for result in results:
        seeds = routers.setdefault(result["router"], {})
        seeds.setdefault(result["seed"], {})[result["settings"][HELD_OUT]] = result["clean"]
    complete = {
        router: {seed: scores for seed, scores in sorted(seeds.items()) if len(scores) == len(domains)}
        for router, seeds in routers.items()
    }
    for router, mine in complete.items():
        theirs = {} if router == baseline else complete.get(baseline, {})
        alone = [[scores] for scores in mine.values()]
        pairs = [[theirs[seed], mine[seed]] for seed in mine if seed in theirs]
        if mine:
            yield DomainRow(
                router=router,
                settings=_without_domain(results[0]),
                seeds=sorted(mine),
                accuracy={domain: _over_domains(alone, min, max, [domain]) for domain in domains},
                mean=_over_domains(alone, *MEAN, domains),
                mean_difference=_over_domains(pairs, *MEAN, domains) if pairs else None,
                worst=_over_domains(alone, *WORST, domains),
                worst_difference=_over_domains(pairs, *WORST, domains) if pairs else None,
            )


def _over_domains(
    seeds: Sequence[Sequence[Scores]],
    over: Callable[[Sequence[float]], float],
    distance: Callable[[Sequence[float]], float],
    domains: Sequence[str],
) -> Difference:
    """Return a figure of accuracies over domains; if each seed has two scores, the second minus the first."""
    accuracies = [[over([100 - scores[domain]["figure"] for domain in domains]) for scores in each] for each in seeds]
    baseline = [0.0 if len(each) == 1 else each[0] for each in accuracies]
    other = [each[-1] for each in accuracies]
    mean, bounds = statistics.fmean(other) - statistics.fmean(baseline), (-100.0 if len(seeds[0]) == 2 else 0.0, 100.0)
    ends = []  # how far the interval over examples of each error, or of a difference, reaches below and above its mean
    for domain in domains:
        routers = [[scores[domain] for scores in router] for router in zip(*seeds, strict=True)]
        examples, _ = over_examples(*routers)
        if examples is None:
            return paired(baseline, other, bounds=bounds)
        means = [statistics.fmean(score["figure"] for score in scores) for scores in routers]
        error = means[-1] - (means[0] if len(means) == 2 else 0.0)
        ends.append((error - examples[0], examples[1] - error))
    below, above = (distance([end[side] for end in ends]) for side in (1, 0))  # a low error is a high accuracy
    return paired(baseline, other, examples=(mean - below, mean + above), bounds=bounds)
