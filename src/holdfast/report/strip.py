"""The verdict strip of a comparison: one row for each router, what it is better or worse in, and what it costs.

    strip(results)      the data of the template `strip.html`, for a page of one comparison or of several
    headline(results)   the same in one sentence of at most 20 words, which also says what could have been seen

Each column compares routers with the baseline in one aspect. A bar shows the difference with its 95% interval, in the middle
no difference, on the right better, whatever the sign of the number is.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from holdfast.metrics import Difference
from holdfast.metrics.paired import FEWEST_SEEDS
from holdfast.report.page_shell import bytes_text, decimal, flops_text, listed, rise, seconds_text, signed
from holdfast.report.tables import Cell
from holdfast.routing.grammar import written_pairs
from holdfast.train.image_task import HELD_OUT
from holdfast.train.results import DomainRow, Results, Row

Kind = Literal["better", "same", "worse", "unknown", "baseline", "none"]
WORDS: dict[Kind, str] = {
    "better": "better",
    "same": "no difference",
    "worse": "worse",
    "unknown": "not judged",
    "baseline": "baseline",
    "none": "not compared",
}
COST_OF_ATTACK = "Cost of the attack"
OUTLIER = 4  # times the median reach of the intervals in a column: longer bars are cut off
NOTABLE = 0.05  # a cost is marked if it differs from the baseline's by more than this share


@dataclass(frozen=True)
class Bar:
    """A router in one aspect."""

    kind: Kind
    level: str  # its own figure
    text: str = ""  # the difference to the baseline, with its interval; a `Cell` if there is one
    better_by: float | None = None  # the difference, above 0 if better
    places: tuple[float, float, float] | None = None  # of low end, mean and high end, from 0 to 100
    is_cut: tuple[bool, bool] = (False, False)  # whether the interval goes on beyond the left and the right edge

    @property
    def word(self) -> str:
        return WORDS[self.kind]


@dataclass(frozen=True)
class Column:
    """An aspect in which routers are compared, with one bar for each row."""

    title: str
    about: str  # what the numbers are, in a phrase
    bars: list[Bar]
    best: int | None = None  # the row with the best mean; the difference to the others need not be shown
    unit: str = ""  # of a difference, in a sentence
    shows: float | None = None  # a difference above this would have been shown for every router; None: nothing is claimed

    def of_kind(self, kind: Kind) -> list[int]:
        return [place for place, bar in enumerate(self.bars) if bar.kind == kind]


@dataclass(frozen=True)
class Chip:
    """A cost of a router."""

    name: str
    text: str
    about: str
    value: float
    ratio: str = ""  # to the baseline, if that is notable
    is_more: bool = False


@dataclass(frozen=True)
class StripRow:
    label: str
    place: int | None  # among the rows of the results: its colour and mark; None: it stands for several of them
    is_baseline: bool
    chips: list[Chip]


@dataclass(frozen=True)
class Strip:
    baseline: str
    seeds: int  # fewest of a row
    columns: list[Column]
    rows: list[StripRow]


@dataclass(frozen=True)
class Aspect:
    """How a column reads a row: its own figure, and the difference to the baseline in the unit that is shown."""

    title: str
    about: str
    level: Callable[[Any], str]
    difference: Callable[[Any], Difference | None]
    unit: str = "points"
    sign: int = 1  # 1 if higher is better, -1 if lower is
    digits: int = 2


def strip(results: Results) -> Strip:
    """Return the strip of a comparison; over held-out domains it has the mean accuracy and the worst."""
    compared: Sequence[Row | DomainRow] = results.rows
    if results.domains and results.swept == [HELD_OUT]:
        compared, about = results.domains, "over the held-out domains; higher is better"
        labels = [", ".join(filter(None, [row.router, written_pairs(row.settings)])) for row in compared]
        rows = [StripRow(label, None, results.is_baseline(row), []) for label, row in zip(labels, compared, strict=True)]
        mean = Aspect("Mean accuracy", about, lambda row: f"{decimal(row.mean.mean)}%", lambda row: row.mean_difference)
        worst = Aspect("Worst accuracy", about, lambda row: f"{decimal(row.worst.mean)}%", lambda row: row.worst_difference)
        columns = [column(results, compared, aspect) for aspect in (mean, worst)]
    else:
        rows = [
            StripRow(row.label, at, results.is_baseline(row), chips(results, row)) for at, row in enumerate(results.rows)
        ]
        columns = [column(results, compared, aspect) for aspect in aspects(results)]
        if results.swept:  # rows of other settings have other baselines
            columns = [replace(one, best=None) for one in columns]
    return Strip(results.baseline.router, min(len(row.seeds) for row in compared), columns, rows)


def aspects(results: Results) -> Iterator[Aspect]:
    """Yield what was measured: the clean figure, the attack, and steadiness."""
    noun = results.run.measure.noun
    yield figure_aspect(results, f"Clean {noun}", "clean")
    if any(row.cost for row in results.rows):
        yield Aspect(
            COST_OF_ATTACK,
            "rise of the perplexity of untouched words; lower is better",
            lambda row: "" if row.cost is None else signed(rise(row.cost.mean), ".2f") + "%",
            lambda row: row.cost_difference and scaled(row.cost_difference, 100),
            sign=-1,
        )
    elif any(row.attacked is not None for row in results.rows):
        yield figure_aspect(results, f"{noun[:1].upper()}{noun[1:]} under attack", "attacked")
    if any(row.consistency for row in results.rows):
        what = listed(list(dict.fromkeys(cell.consistency.what for cell in results.cells)))
        yield Aspect(
            "Steadiness",
            f"tokens that keep their experts under {what}; higher is better",
            lambda row: "" if row.consistency is None else f"{100 * row.consistency.mean:.1f}%",
            lambda row: row.consistency_difference and scaled(row.consistency_difference, 100),
        )


def figure_aspect(results: Results, title: str, name: str) -> Aspect:
    """Return the aspect of the measured figure `name` of a row, "clean" or "attacked"."""
    measure = results.run.measure

    def level(row: Row) -> str:
        value = getattr(row, name)
        return Cell(decimal(value, measure.digits) + ("%" if measure.unit == "%" and value is not None else ""), value)

    unit = "points" if measure.unit == "%" else measure.unit or measure.noun
    difference, sign = attrgetter(f"{name}_difference"), -1 if measure.better == "lower" else 1
    return Aspect(title, f"{measure.better} is better", level, difference, unit, sign, measure.digits)


def scaled(difference: Difference, factor: float) -> Difference:
    """Return a difference in another unit."""
    low, high = (None if end is None else factor * end for end in (difference.low, difference.high))
    return replace(difference, mean=factor * difference.mean, low=low, high=high)


def column(results: Results, rows: Sequence[Row | DomainRow], aspect: Aspect) -> Column:
    """Return the bars of an aspect on one scale."""
    differences = [aspect.difference(row) for row in rows]
    known = [one for one in differences if one is not None]
    reaches = [max(abs(end) for end in (one.low, one.mean, one.high) if end is not None) for one in known]
    limit = max([reach for reach in reaches if reach <= OUTLIER * statistics.median(reaches)], default=0.0) or 1.0
    bars = []
    for row, one in zip(rows, differences, strict=True):
        if one is not None:
            bars.append(_bar(one, aspect, aspect.level(row), limit))
        elif results.is_baseline(row):
            bars.append(Bar("baseline", aspect.level(row)))
        else:
            apart = row.apart if isinstance(row, Row) else None
            bars.append(Bar("none", aspect.level(row), apart or results.baseline.apart or ""))
    shown = [one.shows for one in known if one.kind != "unknown"]
    better_by = {at: 0.0 if bar.kind == "baseline" else bar.better_by for at, bar in enumerate(bars)}
    ranked = {at: by for at, by in better_by.items() if by is not None}
    best = max(ranked, key=lambda at: ranked[at]) if known else None
    return Column(aspect.title, aspect.about, bars, best, aspect.unit, max(shown, default=None))


def _bar(difference: Difference, aspect: Aspect, level: str, limit: float) -> Bar:
    sign, digits = aspect.sign, aspect.digits
    ends = [difference.mean if end is None else end for end in (difference.low, difference.mean, difference.high)]
    low, mean, high = (50 + 50 * sign * end / limit for end in (ends if sign > 0 else reversed(ends)))
    inside = (max(0.0, min(100.0, place)) for place in (low, mean, high))
    kinds: dict[str, Kind] = {"same": "same", "unknown": "unknown", "higher": "better", "lower": "worse"}
    better = {"higher": "lower", "lower": "higher"}.get(difference.kind, difference.kind) if sign < 0 else difference.kind
    form = f".{digits}f"
    text: str = signed(difference.mean, form)
    if difference.low is not None and difference.high is not None:
        text += f" ({signed(difference.low, form)} to {signed(difference.high, form)})"
    return Bar(
        kinds[better],
        level,
        Cell(text, difference.mean, difference.low, difference.high),
        sign * difference.mean,
        tuple(round(place, 2) for place in inside),  # type: ignore[arg-type]
        (low < 0, high > 100),
    )


def chips(results: Results, row: Row) -> list[Chip]:
    """Return what a router costs, as far as it is stored, with ratios to the baseline of the same setting."""
    baseline = next((one for one in results.rows if results.is_baseline(one) and one.settings == row.settings), row)
    of = "image" if results.run.recipe.get("task") == "images" else "token"
    kinds: dict[str, tuple[str, str, Callable[[Any], str]]] = {
        "experts": ("experts_per_token", "experts per token", decimal),
        "step": ("step_seconds", "time of a training step", seconds_text),
        "FLOPs": ("flops", f"FLOPs of a forward, per {of}", flops_text),
        "memory": ("peak_bytes", "peak of the GPU memory in training", bytes_text),
    }
    found = []
    for name, (key, about, text) in kinds.items():
        value, usual = getattr(row, key), getattr(baseline, key)
        if value is not None:
            ratio = value / usual if usual else 1.0
            is_notable = abs(ratio - 1) > NOTABLE
            shown = f"{ratio:.3g}\u00d7" if is_notable else ""
            found.append(Chip(name, text(value), about, value, shown, is_notable and ratio > 1))
    return found


def headline(results: Results) -> str:
    """Return the comparison in one sentence of at most 20 words, where the name of a router counts as one."""
    found, name = strip(results), results.baseline.router
    if results.baseline.apart:
        return f"{name}, the baseline, {results.baseline.apart}: nothing can be compared; name another router first."
    if all(row.is_baseline for row in found.rows):
        return f"Only {name} was trained, so there is nothing to compare it with."
    judged = [column for column in found.columns[:2] if column.shows is not None]
    if not judged:
        if found.seeds >= FEWEST_SEEDS:
            return f"No difference to {name} can be judged: figures, or results of single test examples, are missing."
        seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
        return f"{seeds} cannot show whether a router differs from {name}: train {FEWEST_SEEDS} or more."
    clean, *attacked = judged
    would = f"{found.seeds} seeds cannot show differences below {clean.shows:.2g}"
    # The baseline with more experts is there to compare with, and not one of the routers under test.
    rows = [None if row.place is None else results.rows[row.place] for row in found.rows]
    controls = {at for at, row in enumerate(rows) if row is not None and row.is_baseline_with_other_k(name)}
    better, worse = ([at for at in clean.of_kind(kind) if at not in controls] for kind in ("better", "worse"))
    if results.swept and rows[0] is not None:
        count = sum(bar.kind in ("better", "same", "worse") for bar in clean.bars)
        return f"In equal settings, {len(better)} of {count} rows beat {name}, {len(worse)} lost: {would}."
    if better:
        best = max(better, key=lambda at: clean.bars[at].better_by or 0.0)
        label, row, by = found.rows[best].label, rows[best], f"by {clean.bars[best].better_by or 0.0:.2g} {clean.unit}"
        if row is not None and row.uses_more_compute:
            by += f" with {row.more_compute:.0%} more experts"
        if len(better) == 1:
            return f"{label} beat {name} {by}: {would}."
        return f"{len(better)} routers beat {name}, {label} most, {by}: {would}."
    lost = f" and {len(worse)} {'was' if len(worse) == 1 else 'were'} worse" if worse else ""
    robust = [at for at in (attacked[0].of_kind("better") if attacked else []) if at not in controls]
    is_cost = bool(attacked) and attacked[0].title == COST_OF_ATTACK  # the figure under attack may differ where it does not
    under = "in cost of attack" if is_cost else "under attack"
    if robust:
        who = found.rows[robust[0]].label if len(robust) == 1 else "several"
        robust_in = f"attack costs {who} less" if is_cost else f"{who} under attack"
        return f"No router beat {name} on clean data, but {robust_in}: {would} {clean.unit}."
    if is_cost and worse:
        return f"No router beat {name} on clean data{lost}: {would} {clean.unit}."
    where = f", clean or {under}{',' if worse else ''}" if attacked else ""
    return f"No router beat {name}{where}{lost}: {would} {clean.unit}."
