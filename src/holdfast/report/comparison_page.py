"""The HTML report of a comparison: its verdict, its tables, and the page, one file that loads nothing else.

A table has one row for each router, as a dictionary from column to cell; the template adds the routers' names.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from holdfast.report.attack_curves import accuracy_caption, accuracy_table
from holdfast.report.domain_tables import HELD_OUT, domain_caption, domain_table, domain_verdict
from holdfast.report.expert_views import css_classes, evolutions, views
from holdfast.report.page_shell import SCRIPTS as SCRIPTS
from holdfast.report.page_shell import THEMES as THEMES
from holdfast.report.page_shell import decimal, flattened, listed, render_template, rise, write_page
from holdfast.report.plot_data import by_layer, every_attack_table, mean_of
from holdfast.report.plots import plots
from holdfast.report.shift_tables import shift_sentences, shifts_caption, shifts_table
from holdfast.report.stored_comparison import NAME, Cell, Difference, Layer, Measure, Results, Row
from holdfast.report.sweep_tables import side_by_side, sweep_verdict
from holdfast.routing.grammar import written_value

COST = "cost of the attack on untouched words"
CHANGED = "predictions that the attack changes"
NONE = "\u2013"
MARKS = "●◆■▲▼✚✖★"  # in the order of plot_data.SYMBOLS


def write_report(results: Results, path: Path, *, force: bool = False) -> Path:
    """Write the report atomically. Raise ValueError if the file exists and `force` is False."""
    return write_page(path, lambda: render(results), force=force)


def render(results: Results) -> str:
    """Return the page as HTML."""
    drawn, graphs, seen = plots(results), evolutions(results), views(results)
    settings, beside = side_by_side(results)
    domain_routers, domains = domain_table(results)
    accuracies = list(accuracy_table(results))
    return render_template(
        "report.html",
        {
            "plots": {plot.name: asdict(plot) for plot in drawn},
            "graphs": [asdict(evolution) for evolution in graphs],
            "views": seen.shown,
            "pixels": seen.pixels,
        },
        title=results.title,
        verdict=verdict(results),
        routers=[{"name": row.label, "router": row.router, "mark": mark(place)} for place, row in enumerate(results.rows)],
        measure=results.run.measure,
        table=list(main_table(results)),
        table_caption=main_caption(results),
        settings=settings,
        side_by_side=beside,
        domain_routers=domain_routers,
        domains=domains,
        domain_caption=domain_caption(results),
        metrics=list(metrics_table(results)),
        metrics_caption=metrics_caption(results),
        shifts=list(shifts_table(results)),
        shifts_caption=shifts_caption(results),
        accuracies=accuracies,
        accuracy_caption=accuracy_caption(results),
        trials=[] if accuracies else list(every_attack_table(results)),  # accuracies have a column for every attack
        targets_are_attacked=results.targets_are_attacked,
        routing=list(routing_table(results)),
        plots=drawn,
        graphs=graphs,
        views=seen,
        layers=layers(results),
        css_classes=css_classes,
        how=how(results),
        colours=len(THEMES["light"]["routers"]),
    )


def mark(place: int) -> str:
    return MARKS[place % len(MARKS)]


def layers(results: Results) -> list[str]:
    """Return the choices of the layer menu: all layers, and each layer."""
    return list(dict.fromkeys(name for row in results.rows for name, _ in by_layer(results.cells_of(row))))


# Of each pair a recipe has one; a sweep of the other replaces it.
ALTERNATIVES = {"training.steps": "training.epochs", "training.epochs": "training.steps"}


def how(results: Results) -> dict[str, dict[str, str]]:
    """Return how the comparison was run: versions, recipe, data, attack, batches, checksum."""
    run = results.run
    seeds = sorted({cell.seed for cell in results.cells})
    batches = {
        f"seed {seed}": "; ".join(sorted({_batches(cell) for cell in results.cells if cell.seed == seed})) for seed in seeds
    }
    swept = {
        key: ", ".join(dict.fromkeys(written_value(row.settings.get(key)) for row in results.rows)) for key in results.swept
    }
    groups = {
        "Versions": results.versions or {"holdfast": run.holdfast},
        "Recipe": {
            key: value for key, value in flattened(run.recipe) if key not in swept and ALTERNATIVES.get(key) not in swept
        },
        "Sweep": swept,
        "Data": dict(flattened(run.data)),
        "Attack": dict(flattened(run.attack)),
        "Plugins, SHA-256": {str(plugin.get("name")): str(plugin.get("checksum")) for plugin in run.plugins},
        "Batches, first and last of each seed": batches,
        "Checksum": {f"{NAME}, SHA-256": results.checksum} if results.checksum else {},
    }
    return {title: group for title, group in groups.items() if group}


def _batches(cell: Cell) -> str:
    return f"{cell.first_batch} … {cell.last_batch}"


def verdict(results: Results) -> tuple[str, ...]:
    """Return the comparison in a few sentences: clean data, attacked data, the cost of the attack, shifted test sets.

    An interval that contains 0 is "no difference"; without an interval, the verdict says that nothing can be concluded.
    """
    if results.domains and results.swept == [HELD_OUT]:
        return domain_verdict(results)
    if results.swept:
        return sweep_verdict(results) + shift_sentences(results)
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
            f"One seed cannot show whether a router differs from {baseline.router}.",
            "The numbers below are from single runs; train with 2 seeds or more to compare routers.",
        )
        if any(len(row.seeds) > 1 for row in results.rows):
            first = (
                f"The {measure.noun} is not defined in enough runs to compare routers with {baseline.router}.",
                "A correlation with constant predictions, for example, is not defined.",
            )
        return first + cost_sentences(results)
    return (
        f"Against {baseline.router}, {_findings(results, [row.clean_difference for row in others], compute=True)}.",
        f"Under attack, {_findings(results, [row.attacked_difference for row in others])}.",
        *cost_sentences(results),
        *shift_sentences(results),
    )


def cost_sentences(results: Results) -> tuple[str, ...]:
    """Return what the attack costs each router on untouched words; empty if that was not measured."""
    costs = {row.router: row.cost for row in results.rows if row.cost is not None and row.cost.mean is not None}
    if not costs:
        return ()
    certain = {router: rise(cost.mean) for router, cost in costs.items() if cost.certain and cost.mean is not None}
    unseen = [router for router in costs if router not in certain]
    found = []
    if len(certain) > 1 and not unseen:
        least, most = min(certain.values()), max(certain.values())
        found.append(
            f"On the untouched words, the attack costs every router something: their perplexity rises by {least:.2f}% "
            f"to {most:.2f}%, and no 95% interval contains 0."
        )
    elif certain:
        each = listed([f"{router} {percent:.2f}%" for router, percent in certain.items()])
        found.append(f"On the untouched words, the attack costs {each} of perplexity (95% intervals above 0).")
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
    """Return a clause about routers with a difference, then about those without, then about those with too few seeds."""
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
        parts.append(f"{listed(unknown)} cannot be judged from fewer than two seeds")
    return "; ".join(parts)


def _change(row: Row, mean: float, interval: tuple[float, float], measure: Measure) -> str:
    verb, (low, high) = ("lowered", (-interval[1], -interval[0])) if mean < 0 else ("raised", interval)
    # "by 3%" could be read as 3% of the old value
    unit = {"": "", "%": " percentage points"}.get(measure.unit, f" {measure.unit}")
    return f"{row.router} {verb} the {measure.noun} by {abs(mean):.3g}{unit} (95% interval {low:.3g} to {high:.3g})"


def _level(value: float | None, measure: Measure) -> str:
    unit = {"": "", "%": "%"}.get(measure.unit, f" {measure.unit}")
    return decimal(value) + (unit if value is not None else "")


def _price(row: Row, baseline: Row) -> str:
    """Return a note if a router uses another number of experts than the baseline: more compute may explain a gain."""
    used, usual = decimal(row.experts_per_token), decimal(baseline.experts_per_token)
    return "" if used == usual else f"{used} experts per token instead of {usual}{_at_equal_compute(row)}"


def _at_equal_compute(row: Row) -> str:
    """Return the difference to the baseline with at least as many experts per token, if that was trained."""
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


def main_table(results: Results) -> Iterator[dict[str, str]]:
    """Yield for each router how well its models predict."""
    name = results.run.measure.name
    untouched: dict[str, Callable[[Cell], float | None]] = {
        "clean, untouched words": lambda cell: cell.clean.figure_of_kept,
        "attacked, untouched words": lambda cell: cell.attacked.figure_of_kept,
    }
    untouched = {column: read for column, read in untouched.items() if mean_of(results.cells, read) is not None}
    costs, matched = any(row.cost for row in results.rows), any(row.equal_compute for row in results.rows)
    for row in results.rows:
        cells = results.cells_of(row)
        clean, attacked = (
            "baseline"
            if results.is_baseline(row)
            else found.words
            if found
            else "not defined"
            if mean is None
            else "no seed in common"
            for found, mean in ((row.clean_difference, row.clean), (row.attacked_difference, row.attacked))
        )
        yield {
            **{key: written_value(row.settings[key]) if key in row.settings else NONE for key in results.swept},
            "seeds": str(len(row.seeds)),
            "parameters": f"{row.parameters:,}",
            "experts per token": decimal(row.experts_per_token),
            f"clean {name}": decimal(row.clean),
            "difference, clean": clean,
            f"attacked {name}": decimal(row.attacked),
            "difference, attacked": attacked,
            **{column: decimal(mean_of(cells, read)) for column, read in untouched.items()},
            **({COST: row.cost.words if row.cost else NONE} if costs else {}),
            **({CHANGED: _percent(row.changed)} if any(one.changed is not None for one in results.rows) else {}),
            **({"difference to equal compute": _matched(row)} if matched else {}),
        }


def _matched(row: Row) -> str:
    """Return a router's clean difference to the baseline that uses at least as many experts per token."""
    return NONE if row.equal_compute is None else f"to {row.equal_compute.router}: {row.equal_compute.words}"


