"""The page of certified predictions: certified accuracy against radius, beside the vote under attack at the same radii."""

from pathlib import Path
from typing import Any

from holdfast.metrics import Difference
from holdfast.report.export import Page
from holdfast.report.page_shell import as_texts, listed, write_report_page
from holdfast.report.plot_data import THIN, Plot, Trace, axis, dash, error_bars, escaped, line_of, symbol, trace
from holdfast.report.tables import Cell, Table
from holdfast.train.prediction_report import PredictionReport

POINTS = 60  # of a curve


def write_predictions(report: PredictionReport | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a report, given as such, as its file or as its folder. Overwrite a file only with `force`."""
    return write_report_page(PredictionReport, report, path, force=force)


def prediction_page(report: PredictionReport) -> Page:
    """Return the page as data, to be rendered or exported."""
    table = accuracy_table(report)
    return Page(
        "predictions.html",
        [accuracy_plot(report)],
        brief=table,
        sentences=sentences(report),
        title=f"{listed(report.labels)}, on {report.data.get('name', 'data')}",
        routers=report.labels,
        accuracies=table,
        cells=cells_table(report),
        skipped=Table.of("What was skipped", [{"model": path, "why": why} for path, why in report.skipped.items()]),
        meaning=meaning(report),
        how={"Settings": as_texts(vars(report.settings)), "Data": as_texts(report.data), "Versions": dict(report.versions)},
    )


def sentences(report: PredictionReport) -> list[str]:
    """Return what the page says: the best certified accuracy, and whether an attack refuted a certificate."""
    radius = report.settings.sigma
    found = {label: report.accuracy(label, radius) for label in report.labels}
    each = [f"{label} {_percent(value)}" for label, value in found.items()]
    said = [f"At a radius of {radius:g} (one sigma), the certified accuracy is: {', '.join(each)}."]
    if not report.settings.steps:
        return [*said, "The votes were not attacked."]
    violations = report.violations()
    if not violations.certified:
        return [*said, "No example was certified, so no certificate was attacked."]
    if violations.count > violations.allowed:
        return [f"Do not trust these certificates: {violations.words}, so there is a mistake in them.", *said]
    return [*said, f"{violations.words[:1].upper()}{violations.words[1:]}: the attacks do not contradict the certificates."]


def meaning(report: PredictionReport) -> list[str]:
    """Return how to read the numbers, in the words of this report."""
    settings = report.settings
    shown = [
        f"All of this is about the smoothed classifier: the majority vote of the model over {settings.samples:,} copies of "
        f"an example with Gaussian noise of standard deviation {settings.sigma:g}. It is not about one run of the model.",
        f"A radius is an l2 length. Sigma and radii are of {report.unit}. Noise is not clipped, and the perturbations that "
        "a radius covers need not stay within the usual range either.",
        "Certified accuracy at a radius: the share of examples whose class is right, and stays under every perturbation up "
        f"to that radius. Each example's certificate is right with probability {1 - settings.alpha:g}; this does not say "
        "that all of them are right together.",
        "If too few draws agree, the vote abstains, and the example counts as wrong. No radius can be above "
        f"{settings.largest_radius:.3g} with {settings.samples:,} draws, because all of them agree then.",
    ]
    if settings.steps:
        shown += [
            f"Under attack: the accuracy of the vote (of {settings.votes:,} draws, without abstaining) at inputs that PGD "
            f"found in {settings.steps} steps along the mean gradient of {settings.draws} noisy copies (l2, unbounded). "
            "Against the best attack the accuracy is between the certified one and this one.",
            "Violation: a vote within an example's certified radius that clearly leaves its class. Every certified example "
            "is also attacked at its own radius.",
        ]
    return shown


def accuracy_table(report: PredictionReport) -> Table:
    """Return a row for each router: certified accuracy at some radii, under attack, abstentions, violations."""
    settings = report.settings
    radii = settings.radii or [settings.sigma / 2, settings.sigma]
    rows = []
    for label in report.labels:
        models = report.models_of(label)
        row: dict[str, object] = {"router": label, "seeds": Cell(str(len(models)), len(models))}
        abstained = 100 * sum(model.abstained for model in models) / len(models)
        row["abstains"] = Cell(f"{abstained:.1f}%", abstained)
        for radius in (0.0, *radii):
            row[f"certified at {radius:.3g}"] = _cell(report.accuracy(label, radius))
        for radius in radii if settings.steps else ():
            row[f"under attack at {radius:.3g}"] = _cell(report.accuracy(label, radius, attacked=True))
        if settings.steps:
            violations = report.violations(label)
            row["violations"] = Cell(f"{violations.count} of {violations.certified:,}", violations.count)
        rows.append(row)
    over = dict.fromkeys(str(report.accuracy(label, 0.0).over) for label in report.labels)
    note = (
        f"Accuracies in percent, with 95% intervals ({'; '.join(over)}). Certified at 0: classified rightly without "
        "abstaining."
    )
    return Table.of("Certified accuracy", rows, note)


def cells_table(report: PredictionReport) -> Table:
    """Return a row for each model."""
    rows = []
    for model in report.models:
        radii = sorted(one.radius for one in model.examples)
        right = 100 * sum(one.is_right for one in model.examples) / len(model.examples)
        rows.append(
            {
                "model": model.path,
                "router": model.label,
                "seed": "" if model.seed is None else str(model.seed),
                "examples": Cell(f"{len(model.examples):,}", len(model.examples)),
                "right": Cell(f"{right:.1f}%", right),
                "abstains": Cell(f"{100 * model.abstained:.1f}%", 100 * model.abstained),
                "median radius": Cell(f"{radii[len(radii) // 2]:.3g}", radii[len(radii) // 2]),
            }
        )
    note = "Right: the class that the draws of the selection gave most often, also where the vote then abstains."
    return Table.of("Models", rows, note)


def accuracy_plot(report: PredictionReport) -> Plot:
    """Draw the certified accuracy of each router as a curve with a band, and its accuracy under attack as open marks."""
    data: list[Trace] = []
    largest = max(one.radius for model in report.models for one in model.examples)
    end = max(largest, *report.settings.radii, report.settings.sigma)
    for place, label in enumerate(report.labels):
        radii = [end * point / (POINTS - 1) for point in range(POINTS)]
        found = [report.accuracy(label, radius) for radius in radii]
        if all(one.low is not None for one in found):
            high, low = [one.high for one in found], [one.low for one in found][::-1]
            data.append(trace(place, radii + radii[::-1], high + low, mode="none", fill="toself", hoverinfo="skip"))
        hover = f"{escaped(label)}, certified at %{{x:.3g}}: %{{y:.1f}}%"
        data.append(line_of(place, radii, [one.mean for one in found], hover, dash(place)))
        if report.settings.steps:
            attacked = [0.0, *report.settings.radii]
            votes = [report.accuracy(label, radius, attacked=True) for radius in attacked]
            bars = error_bars(*((one.mean, one.low, one.high) for one in votes)) | THIN
            style: dict[str, Any] = {"mode": "markers", "marker": {"size": 9, "symbol": f"{symbol(place)}-open"}}
            hover = f"{escaped(label)}, under attack at %{{x:.3g}}: %{{y:.1f}}%<extra></extra>"
            data.append(trace(place, attacked, [one.mean for one in votes], hovertemplate=hover, error_y=bars, **style))
    caption = (
        "Lines: certified accuracy, the share of examples whose class is right and certified at this radius. Open marks: "
        "accuracy of the same vote under attack. Bands and bars are 95% intervals. A line that is clearly above its marks "
        "would contradict the certificates."
    )
    across = axis("radius (l2)", range=[-0.02 * end, 1.02 * end], zeroline=False)
    layout = {"xaxis": across, "yaxis": axis("accuracy, %", range=[0, 102])}
    return Plot("certified", "Certified accuracy against radius", caption, data, layout)


def _percent(found: Difference) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:.1f}%"
    return f"{found.mean:.1f}% ({found.low:.1f} to {found.high:.1f})"


def _cell(found: Difference) -> Cell:
    return Cell(_percent(found).replace("%", ""), found.mean, found.low, found.high)
