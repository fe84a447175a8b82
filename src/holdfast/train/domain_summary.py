"""Routers over held-out domains: the mean and the worst accuracy, with intervals over seeds.

With a_d the accuracy on domain d of the model that was trained on all others (one seed), the two figures of a seed are
mean_d a_d and min_d a_d. Only seeds for which every held-out domain has been trained are used. Accuracies are in percent.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.metrics import paired
from holdfast.train.domain_task import HELD_OUT

Accuracies = Mapping[str, float]  # of one seed, by held-out domain

OVER_DOMAINS: dict[str, Callable[[Accuracies], float]] = {
    "mean": lambda found: statistics.fmean(found.values()),
    "worst": lambda found: min(found.values()),
}


def summarise_domains(results: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Return a row for each router, in each setting of a sweep; empty unless at least two domains were held out.

    A row has the accuracy on each domain, their mean and their worst, each over seeds with a 95% interval, and the paired
    differences of the mean and the worst to the baseline of the same setting.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if HELD_OUT in result.get("settings", {}):
            groups.setdefault(json.dumps(_others(result), sort_keys=True), []).append(result)
    return [row for group in groups.values() for row in _rows(group, baseline)]


def _others(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of a result without its held-out domain."""
    return {key: value for key, value in result["settings"].items() if key != HELD_OUT}


def _rows(results: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    domains = list(dict.fromkeys(result["settings"][HELD_OUT] for result in results))
    if len(domains) < 2:
        return []
    found: dict[str, dict[int, dict[str, float]]] = {}
    for result in results:
        seeds = found.setdefault(result["router"], {})
        seeds.setdefault(result["seed"], {})[result["settings"][HELD_OUT]] = 100 - result["clean"]["figure"]
    complete = {
        router: {seed: each for seed, each in sorted(seeds.items()) if len(each) == len(domains)}
        for router, seeds in found.items()
    }
    setting = _others(results[0])
    return [
        {**_row(router, domains, seeds, complete.get(baseline, {}), router == baseline), **_if_any("settings", setting)}
        for router, seeds in complete.items()
        if seeds
    ]


def _row(
    router: str,
    domains: Sequence[str],
    mine: Mapping[int, Accuracies],
    theirs: Mapping[int, Accuracies],
    is_baseline: bool,
) -> dict[str, Any]:
    row: dict[str, Any] = {"router": router, "seeds": sorted(mine)}
    row["accuracy"] = {domain: _level([found[domain] for found in mine.values()]) for domain in domains}
    shared = [] if is_baseline else sorted(mine.keys() & theirs.keys())
    for name, over_domains in OVER_DOMAINS.items():
        row[name] = _level([over_domains(found) for found in mine.values()])
        if shared:
            before, after = ([over_domains(seeds[seed]) for seed in shared] for seeds in (theirs, mine))
            difference = paired(before, after)
            row[f"{name}, difference"] = {**asdict(difference), "words": difference.words}
    return row


def _level(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over seeds and its 95% interval (Student's t); one seed has no interval."""
    return asdict(paired([0.0] * len(values), values))


def _if_any(key: str, value: Any) -> dict[str, Any]:
    return {key: value} if value else {}
