"""The page of `holdfast attack`: the error against the budget, as curves and as a table."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.metrics import Difference
from holdfast.report.page_shell import THEMES, decimal, flattened, listed, render_template, write_page
from holdfast.report.plot_data import Plot, mark
from holdfast.report.plots import CARRIED, ERRORS, LEVELS, budget_curve, budget_plot
from holdfast.report.tables import Table


def write_attack_page(stored: Mapping[str, Any], path: Path, *, force: bool = False) -> Path:
    """Write the page of the stored result of an attack atomically. Raise ValueError if the file exists."""
    return write_page(path, lambda: render_attack(stored), force=force)


def render_attack(stored: Mapping[str, Any]) -> str:
    """Return the page as HTML."""
    curves = stored["curves"]
    plots = [plot for key in ERRORS if (plot := _plot(curves, key)).data]
    summaries = stored["summary"].get("attacks", [stored["summary"]])
    return render_template(
        "attack.html",
        {"plots": {plot.name: asdict(plot) for plot in plots}},
        title=f"{stored['model']}, on {stored['data']['name']}",
        verdict=_verdict(stored),
        attacks=list(curves),
        marks=[mark(place) for place in range(len(curves))],
        colours=len(THEMES["light"]["routers"]),
        plots=plots,
        errors=errors_table(curves),
        how={
            "Versions": dict(stored["versions"]),
            "Data": dict(flattened(stored["data"])),
            **{one["attack"]: _settings(one) for one in summaries},
        },
    )


def _plot(curves: Mapping[str, Any], key: str) -> Plot:
    error, end = ERRORS[key]
    data = []
    for place, (name, curve) in enumerate(curves.items()):
        points = [None if value is None else Difference(value, None, None, 1) for value in curve[key]]
        if any(points):
            data.append(budget_curve(place, name, curve["budgets"], points))
    title = f"Error against budget{end}"
    return budget_plot(f"curve-{key}", title, f"A budget of 0 is the clean {error}. {CARRIED}", data, error)


def errors_table(curves: Mapping[str, Any]) -> Table:
    """Return the errors of every attack at every budget."""
    rows = (
        {
            "attack": name,
            "budget": f"{budget:.4g}",
            f"budget, in 1/{LEVELS}": f"{LEVELS * budget:.4g}",
            "error, %": decimal(curve["figure"][place]),
            "top-5 error, %": decimal(curve["top5"][place]),
            "largest change": f"{curve['realised'][place]:.4g}",
        }
        for name, curve in curves.items()
        for place, budget in enumerate(curve["budgets"])
    )
    return Table.of("Errors", rows, f"In percent of the images. {CARRIED}")


def _settings(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of an attack that are the same at every budget."""
    names = ("norm", "examples", "steps", "restarts", "seed")
    options = {name: value for name, value in summary["options"].items() if name != "step"}
    return {name: str(value) for name, value in {**{key: summary[key] for key in names}, **options}.items()}


def _verdict(stored: Mapping[str, Any]) -> str:
    ends = [f"{curve['figure'][-1]:.1f}% under {name}" for name, curve in stored["curves"].items()]
    largest = max(budget for curve in stored["curves"].values() for budget in curve["budgets"])
    clean = stored["clean"]
    found = (
        f"The error is {clean['figure']:.1f}% on {clean['examples']:,} clean images, and at a budget of {largest:.3g} "
        f"it is {listed(ends)}."
    )
    flags = [f"{flag['kind']}: {flag['detail']}" for flag in stored["flags"]]
    return found + (f" This may be wrong: {' '.join(flags)}" if flags else "")
