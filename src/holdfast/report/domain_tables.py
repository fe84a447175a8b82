"""What a page shows of held-out domains: the mean and the worst accuracy of each router, and a verdict about them."""

from collections.abc import Iterator

from holdfast.metrics.paired import FEWEST_SEEDS
from holdfast.report.page_shell import decimal, listed
from holdfast.report.stored_comparison import EVERYTHING, Difference, DomainRow, OverSeeds, Results
from holdfast.routing.grammar import written_pairs

HELD_OUT = "data.held_out"  # the key of a setting


def domain_table(results: Results) -> tuple[list[str], list[dict[str, str]]]:
    """Return the routers, and for each the accuracy on every held-out domain, the mean and the worst, with differences."""
    rows = results.domains
    domains = list(dict.fromkeys(domain for row in rows for domain in row.accuracy))
    return [_label(row) for row in rows], [dict(_columns(row, domains, results)) for row in rows]


def _label(row: DomainRow) -> str:
    return ", ".join(filter(None, [row.router, written_pairs(row.settings)]))


def _columns(row: DomainRow, domains: list[str], results: Results) -> Iterator[tuple[str, str]]:
    yield "seeds", str(len(row.seeds))
    for domain in domains:
        level = row.accuracy.get(domain)
        yield f"{domain}, %", decimal(level.mean if level else None)
    for name, level, difference in (("mean", row.mean, row.mean_difference), ("worst", row.worst, row.worst_difference)):
        yield f"{name}, %", _with_interval(level)
        yield f"{name}, difference", _difference(row, difference, results)


def _with_interval(level: OverSeeds) -> str:
    if level.low is None or level.high is None:
        return decimal(level.mean)
    only = "" if level.over == EVERYTHING else f", {level.over}"
    return f"{decimal(level.mean)} (95% interval {decimal(level.low)} to {decimal(level.high)}{only})"


def _difference(row: DomainRow, difference: Difference | None, results: Results) -> str:
    if row.router == results.rows[0].router:
        return "baseline"
    return difference.words if difference else "no seed in common"


def domain_caption(results: Results) -> str:
    """Return the caption of the table."""
    return (
        "Accuracy on the whole held-out domain of models that were trained on the others, in percent; higher is better. "
        "Mean and worst are over the held-out domains of each seed, then means over the seeds that have all of them, with "
        f"differences to {results.rows[0].router}, paired by seed and by image. From {FEWEST_SEEDS} seeds on, 95% intervals "
        "cover seeds and images."
    )


def domain_verdict(results: Results) -> tuple[str, ...]:
    """Return the comparison in a few sentences: the mean and the worst accuracy, each against the baseline."""
    rows, baseline = results.domains, results.rows[0].router
    domains = list(dict.fromkeys(domain for row in rows for domain in row.accuracy))
    found = [f"{len(domains)} domains, {listed(domains)}, were held out in turn; accuracies are on the held-out domains."]
    own = next((row for row in rows if row.router == baseline), None)
    if own is not None:
        level = f"{decimal(own.mean.mean)}%, its worst {decimal(own.worst.mean)}%"
        found.append(f"The mean accuracy of {baseline} is {level}.")
    others = [row for row in rows if row.router != baseline]
    if not others:
        return (*found, f"Only {baseline} was trained, so there is nothing to compare it with.")
    if reason := results.no_claim([one for row in others for one in (row.mean_difference, row.worst_difference)]):
        return (*found, *reason)
    means = "; ".join(_finding(row.router, row.mean_difference) for row in others)
    worsts = "; ".join(_finding(row.router, row.worst_difference) for row in others)
    return (*found, f"Against {baseline}, in the mean accuracy: {means}.", f"In the worst accuracy: {worsts}.")


def _finding(router: str, difference: Difference | None) -> str:
    if difference is None or difference.kind == "unknown":
        return f"{router} cannot be judged from fewer than {FEWEST_SEEDS} seeds"
    if difference.kind == "same":
        would = f"they would show one above {difference.shows:.2g} points"
        return f"{router} made no difference that {difference.seeds} seeds can show ({would})"
    verb, size = difference.change(" percentage points")
    return f"{router} {verb} it by {size}"
