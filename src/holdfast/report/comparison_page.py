"""The HTML report of a comparison: its verdict and the page, one file that loads nothing else."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from holdfast.metrics import Difference
from holdfast.metrics.paired import EVERYTHING, FEWEST_SEEDS
from holdfast.report.comparison_tables import (
    accuracy_table,
    attacks_table,
    cost_table,
    domain_table,
    main_table,
    metrics_table,
    modalities_table,
    published_table,
    routing_table,
    settings_table,
    shifts_table,
)
from holdfast.report.curves import curves, evolutions
from holdfast.report.explorer import comparison_caption, comparison_explorer
from holdfast.report.export import Page
from holdfast.report.page_shell import as_texts, decimal, listed, rise, seconds_text, write_report_page
from holdfast.report.plot_data import Plot, styles
from holdfast.report.plots import by_layer, plots
from holdfast.report.strip import headline, scaled, strip
from holdfast.routing.grammar import written_value
from holdfast.train.image_task import HELD_OUT
from holdfast.train.recipe import changed_keys
from holdfast.train.results import Results, Row
from holdfast.train.task import Measure

BY_ROUTER = (metrics_table, accuracy_table, shifts_table, attacks_table, modalities_table)  # tables of single tasks
TABS = ("Result", "Cost", "Training", "Routing", "Explorer", "Method")
TAB_OF_PLOT = {"price": "Cost", **dict.fromkeys(("load", "entropy", "near-ties", "consistency"), "Routing")}
MOST_NAMED = 6  # differences on shifted test sets that the verdict names
# Of each pair a recipe has one; a sweep of the other replaces it.
ALTERNATIVES = {"training.steps": "training.epochs", "training.epochs": "training.steps"}


def write_report(results: Results | str | Path, path: str | Path, *, force: bool = False) -> Path:
    """Write the page of a comparison, given as results, as their file or as their folder. Overwrite only with `force`."""
    return write_report_page(Results, results, path, force=force)


def comparison_page(results: Results) -> Page:
    """Return the page as data, to be rendered or exported."""
    drawn, graphs, over_training = plots(results), evolutions(results), curves(results)
    return Page(
        "report.html",
        drawn,
        {
            "graphs": graphs,
            "curves": over_training,
            "styles": styles([row.label for row in results.rows]),
            "explorer": comparison_explorer(results),
        },
        brief=main_table(results, brief=True),
        sentences=[headline(results), *verdict(results)],
        exported={
            "made": made(results),
            "command": results.command or "",
            "paper": results.paper and results.paper.deviations,
        },
        title=results.title,
        tabs=TABS,
        strip=strip(results),
        made=made(results),
        command=results.command,
        routers=[row.label for row in results.rows],
        results=main_table(results),
        paper=results.paper,
        published=None if results.paper is None else published_table(results.paper.published, results),
        domains=domain_table(results),
        settings=settings_table(results),
        by_router=[make(results) for make in BY_ROUTER],
        costs=cost_table(results),
        routing=routing_table(results),
        plots={tab: [plot for plot in drawn if tab_of(plot) == tab] for tab in TABS},
        graphs=graphs,
        curves=over_training,
        explorer_caption=comparison_caption(results),
        layers=list(dict.fromkeys(name for row in results.rows for name, _ in by_layer(results.cells_of(row)))),
        how=how(results),
    )


def tab_of(plot: Plot) -> str:
    """Return the tab that a plot is on."""
    return "Training" if plot.name.startswith(("training", "validation")) else TAB_OF_PLOT.get(plot.name, "Result")


def made(results: Results) -> list[str]:
    """Return when and on what the cells were trained, and how long that took, as far as it is stored."""
    origins = [cell.origin for cell in results.cells]
    dates = sorted(origin.finished for origin in origins if origin.finished)
    devices = dict.fromkeys(origin.device for origin in origins if origin.device)
    seconds = [origin.seconds for origin in origins if origin.seconds is not None]
    date = datetime.fromisoformat(dates[-1]).astimezone(UTC) if dates else None
    found = [] if date is None else [f"{date.day} {date:%B %Y, %H:%M} UTC"]
    found += [", ".join(devices)] if devices else []
    found += [f"{seconds_text(sum(seconds))} for {len(seconds)} cells"] if seconds else []
    return found


def how(results: Results) -> dict[str, dict[str, str]]:
    """Return how the comparison was run: versions, what differs from the defaults of recipes, data, attack, batches."""
    run = results.run
    batches: dict[str, set[str]] = {}
    for cell in sorted(results.cells, key=lambda cell: cell.seed):
        batches.setdefault(f"seed {cell.seed}", set()).add(f"{cell.first_batch} … {cell.last_batch}")
    swept = {
        key: ", ".join(dict.fromkeys(written_value(row.settings.get(key)) for row in results.rows)) for key in results.swept
    }
    groups = {
        "Versions": results.versions,
        "Recipe, where it differs from the defaults": {
            key: text
            for key, text in as_texts(changed_keys(run.recipe)).items()
            if not {key, ALTERNATIVES.get(key)} & swept.keys()
        },
        "Sweep": swept,
        "Data": as_texts(run.data),
        "Attack": as_texts(run.attack),
        "Plugins, SHA-256": {str(plugin.get("name")): str(plugin.get("checksum")) for plugin in run.plugins},
        "Batches, first and last of each seed": {seed: "; ".join(sorted(hashes)) for seed, hashes in batches.items()},
        "Checksum": {f"{results.file_name}, SHA-256": hashlib.sha256(results.to_json().encode()).hexdigest()},
    }
    return {title: group for title, group in groups.items() if group}


def verdict(results: Results) -> tuple[str, ...]:
    """Return the comparison in a few sentences: clean data, attacked data, the cost of the attack, shifted test sets.

    An interval that contains 0 is "no difference". Nothing is claimed from fewer than three seeds.
    """
    measure, baseline, others = results.run.measure, results.baseline, results.others
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
    if reason := no_claim(results, _both(others)):
        return (*reason, *cost_sentences(results), *apart_sentences(results))
    on_clean = {row.router: row.clean_difference for row in others}
    under_attack = {row.router: row.attacked_difference for row in others}
    prices = {row.router: _price(row, baseline, measure) for row in others}
    what = f"the {measure.noun}", measure.points
    return (
        f"Against {baseline.router}, {_findings(on_clean, *what, prices)}.",
        f"Under attack, {_findings(under_attack, *what)}.",
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
    costs = {row.router: row.cost for row in rows if row.cost is not None}
    if all(cost.over != EVERYTHING for cost in costs.values()):
        return ()
    certain = {router: rise(cost.mean) for router, cost in costs.items() if cost.kind == "higher"}
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
        apart = []
        for router, one in known:
            if one.kind != "same":
                verb, size = scaled(one, 100).change(" points")
                apart.append(f"{router} {verb} it by {size}")
        if not apart:
            found.append(f"No router's cost is shown to differ from that of {results.baseline.router}.")
        else:
            found.append(f"Against the cost of {results.baseline.router}, {'; '.join(apart)}; for no other is one shown.")
    return tuple(found)


def _findings(
    differences: Mapping[str, Difference | None], what: str, unit: str, prices: Mapping[str, str] | None = None
) -> str:
    """Return a clause about routers with a difference, then about those without, then about those that cannot be judged.

    prices  of routers that use another number of experts, in words
    """
    parts, unknown = [], list[str]()
    same: dict[int, list[tuple[str, float]]] = {}
    for router, difference in differences.items():
        price = (prices or {}).get(router)
        if difference is None or difference.kind == "unknown":
            unknown.append(router)
        elif difference.kind == "same":
            name = f"{router} ({price})" if price else router
            same.setdefault(difference.seeds, []).append((name, difference.shows))
        else:
            verb, size = difference.change(unit)
            parts.append(f"{router} {verb} {what} by {size}" + (f", using {price}" if price else ""))
    for seeds, found in sorted(same.items()):
        shows = dict.fromkeys(f"{size(ends for _, ends in found):.2g}" for size in (min, max))
        names, would = listed([name for name, _ in found]), " to ".join(shows) + unit
        parts.append(f"{names} made no difference that {seeds} seeds can show (they would show one above {would})")
    if unknown:
        parts.append(f"{listed(unknown)} cannot be judged from fewer than {FEWEST_SEEDS} seeds")
    return "; ".join(parts)


def _level(value: float | None, measure: Measure) -> str:
    unit = {"": "", "%": "%"}.get(measure.unit, f" {measure.unit}")
    return decimal(value, measure.digits) + (unit if value is not None else "")


def _price(row: Row, baseline: Row, measure: Measure) -> str:
    """Return a note if a router uses another number of experts than the baseline: more compute may explain a gain."""
    used, usual = decimal(row.experts_per_token), decimal(baseline.experts_per_token)
    if used == usual:
        return ""
    note, equal = f"{used} experts per token instead of {usual}", row.equal_compute
    if equal is None or equal.difference.kind == "unknown":
        return note
    if equal.difference.kind == "same":
        return f"{note}, no difference to {equal.router}"
    word = "better" if equal.difference.kind == measure.better else "worse"
    return f"{note}, {abs(equal.difference.mean):.3g} {word} than {equal.router}"


def no_claim(results: Results, differences: Sequence[Difference | None]) -> tuple[str, ...]:
    """Return why none of these differences may be claimed, in a sentence or two; empty if one may."""
    known = [difference for difference in differences if difference is not None]
    if any(difference.kind != "unknown" for difference in known):
        return ()
    if any(difference.over == "these examples only" for difference in known):
        return (
            "The results of single test examples are not stored with these cells, so no difference can be judged; train "
            "them again in a new folder.",
        )
    if any(len(row.seeds) >= FEWEST_SEEDS for row in results.others):
        return (
            f"The {results.run.measure.noun} is not defined in enough runs to compare routers with "
            f"{results.baseline.router}.",
            "A correlation with constant predictions, for example, is not defined.",
        )
    return (
        f"Fewer than {FEWEST_SEEDS} seeds cannot show whether a router differs from {results.baseline.router}.",
        f"The intervals are for these models only; train with {FEWEST_SEEDS} seeds or more to compare routers.",
    )


def sweep_verdict(results: Results) -> tuple[str, ...]:
    """Return a sweep in a few sentences: in how many settings each router differs from the baseline of the same setting."""
    measure, baseline, others = results.run.measure, results.baseline.router, results.others
    keys = listed(results.swept)
    found = [f"{len(results.settings)} settings of {keys} were trained; each router is compared within equal settings."]
    if not others:
        found.append(f"Only {baseline} was trained, so there is no other router to compare it with.")
    elif reason := no_claim(results, _both(others)):
        found += reason
    else:
        for where, attacked in (("On clean data", False), ("Under attack", True)):
            counts = "; ".join(_counts(router, results, attacked) for router in dict.fromkeys(row.router for row in others))
            found.append(f"{where}, against {baseline}: {counts}.")
        count = sum(_kind(difference) != "unknown" for difference in _both(others))
        found.append(f"Without any difference, about {0.05 * count:.2g} of these {count} intervals would miss 0 by chance.")
    known = [row for row in results.rows if row.clean is not None and row.apart is None]
    if known:
        best = (min if measure.better == "lower" else max)(known, key=lambda row: row.clean or 0.0)
        word = "lowest" if measure.better == "lower" else "highest"
        found.append(f"The {word} clean {measure.noun}, {decimal(best.clean, measure.digits)}, has {best.label}.")
    return tuple(found)


def _counts(router: str, results: Results, attacked: bool) -> str:
    """Return in how many settings a router is better, worse, not different, or cannot be judged."""
    noun = results.run.measure.noun
    words = {
        "lower": f"lowered the {noun}",
        "higher": "raised it",
        "same": "made no difference that its seeds can show",
        "unknown": "cannot be judged",
    }
    rows = [row for row in results.rows if row.router == router]
    kinds = [_kind(row.attacked_difference if attacked else row.clean_difference) for row in rows]
    if "lower" not in kinds:
        words["higher"] = f"raised the {noun}"
    parts = [f"{text} in {kinds.count(kind)}" for kind, text in words.items() if kind in kinds]
    return f"{router} {listed(parts)} of {len(rows)} setting{'s' if len(rows) > 1 else ''}"


def _both(rows: Sequence[Row]) -> list[Difference | None]:
    """Return the clean and the attacked differences."""
    return [difference for row in rows for difference in (row.clean_difference, row.attacked_difference)]


def _kind(difference: Difference | None) -> str:
    return "unknown" if difference is None else difference.kind


def domain_verdict(results: Results) -> tuple[str, ...]:
    """Return the comparison in a few sentences: the mean and the worst accuracy, each against the baseline."""
    rows, baseline = results.domains, results.baseline.router
    domains = list(dict.fromkeys(domain for row in rows for domain in row.accuracy))
    found = [f"{len(domains)} domains, {listed(domains)}, were held out in turn; accuracies are on the held-out domains."]
    for row in rows:
        if results.is_baseline(row):
            level = f"{decimal(row.mean.mean)}%, its worst {decimal(row.worst.mean)}%"
            found.append(f"The mean accuracy of {baseline} is {level}.")
    others = [row for row in rows if not results.is_baseline(row)]
    if not others:
        return (*found, f"Only {baseline} was trained, so there is nothing to compare it with.")
    if reason := no_claim(results, [one for row in others for one in (row.mean_difference, row.worst_difference)]):
        return (*found, *reason)
    unit = " percentage points"
    means = _findings({row.router: row.mean_difference for row in others}, "it", unit)
    worsts = _findings({row.router: row.worst_difference for row in others}, "it", unit)
    return (*found, f"Against {baseline}, in the mean accuracy: {means}.", f"In the worst accuracy: {worsts}.")


def shift_sentences(results: Results) -> tuple[str, ...]:
    """Return which routers differ from the baseline on which shifted test sets; empty if nothing can be compared."""
    judged, found = False, []
    for row in results.rows:
        for name, one in row.shifts.items():
            if one.difference is None or one.difference.kind == "unknown":
                continue
            judged = True
            if one.difference.kind != "same":
                verb, size = one.difference.change(" percentage points")
                found.append(f"{row.label} {verb} the {one.measure.partition(',')[0]} on {name} by {size}")
    if not judged:
        return ()
    tests = list(dict.fromkeys(name for row in results.rows for name in row.shifts))
    where = f"On the shifted test set{'s' if len(tests) > 1 else ''} {listed(tests)}"
    if not found:
        return (f"{where}, no router made a difference to {results.baseline.router} that its seeds can show.",)
    named, left = found[:MOST_NAMED], len(found) - MOST_NAMED
    end = f"the table has {left} more" if left > 0 else "no other difference can be shown"
    return (f"{where}, {'; '.join(named)}; {end}.",)
