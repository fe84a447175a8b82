"""The page of `holdfast attack`: what the attack does against its budget or rate, as curves and as a table."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.metrics import Difference
from holdfast.report.export import Page
from holdfast.report.page_shell import as_texts, listed
from holdfast.report.plot_data import Plot, axis, curve_of, escaped
from holdfast.report.plots import CARRIED, ERRORS, budget_curve, budget_plot
from holdfast.report.tables import Cell, Table


def attack_table(found: Mapping[str, Any]) -> Table:
    """Return the result of any attack as a table, for the page and for the terminal."""
    rows = [
        [Cell(f"{cell:.4g}", cell) if isinstance(cell, float) else Cell.of(cell) for cell in row] for row in found["rows"]
    ]
    return Table(found["title"], found["columns"], rows, found.get("caption") or "")


def render_attack(stored: Mapping[str, Any]) -> str:
    """Return the page of the stored result of an attack, as HTML."""
    plots, verdict, name, settings = (_errors if "curves" in stored else _lines)(stored)
    if flags := [f"{flag['kind']}: {flag['detail']}" for flag in stored["flags"]]:
        verdict += f" This may be wrong: {' '.join(flags)}"
    table = replace(attack_table(stored), title=name)
    page = Page(
        "attack.html",
        plots,
        brief=table,
        sentences=[verdict],
        title=f"{stored['model']}, on {stored['data']['name']}",
        attacks=list(stored.get("curves") or stored["lines"]["curves"]),
        errors=table,
        how={"Versions": dict(stored["versions"]), "Data": as_texts(stored["data"]), **settings},
    )
    return page.html()


Shown = tuple[list[Plot], str, str, dict[str, dict[str, str]]]  # plots, the verdict, the title of the table, settings


def _lines(stored: Mapping[str, Any]) -> Shown:
    """Return what the page of an attack on texts or routers shows: one figure against the rate or the budget."""
    lines = stored["lines"]
    curves, across = lines["curves"], lines["x"].partition(",")[0]
    data = [
        curve_of(place, None, curve["budgets"], curve["figure"], f"{escaped(name)}, {lines['x']} %{{x:.3g}}: %{{y:.4g}}")
        for place, (name, curve) in enumerate(curves.items())
    ]
    axes = {"xaxis": axis(lines["x"], rangemode="tozero"), "yaxis": axis(lines["y"], rangemode="tozero")}
    largest = max(budget for curve in curves.values() for budget in curve["budgets"])
    end = "in" if "budget" in lines["x"] else "with"  # layers of a model, or attacks on its texts
    ends = listed([f"{curve['figure'][-1]:.3g} {end} {name}" for name, curve in curves.items()])
    plot = Plot("curve-figure", f"{lines['y']}, against the {across}", stored.get("caption") or "", data, axes)
    return [plot], f"At a {across} of {largest:.3g}, the {lines['y']} is {ends}.", "Numbers", {}


def _errors(stored: Mapping[str, Any]) -> Shown:
    """Return what the page of an attack on pixels shows: the error against the budget."""
    curves, clean = stored["curves"], stored["clean"]
    plots = []
    for key, (error, end) in ERRORS.items():
        data = []
        for place, (name, curve) in enumerate(curves.items()):
            points = [None if value is None else Difference(value, None, None, 1) for value in curve[key]]
            if any(points):
                data.append(budget_curve(place, name, curve["budgets"], points))
        if data:
            caption = f"A budget of 0 is the clean {error}. {CARRIED}"
            plots.append(budget_plot(f"curve-{key}", f"Error against budget{end}", caption, data, error))
    summaries = stored["summary"].get("attacks", [stored["summary"]])
    largest = max(budget for curve in curves.values() for budget in curve["budgets"])
    ends = listed([f"{curve['figure'][-1]:.1f}% under {name}" for name, curve in curves.items()])
    verdict = (
        f"The error is {clean['figure']:.1f}% on {clean['examples']:,} clean images, and at a budget of {largest:.3g} "
        f"it is {ends}."
    )
    return plots, verdict, "Errors", {one["attack"]: _settings(one) for one in summaries}


def _settings(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of an attack that are the same at every budget."""
    names = ("norm", "examples", "steps", "restarts", "seed")
    options = {name: value for name, value in summary["options"].items() if name != "step"}
    return {name: str(value) for name, value in {**{key: summary[key] for key in names}, **options}.items()}
