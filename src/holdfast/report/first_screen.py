"""The first screen of a report as data for templates: tiles with a price, dots on a logarithmic scale, bars from zero.

They are HTML with places in percent, not plots: they need no script, and they fit on a phone. That of an audit has the
answer to --what-if with its price, or the main finding, with a picture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.auditing import AuditReport, Finding
from holdfast.auditing.findings import Answer, answer, most_severe, unchanged
from holdfast.auditing.reports import Pair, Settings
from holdfast.report.page_shell import before_and_after, listed, number, short_share, signed
from holdfast.report.tables import Cell

ZERO, LEFT, RIGHT = 3.0, 15.0, 96.0  # places of 0 and of the ends of a logarithmic scale, in percent of its width
SMALLEST = 1e-5  # shares below it are drawn there, and written as <0.001%
MOST_TICKS = 5  # with a text each
UNKNOWN = "\u2013"
MARKS = {"fewer": ("▼", "smaller"), "more": ("▲", "larger"), "same": ("≈", "no clear difference"), "": ("", "")}
MOST_ROWS = 8  # of a picture; more would not fit on the first screen of a phone
COSTS = {  # the price of another router, in the order of reading
    "experts_per_token": "experts per token",
    "loss": "loss, unperturbed",
    "perplexity": "perplexity, unperturbed",
}


@dataclass(frozen=True)
class Tile:
    """A number that a reader should see first."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Dots:
    """A row with one dot, or with one before and one after a change; `direction` is a key of MARKS."""

    label: str
    name: str
    places: Sequence[float]
    text: str
    direction: str = ""

    @property
    def mark(self) -> str:
        return MARKS[self.direction][0]

    @property
    def said(self) -> str:
        """The mark in words, for a screen reader."""
        return MARKS[self.direction][1]


@dataclass(frozen=True)
class DotPlot:
    """Rows of dots on one logarithmic scale."""

    title: str
    ticks: Sequence[tuple[float, str]]
    rows: Sequence[Dots]

    @property
    def compares(self) -> bool:
        """Whether rows have a number before and one after."""
        return any(len(row.places) > 1 for row in self.rows)


@dataclass(frozen=True)
class Bar:
    """A row with a bar and its interval, what is written beside it, and its price."""

    label: str
    place: int  # of its colour
    width: float
    interval: tuple[float, float] | None
    text: str
    verdict: str
    price: str


