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
from holdfast.report.stored_comparison import EVERYTHING, NAME, Cell, Difference, Layer, Measure, Results, Row
from holdfast.report.sweep_tables import side_by_side, sweep_verdict
from holdfast.routing.grammar import written_value

COST = "cost of the attack on untouched words"
CHANGED = "predictions that the attack changes"
NONE = "\u2013"
COVERED = "95% intervals cover seeds and test examples from 3 seeds on; with fewer, these models only."
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
        routers=[{"name": row.label, "router": row.name, "mark": mark(place)} for place, row in enumerate(results.rows)],
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

    An interval that contains 0 is "no difference". Nothing is claimed from fewer than three seeds.
    """
    measure, baseline, others = results.run.measure, results.rows[0], results.others
    if baseline.apart:
        return (
            f"{baseline.router}, the baseline, {baseline.apart}: its {measure.noun} cannot be compared with that of another "
            "router. Name another router first, in a new folder.",
        )
    if results.domains and results.swept == [HELD_OUT]:
        return domain_verdict(results)
    if results.swept:
        return sweep_verdict(results) + shift_sentences(results) + apart_sentences(results)
    if not others:
        alone = f"Only {baseline.router} was trained, so there is nothing to compare it with."
        level = f"The {measure.noun} of {baseline.router} is {_level(baseline.clean, measure)} on clean data"
        attacked = f"{_level(baseline.attacked, measure)} under attack"
        if baseline.attacks_some:
            count = baseline.examples["attacked"]
            level += f"; on the {count} attacked examples {_level(baseline.attacked_clean, measure)} without the attack"
        first = () if len(results.rows) > 1 else (alone,)
        return (*first, f"{level} and {attacked}.", *cost_sentences(results), *apart_sentences(results))
    if reason := results.no_claim([one for row in others for one in (row.clean_difference, row.attacked_difference)]):
        return (*reason, *cost_sentences(results), *apart_sentences(results))
    return (
        f"Against {baseline.router}, {_findings(results, [row.clean_difference for row in others], compute=True)}.",
        f"Under attack, {_findings(results, [row.attacked_difference for row in others])}.",
        *cost_sentences(results),
        *shift_sentences(results),
        *apart_sentences(results),
    )


def apart_sentences(results: Results) -> tuple[str, ...]:
    """Return which routers stand apart, and why; empty if none does."""
    found = dict.fromkeys((row.router, row.apart) for row in results.rows if row.apart)
    noun = results.run.measure.noun
    return tuple(f"{router} {why}, so its {noun} is not compared with that of the others." for router, why in found)


def cost_sentences(results: Results) -> tuple[str, ...]:
    """Return what the attack costs each router on untouched words; empty if that was not measured."""
    rows = [row for row in results.rows if row.apart is None]
    costs = {row.router: row.cost for row in rows if row.cost is not None and row.cost.mean is not None}
    if all(cost.over != EVERYTHING for cost in costs.values()):
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
    known = [(row.router, one) for row in rows if (one := row.cost_difference) is not None and one.kind != "unknown"]
    if known:
        apart = [_cost_change(router, one) for router, one in known if one.kind != "same"]
        if not apart:
            found.append(f"No router's cost is shown to differ from that of {results.rows[0].router}.")
        else:
            found.append(f"Against the cost of {results.rows[0].router}, {'; '.join(apart)}; for no other is one shown.")
    return tuple(found)


def _cost_change(router: str, difference: Difference) -> str:
    assert difference.mean is not None and difference.low is not None and difference.high is not None
    verb, low, high = "more", difference.low, difference.high
    if difference.mean < 0:
        verb, low, high = "less", -difference.high, -difference.low
    size, bounds = 100 * abs(difference.mean), f"{100 * low:.2g} to {100 * high:.2g}"
    return f"that of {router} is {verb} by {size:.2g} points (95% interval {bounds})"


def _findings(results: Results, differences: Sequence[Difference | None], *, compute: bool = False) -> str:
    """Return a clause about routers with a difference, then about those without, then about those that cannot be judged."""
    baseline, measure = results.rows[0], results.run.measure
    parts, unknown = [], list[str]()
    same: dict[int, list[tuple[str, float]]] = {}
    for row, difference in zip(results.others, differences, strict=True):
        price = _price(row, baseline, measure) if compute else ""
        if difference is None or difference.kind == "unknown":
            unknown.append(row.router)
        elif difference.kind == "same":
            name = f"{row.router} ({price})" if price else row.router
            same.setdefault(difference.seeds, []).append((name, difference.shows))
        else:
            verb, size = difference.change(measure.points)
            parts.append(f"{row.router} {verb} the {measure.noun} by {size}" + (f", using {price}" if price else ""))
    for seeds, found in sorted(same.items()):
        would = _range([shows for _, shows in found]) + measure.points
        names = listed([name for name, _ in found])
        parts.append(f"{names} made no difference that {seeds} seeds can show (they would show one above {would})")
    if unknown:
        parts.append(f"{listed(unknown)} cannot be judged from fewer than 3 seeds")
    return "; ".join(parts)


def _range(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2g}", f"{max(values):.2g}"
    return least if least == most else f"{least} to {most}"


def _level(value: float | None, measure: Measure) -> str:
    unit = {"": "", "%": "%"}.get(measure.unit, f" {measure.unit}")
    return decimal(value, measure.digits) + (unit if value is not None else "")


def _price(row: Row, baseline: Row, measure: Measure) -> str:
    """Return a note if a router uses another number of experts than the baseline: more compute may explain a gain."""
    used, usual = decimal(row.experts_per_token), decimal(baseline.experts_per_token)
    return "" if used == usual else f"{used} experts per token instead of {usual}{_at_equal_compute(row, measure)}"


def _at_equal_compute(row: Row, measure: Measure) -> str:
    """Return the difference to the baseline with at least as many experts per token, if that was trained."""
    found = row.equal_compute
    if found is None or found.mean is None or found.kind == "unknown":
        return ""
    if found.kind == "same":
        return f", no difference to {found.router}"
    return f", {abs(found.mean):.3g} {'better' if found.kind == measure.better else 'worse'} than {found.router}"


def main_table(results: Results) -> Iterator[dict[str, str]]:
    """Yield for each router how well its models predict."""
    name, digits = results.run.measure.name, results.run.measure.digits
    untouched: dict[str, Callable[[Cell], float | None]] = {
        "clean, untouched words": lambda cell: cell.clean.figure_of_kept,
        "attacked, untouched words": lambda cell: cell.attacked.figure_of_kept,
    }
    untouched = {column: read for column, read in untouched.items() if mean_of(results.cells, read) is not None}
    costs, matched = any(row.cost for row in results.rows), any(row.equal_compute for row in results.rows)
    some = any(row.attacks_some for row in results.rows)
    for row in results.rows:
        cells = results.cells_of(row)
        clean, attacked = (
            "baseline"
            if results.is_baseline(row)
            else found.words
            if found
            else row.apart or results.rows[0].apart or ("not defined" if mean is None else "no seed in common")
            for found, mean in ((row.clean_difference, row.clean), (row.attacked_difference, row.attacked))
        )
        yield {
            **{key: written_value(row.settings[key]) if key in row.settings else NONE for key in results.swept},
            "seeds": str(len(row.seeds)),
            "parameters": f"{row.parameters:,}",
            "experts per token": decimal(row.experts_per_token),
            f"clean {name}": decimal(row.clean, digits),
            "difference, clean": clean,
            **({f"clean {name}, attacked examples": decimal(row.clean_beside_attacked, digits)} if some else {}),
            f"attacked {name}": decimal(row.attacked, digits),
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
    some = any(row.attacks_some for row in results.rows)
    for row in results.rows if names else []:
        columns = {}
        for name in names:
            found = row.metrics.get(name)
            for text in ("clean", "attacked"):
                value = None if found is None else found.clean if text == "clean" else found.attacked
                if text == "attacked" and some:
                    columns[f"{name}, clean, attacked examples"] = decimal(found.attacked_clean if found else None, 4)
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
        f"{measure.sentence} Means over seeds; differences to {results.rows[0].router}, paired by seed and by test example. "
        f"{COVERED} The attack: {measure.attack}."
    )
    if results.rows[0].attacks_some:
        counts = results.rows[0].examples
        caption += f" {counts['attacked']} of {counts['clean']} test examples were attacked."
    if apart := dict.fromkeys(row.apart for row in results.rows if row.apart):
        caption += f" A row that {listed([str(one) for one in apart])} has an easier task and is not compared."
    if results.swept:
        caption += " Rows are compared with the baseline of the same setting."
    if results.targets_are_attacked:
        caption += (
            " The attack also changes the targets, so compare routers within a column, not columns with each other; only "
            "the columns of untouched words have the same targets."
        )
    if any(row.cost for row in results.rows):
        caption += (
            " The cost is the rise of the perplexity of untouched words, paired word by word, with its 95% interval over "
            "seeds and blocks of the text."
        )
    return caption


def _dead(cell: Cell) -> float:
    return float(sum(len(layer.load.dead) for layer in cell.clean.routing.layers))


def _dropped(layer: Layer) -> float | None:
    return None if layer.dropped is None else layer.dropped.share


def _percent(share: float | None) -> str:
    return decimal(share) if share is None else f"{100 * share:.2f}%"
