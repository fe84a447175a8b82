"""A comparison in a few sentences: about clean data, about attacked data, and what the attack costs."""

import math
from collections.abc import Sequence

from holdfast.report.stored_comparison import Difference, Measure, Results, Row


def verdict(results: Results) -> tuple[str, ...]:
    """Says "no difference" where the interval holds 0, and that nothing can be said where there is no interval."""
    measure, baseline, others = results.run.measure, results.rows[0], results.rows[1:]
    if not others:
        first = (
            f"Only {baseline.router} was trained, so there is nothing to compare it with.",
            f"Its {measure.noun} is {_level(baseline.clean, measure)} on clean data and "
            f"{_level(baseline.attacked, measure)} under attack.",
        )
        return first + cost_sentences(results)
    differences = [row.clean_difference for row in others] + [row.attacked_difference for row in others]
    if all(_interval(difference) is None for difference in differences):
        first = (
            f"From one seed nothing can be said about whether a router differs from {baseline.router}.",
            "The figures below are those of single runs; train with 2 seeds or more to compare them.",
        )
        return first + cost_sentences(results)
    return (
        f"Against {baseline.router}, {_findings(results, [row.clean_difference for row in others], compute=True)}.",
        f"Under attack, {_findings(results, [row.attacked_difference for row in others])}.",
        *cost_sentences(results),
    )


def cost_sentences(results: Results) -> tuple[str, ...]:
    """What the attack costs each router on the words that it left alone; empty where that was not measured."""
    costs = {row.router: row.cost for row in results.rows if row.cost is not None and row.cost.mean is not None}
    if not costs:
        return ()
    certain = {router: rise(cost.mean) for router, cost in costs.items() if cost.certain and cost.mean is not None}
    unseen = [router for router in costs if router not in certain]
    found = []
    if len(certain) > 1 and not unseen:
        least, most = min(certain.values()), max(certain.values())
        found.append(
            f"On the words it left alone, the attack costs every router something: their perplexity rises by {least:.2f}% "
            f"to {most:.2f}%, and no 95% interval holds 0."
        )
    elif certain:
        each = listed([f"{router} {percent:.2f}%" for router, percent in certain.items()])
        found.append(f"On the words it left alone, the attack costs {each} of perplexity (95% intervals above 0).")
    if unseen:
        found.append(f"For {listed(unseen)} no cost on these words can be shown: no 95% interval lies above 0.")
    differences = [(row.router, row.cost_difference) for row in results.rows[1:]]
    known = [(router, one) for router, one in differences if one is not None and _interval(one) is not None]
    if known:
        apart = [_cost_change(router, one) for router, one in known if _apart(one)]
        if not apart:
            found.append(f"No router's cost differs from that of {results.rows[0].router}.")
        else:
            found.append(f"Against the cost of {results.rows[0].router}, {'; '.join(apart)}; the others' do not differ.")
    return tuple(found)


def rise(nats: float) -> float:
    """The rise of a perplexity, in percent."""
    return 100 * math.expm1(nats)


def _cost_change(router: str, difference: Difference) -> str:
    interval = _interval(difference)
    assert interval is not None and difference.mean is not None
    verb, (low, high) = ("less", (-interval[1], -interval[0])) if difference.mean < 0 else ("more", interval)
    size, bounds = 100 * abs(difference.mean), f"{100 * low:.2g} to {100 * high:.2g}"
    return f"that of {router} is {verb} by {size:.2g} points (95% interval {bounds})"


def _apart(difference: Difference) -> bool:
    interval = _interval(difference)
    return interval is not None and not interval[0] <= 0 <= interval[1]


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
    return "" if used == usual else f"{used} experts a token instead of {usual}{_at_equal_compute(row)}"


def _at_equal_compute(row: Row) -> str:
    """Against the baseline with as many experts a token or more, where that was trained."""
    found, interval = row.equal_compute, _interval(row.equal_compute)
    if found is None or found.mean is None or interval is None:
        return ""
    if _apart(found):
        verb = "better" if found.mean < 0 else "worse"
        return f", {abs(found.mean):.3g} {verb} than {found.router}"
    return f", no difference to {found.router}"


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
