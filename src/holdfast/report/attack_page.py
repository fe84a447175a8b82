"""The page of `holdfast attack`: the error against the budget, as curves and as a table."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.metrics import Difference
from holdfast.report.page_shell import THEMES, flattened, listed, render_template
from holdfast.report.plot_data import Plot, mark
from holdfast.report.plots import CARRIED, ERRORS, budget_curve, budget_plot
from holdfast.report.tables import Table


def attack_table(found: Mapping[str, Any]) -> Table:
    """Return the result of any attack as a table, for the page and for the terminal."""
    rows = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in found["rows"]]
    return Table(found["title"], found["columns"], rows, found.get("caption") or "")


def render_attack(stored: Mapping[str, Any]) -> str:
    """Return the page of the stored result of an attack on pixels, as HTML."""
    curves, clean = stored["curves"], stored["clean"]
    plots = [plot for key in ERRORS if (plot := _plot(curves, key)).data]
    summaries = stored["summary"].get("attacks", [stored["summary"]])
    largest = max(budget for curve in curves.values() for budget in curve["budgets"])
    ends = listed([f"{curve['figure'][-1]:.1f}% under {name}" for name, curve in curves.items()])
    verdict = (
        f"The error is {clean['figure']:.1f}% on {clean['examples']:,} clean images, and at a budget of {largest:.3g} "
        f"it is {ends}."
    )
    if flags := [f"{flag['kind']}: {flag['detail']}" for flag in stored["flags"]]:
        verdict += f" This may be wrong: {' '.join(flags)}"
    return render_template(
        "attack.html",
        plots,
        title=f"{stored['model']}, on {stored['data']['name']}",
        verdict=verdict,
        attacks=list(curves),
        marks=[mark(place) for place in range(len(curves))],
        colours=len(THEMES["light"]["routers"]),
        plots=plots,
        errors=replace(attack_table(stored), title="Errors"),
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


def _settings(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of an attack that are the same at every budget."""
    names = ("norm", "examples", "steps", "restarts", "seed")
    options = {name: value for name, value in summary["options"].items() if name != "step"}
    return {name: str(value) for name, value in {**{key: summary[key] for key in names}, **options}.items()}