def log_scale(values: Sequence[float]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Return a function from shares to places, and the ticks in percent: powers of ten around all values above 0."""
    known = [max(value, SMALLEST) for value in values if value > 0] or [0.01]
    low = math.floor(math.log10(min(known)) + 1e-9)
    high = max(low + 1, math.ceil(math.log10(max(known)) - 1e-9))

    def place(value: float) -> float:
        if value <= 0:
            return ZERO
        return round(LEFT + (RIGHT - LEFT) * (math.log10(max(value, SMALLEST)) - low) / (high - low), 2)

    step = 1 if high - low < MOST_TICKS else 2  # labels of neighbouring ticks must not touch
    texts = {power: f"{100 * 10.0**power:g}%" for power in range(high, low - 1, -step)}
    ticks = [(place(10.0**power), texts.get(power, "")) for power in range(low, high + 1)]
    return place, [(ZERO, "0"), *ticks] if min(values, default=1.0) == 0 else ticks


def changed_by(before: float, after: float) -> str:
    """Return how much larger or smaller a number has become, in percent."""
    if before == after or not before:
        return "the same"
    percent = 100 * (after / before - 1)
    return f"{percent:+,.0f}%" if abs(percent) >= 99.5 else f"{percent:+.2g}%"


def figure(value: float | None) -> str:
    """Return a number with four digits at least, and its zeros: 4.760, 116.9, 12,345."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    decimals = 3 - math.floor(math.log10(abs(value))) if value else 3
    return f"{value:,.{min(6, max(0, decimals))}f}"


@dataclass(frozen=True)
class FirstScreen:
    """What a reader sees first. `plots` are of predictions, if the model has any, and of the output change by flips."""

    sentence: str
    more: str
    tiles: Sequence[Tile]
    plots: Sequence[DotPlot]
    caption: str
    other: str = ""  # the router of --what-if, whose dots are filled


def first_screen(report: AuditReport, findings: Sequence[Finding]) -> FirstScreen:
    """Return the answer to --what-if, or without it the main finding."""
    found = answer(report)
    sentence, more = (main_finding(report, findings), about(report)) if found is None else answer_words(found)
    if report.status == "interrupted":
        sentence = f"The audit was interrupted; this page covers the finished batches. {sentence}"
    tiles = [] if report.what_if is None else price(report.what_if.cost)
    return FirstScreen(sentence, more, tiles, pictures(report, found), caption(report, found), found.router if found else "")


def answer_words(found: Answer) -> tuple[str, str]:
    """Return the answer in one sentence, and what the other router does to jumps in another."""
    total, fewer, more = len(found.predictions), found.count("fewer"), found.count("more")
    if not found.predictions:
        return f"With {found.router}, {jump_words(found)}", "There are no predictions to compare."
    if fewer or more:
        parts = [f"less often under {fewer}" if fewer else "", f"more often under {more}" if more else ""]
        said = f"{' and '.join(part for part in parts if part)} of {_perturbations(total)}"
    else:
        every = "the only perturbation" if total == 1 else f"all {_perturbations(total)}"
        said = f"about as often as before under {every}"
    jumps = jump_words(found)
    return f"With {found.router}, predictions change {said}.", f"{jumps[:1].upper()}{jumps[1:]}"


def jump_words(found: Answer) -> str:
    """Return what remains of the output change by flips."""
    ratios = found.flip_outputs.values()
    if not ratios:
        return "flips change no output."
    falls = [ratio for ratio in ratios if ratio < 1]
    rises = [ratio for ratio in ratios if ratio > 1]
    said = f"the output change by flips is smaller under {len(falls)} of {_perturbations(len(ratios))}"
    if falls:
        low, high = (short_share(1 - ratio) for ratio in (max(falls), min(falls)))
        said += f", by {low}" if low == high else f", by {low} to {high}"
    if rises:
        said += f", and larger under {len(rises)}, at most {max(rises):.2g} times as large"
    return f"{said}."


def _perturbations(count: int) -> str:
    return f"{count} perturbation{'' if count == 1 else 's'}"


def main_finding(report: AuditReport, findings: Sequence[Finding]) -> str:
    """Return the most severe finding as a sentence, or that there is none above minor ones."""
    main = most_severe(findings)
    if main is not None and main.severity != "minor":
        others = len(findings) - 1
        more = f" {others} more {'finding' if others == 1 else 'findings'} below." if others else ""
        return f"{main.severity.capitalize()}: {main.text}.{more}"
    shares = [one.overall.prediction_flips for one in report.perturbations.values()]
    known = [share for share in shares if share is not None]
    said = "No findings" if main is None else "Only minor findings"
    if not known:
        return f"{said}." if main is None else f"{said}, the first: {main.text}."
    return f"{said}: no perturbation changes more than {short_share(max(known))} of the predictions."


def about(report: AuditReport) -> str:
    """Return what was audited, and its perplexity."""
    source = (report.data.source or {}).get("name")
    said = f"{report.data.tokens:,} tokens{f' of {source}' if source else ''}, {len(report.layers)} MoE layers"
    used, perplexity = report.overall.experts_per_token, report.overall.perplexity
    said += "" if used is None else f", {number(used)} experts per token"
    return f"{said}." if perplexity is None else f"{said}; perplexity of the unperturbed data {figure(perplexity)}."


def price(cost: dict[str, Pair]) -> list[Tile]:
    """Return what another router costs, before and after."""
    tiles = []
    for name, title in COSTS.items():
        pair = cost.get(name, Pair(None, None))
        if pair.before is None and pair.after is None:  # without labels there is no loss
            continue
        written = number if name == "experts_per_token" else figure
        note = "" if pair.before is None or pair.after is None else changed_by(pair.before, pair.after)
        if note and name == "loss":
            note = signed((pair.after or 0) - (pair.before or 0), ".4f")
        text = f"{written(pair.before)} → {written(pair.after)}"
        tiles.append(Tile(title, Cell(text, pair=(pair.before, pair.after)), note))
    return tiles


def pictures(report: AuditReport, found: Answer | None) -> list[DotPlot]:
    """Return the dots of each measure that is known. Perturbations under which nothing changes are left out."""
    other = report.what_if
    folded, by_name = unchanged(report), {name: one.overall for name, one in report.perturbations.items()}
    names = [name for name in by_name if name not in folded and (other is None or name in other.flips)]
    names.sort(key=lambda name: (-(by_name[name].prediction_flips or 0), -(by_name[name].output.flip or 0)))
    names = names[:MOST_ROWS]
    predictions = {name: Pair(by_name[name].prediction_flips, None) for name in names}
    outputs = {name: Pair(by_name[name].output.flip, None) for name in names}
    if other is not None:
        predictions, outputs = ({name: of[name] for name in names} for of in (other.prediction_flips, other.flip_output))
    directions = {name: found.predictions.get(name, "") if found else "" for name in names}
    moved = {name: _lower_or_higher(pair) for name, pair in outputs.items()}
    drawn = [
        _dots("Predictions that change", predictions, directions, report.settings),
        _dots("Output change by flips", outputs, moved, report.settings),
    ]
    return [plot for plot in drawn if plot.rows]


def _dots(title: str, pairs: dict[str, Pair], directions: dict[str, str], settings: Settings) -> DotPlot:
    known = {name: [value for value in (pair.before, pair.after) if value is not None] for name, pair in pairs.items()}
    place, ticks = log_scale([value for values in known.values() for value in values])
    rows = []
    for name, pair in pairs.items():
        if pair.before is None:
            continue
        text = before_and_after(pair, short_share) if directions[name] else short_share(pair.before)
        places = [place(value) for value in known[name]]
        rows.append(Dots(perturbation_label(name, settings), name, places, text, directions[name]))
    return DotPlot(title, ticks, rows)


def _lower_or_higher(pair: Pair) -> str:
    """Return the direction of two means; they are the same if their texts are."""
    if pair.before is None or pair.after is None:
        return ""
    return "same" if short_share(pair.before) == short_share(pair.after) else "fewer" if pair.after < pair.before else "more"


def caption(report: AuditReport, found: Answer | None) -> str:
    """Return how the picture is read."""
    parts = [
        "A flip: a token goes to other experts. Shares of the predictions, and of the norm of a layer's output (mean over "
        "layers), on a logarithmic scale."
    ]
    if found is not None:
        parts.append(
            f"{found.router} is put in on the same weights, without training. ▼ smaller, ▲ larger, ≈ no clear difference: "
            "for predictions, one that chance explains (McNemar's test at 5%)."
        )
    if folded := unchanged(report):
        parts.append(f"Nothing changes under {listed(folded)}.")
    shown = len(report.perturbations) - len(folded)
    if shown > MOST_ROWS:
        parts.append(f"{shown - MOST_ROWS} more perturbations are in the table.")
    return " ".join(parts)


def perturbation_label(name: str, settings: Settings) -> str:
    """Return a perturbation in two or three words."""
    kind, _, level = name.partition(".")
    if kind == "noise":
        return f"{100 * float(level):g}% noise"
    known = {
        "none": "same forward again",
        "routing": f"router in {level}",
        "model": f"model in {level}",
        "batch": {"alone": "sequence alone", "left": "padding on the left", "right": "padding on the right"}.get(
            level, name
        ),
        "backend": "other kernel",
        "words": f"{settings.rate:.0%} words swapped",
        "typos": f"{settings.rate:.0%} words misspelt",
        "attack": f"attack of {100 * settings.budget:g}%",
    }
    return known.get(kind, name)
