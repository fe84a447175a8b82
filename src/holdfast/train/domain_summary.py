"""Routers over held-out domains: the mean and the worst accuracy, with intervals over seeds.

With a_d the accuracy on domain d of the model that was trained on all others (one seed), the two figures of a seed are
mean_d a_d and min_d a_d. Only seeds for which every held-out domain has been trained are used. Accuracies are in percent.

The domains have images of their own. So with h_d the distance from a mean to an end of the interval of domain d over its
images, that of the mean over D domains is sqrt(sum_d h_d^2) / D, and for the worst domain the largest h_d is used.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.metrics import Difference, paired
from holdfast.metrics.paired import over_examples
from holdfast.train.image_task import HELD_OUT
from holdfast.train.results import DomainRow

Scores = Mapping[str, Mapping[str, Any]]  # of one seed, by held-out domain: "figure" is the error

OverDomains = tuple[Callable[[Sequence[float]], float], Callable[[Sequence[float]], float]]
# Of accuracies, and of distances to an end of the interval.
MEAN: OverDomains = (statistics.fmean, lambda distances: math.hypot(*distances) / len(distances))
WORST: OverDomains = (min, max)


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