def metrics_table(results: Results) -> Iterator[dict[str, str]]:
    """Yield for each router its further metrics; yield nothing if there are none."""
    names = [metric.name for metric in results.run.metrics]
    for row in results.rows if names else []:
        columns = {}
        for name in names:
            found = row.metrics.get(name)
            for text in ("clean", "attacked"):
                value = None if found is None else found.clean if text == "clean" else found.attacked
                difference = None if found is None else getattr(found, f"{text}_difference")
                columns[f"{name}, {text}"] = decimal(value, 4)
                columns[f"{name}, {text}, difference"] = (
                    "baseline" if results.is_baseline(row) else difference.words if difference else NONE
                )
        yield columns


def metrics_caption(results: Results) -> str:
    """Return the caption of the table of further metrics."""
    each = [f"{metric.name}: {metric.about}; {metric.better} is better." for metric in results.run.metrics]
    return f"{' '.join(each)} Means over seeds; differences to {results.rows[0].router}, paired by seed."


def routing_table(results: Results) -> Iterator[dict[str, str]]:
    """Yield for each router its routing metrics on clean data, means over layers and seeds."""
    widths = sorted(
        {strip.width for cell in results.cells for layer in cell.clean.routing.layers for strip in layer.near_ties.strips}
    )
    limited = any(layer.dropped for cell in results.cells for layer in cell.clean.routing.layers)
    for row in results.rows:
        cells = results.cells_of(row)
        states = [layer for cell in cells for layer in cell.clean.routing.layers]
        columns = {
            "entropy, nats": decimal(mean_of(states, lambda layer: layer.entropy), 3),
            "load unevenness (CV)": decimal(mean_of(states, lambda layer: layer.load.cv), 3),
            "dead experts per run": decimal(mean_of(cells, _dead), 1),
            **({"dropped experts": _percent(mean_of(states, _dropped))} if limited else {}),
            "pairs of tokens separated or joined by the next layer": _percent(
                mean_of(states, lambda layer: layer.instability)
            ),
        }
        for width in widths:  # the widths of all routers, so that all rows have the same columns
            shares = [strip.share for layer in states for strip in layer.near_ties.strips if strip.width == width]
            columns[f"near-ties ({width:g})"] = _percent(mean_of(shares, lambda share: share))
        yield columns


def main_caption(results: Results) -> str:
    """Return the caption of the main table."""
    measure = results.run.measure
    caption = (
        f"{measure.sentence} Means over seeds; differences to {results.rows[0].router}, paired by seed. "
        f"The attack: {measure.attack}."
    )
    if results.swept:
        caption += " Rows are compared with the baseline of the same setting."
    if results.targets_are_attacked:
        caption += (
            " The attack also changes the targets, so compare routers within a column, not columns with each other; only "
            "the columns of untouched words have the same targets."
        )
    if any(row.cost for row in results.rows):
        caption += (
            " The cost is the rise of the perplexity of untouched words, paired word by word, with the wider of two 95% "
            "intervals: over blocks of the text, and over seeds."
        )
    return caption


def _dead(cell: Cell) -> float:
    return float(sum(len(layer.load.dead) for layer in cell.clean.routing.layers))


def _dropped(layer: Layer) -> float | None:
    return None if layer.dropped is None else layer.dropped.share


def _percent(share: float | None) -> str:
    return decimal(share) if share is None else f"{100 * share:.2f}%"
