"""A comparison in two sentences, the first about clean data and the second about attacked data."""

from collections.abc import Sequence

from holdfast.report.results import Difference, Measure, Results, Row


def verdict(results: Results) -> tuple[str, str]:
    """Says "no difference" where the interval holds 0, and that nothing can be said where there is no interval."""
    measure, baseline, others = results.run.measure, results.rows[0], results.rows[1:]
    if not others:
        return (
            f"Only {baseline.router} was trained, so there is nothing to compare it with.",
            f"Its {measure.noun} is {_level(baseline.clean, measure)} on clean data and "
            f"{_level(baseline.attacked, measure)} under attack.",
        )
    differences = [row.clean_difference for row in others] + [row.attacked_difference for row in others]
    if all(_interval(difference) is None for difference in differences):
        return (
            f"From one seed nothing can be said about whether a router differs from {baseline.router}.",
            "The figures below are those of single runs; train with 2 seeds or more to compare them.",
        )
    return (
        f"Against {baseline.router}, {_findings(results, [row.clean_difference for row in others], compute=True)}.",
        f"Under attack, {_findings(results, [row.attacked_difference for row in others])}.",
    )


def _findings(results: Results, differences: Sequence[Difference | None], *, compute: bool = False) -> str:
    """Those that changed the figure one by one, then those that did not, then those that cannot be judged."""
    baseline, others = results.rows[0], results.rows[1:]
    changed, same, unknown = [], [], []
    for row, difference in zip(others, differences, strict=True):
        interval = _interval(difference)
        if difference is None or difference.mean is None or interval is None:
            unknown.append(row.router)
        elif interval[0] <= 0 <= interval[1]:
            price = _price(row, baseline) if compute else ""
            same.append((f"{row.router} ({price})" if price else row.router, difference.seeds))
        else:
            price = _price(row, baseline) if compute else ""
            change = _change(row, difference.mean, interval, results.run.measure)
            changed.append(change + (f", using {price}" if price else ""))
    parts = changed
    for seeds in sorted({seeds for _, seeds in same}):
        names = [name for name, its_seeds in same if its_seeds == seeds]
        parts.append(f"{listed(names)} made no difference that {seeds} seeds can show")
    if unknown:
        parts.append(f"of {listed(unknown)} nothing can be said, from fewer than two seeds")
    return "; ".join(parts)


def _change(row: Row, mean: float, interval: tuple[float, float], measure: Measure) -> str:
    verb, (low, high) = ("lowered", (-interval[1], -interval[0])) if mean < 0 else ("raised", interval)
    # 3% less might be 3% of what it was
    unit = {"": "", "%": " percentage points"}.get(measure.unit, f" {measure.unit}")
    return f"{row.router} {verb} the {measure.noun} by {abs(mean):.3g}{unit} (95% interval {low:.3g} to {high:.3g})"


def _level(value: float | None, measure: Measure) -> str:
    unit = {"": "", "%": "%"}.get(measure.unit, f" {measure.unit}")
    return figure(value) + (unit if value is not None else "")


def _price(row: Row, baseline: Row) -> str:
    """Where a router does not use as many experts as the baseline; a gain for more work is no gain yet."""
    used, usual = figure(row.experts_per_token), figure(baseline.experts_per_token)
    return "" if used == usual else f"{used} experts a token instead of {usual}"


def _interval(difference: Difference | None) -> tuple[float, float] | None:
    if difference is None or difference.low is None or difference.high is None:
        return None
    return difference.low, difference.high


def listed(names: Sequence[str]) -> str:
    """a, b and c"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def figure(value: float | None, digits: int = 2) -> str:
    """A dash where there is no number."""
    return "\u2013" if value is None else f"{value:,.{digits}f}"
