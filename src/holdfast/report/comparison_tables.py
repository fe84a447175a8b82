"""The tables of a comparison. Each is made once, for the page and, with `brief` differences, for the terminal.

`published_table` has a paper's published figures beside those of a comparison that ran the same experiment.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from holdfast.auditing.reports import known_mean
from holdfast.metrics import Difference
from holdfast.metrics.paired import EVERYTHING, FEWEST_SEEDS
from holdfast.report.page_shell import decimal, listed, percent, rise, signed
from holdfast.report.tables import Cell, Table
from holdfast.routing.grammar import written_pairs, written_value
from holdfast.train.image_task import HELD_OUT
from holdfast.train.papers import OF_CELLS, Column, Published
from holdfast.train.results import DomainRow, Results, Row, RowCost

COST = "cost of the attack on untouched words"
CHANGED = "predictions that the attack changes"
KEPT = "{}, untouched words"
EQUAL_COMPUTE = "difference to equal compute"
ONLY_ON_PAGES = ("seeds", KEPT.format("clean"), KEPT.format("attacked"), CHANGED, EQUAL_COMPUTE)
COVERED = "95% intervals cover seeds and test examples from 3 seeds on; with fewer, these models only."
NONE = decimal(None)


def difference_cell(
    results: Results, row: Row | DomainRow, difference: Difference | None, brief: int | None = None, missing: str = NONE
) -> str:
    """Return a difference to the baseline as a cell; `brief` is the number of decimals of its short form."""
    if results.is_baseline(row):
        return "baseline"
    if difference is None:
        return (row.apart if isinstance(row, Row) else None) or results.baseline.apart or missing
    text = difference.words if brief is None else difference.brief(brief)
    return Cell(text, difference.mean, difference.low, difference.high)


def main_table(results: Results, *, brief: bool = False) -> Table:
    """Return how well the models of each router predict."""
    measure, rows = results.run.measure, results.rows
    name, digits = measure.name, measure.digits
    costs, some = any(row.cost for row in rows), any(row.attacks_some for row in rows)

    def difference(row: Row, found: Difference | None, figure: float | None) -> str:
        missing = "not defined" if figure is None else "no seed in common"
        return difference_cell(results, row, found, digits if brief else None, missing)

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        yield "router", row.name
        for key in results.swept:
            yield key, written_value(row.settings[key]) if key in row.settings else NONE
        yield "seeds", str(len(row.seeds))
        yield "weights", f"{row.parameters:,}"
        yield "experts per token", decimal(row.experts_per_token)
        yield f"clean {name}", decimal(row.clean, digits)
        yield "clean, difference", difference(row, row.clean_difference, row.clean)
        if some:
            yield f"clean {name}, attacked examples", decimal(row.clean_beside_attacked, digits)
        yield f"attacked {name}", decimal(row.attacked, digits)
        if not (brief and costs):
            yield "attacked, difference", difference(row, row.attacked_difference, row.attacked)
        if results.targets_are_attacked:
            yield KEPT.format("clean"), decimal(row.clean_kept)
            yield KEPT.format("attacked"), decimal(row.attacked_kept)
        if costs:
            yield COST, _cost(row.cost, brief)
        if any(one.predictions_changed is not None for one in rows):
            yield CHANGED, percent(row.predictions_changed)
        if any(one.equal_compute for one in rows):
            found, text = row.equal_compute, NONE
            if found is not None:
                one = found.difference
                text = Cell(f"to {found.router}: {one.words}", one.mean, one.low, one.high)
            yield EQUAL_COMPUTE, text

    table = Table.of("Results", (dict(cells(row)) for row in rows), _main_note(results)).without_empty()
    return table.without(*ONLY_ON_PAGES) if brief else table


def _cost(cost: RowCost | None, brief: bool) -> str:
    """Return the cost of the attack as the rise of the perplexity."""
    if cost is None:
        return NONE
    if cost.low is None or cost.high is None:
        return Cell(cost.words, rise(cost.mean))
    only = "" if cost.over == EVERYTHING else f",\n{cost.over}"
    mean, low, high = (rise(nats) for nats in (cost.mean, cost.low, cost.high))
    text = f"{signed(mean, '.2f')}%\n({signed(low, '.2f')} to {signed(high, '.2f')}){only}" if brief else cost.words
    return Cell(text, mean, low, high)


def _main_note(results: Results) -> str:
    measure, baseline = results.run.measure, results.baseline
    note = (
        f"{measure.sentence} Means over seeds; differences to {baseline.router}, paired by seed and by test example. "
        f"{COVERED} The attack: {measure.attack}."
    )
    if baseline.attacks_some:
        note += f" {baseline.examples['attacked']} of {baseline.examples['clean']} test examples were attacked."
    if apart := dict.fromkeys(row.apart for row in results.rows if row.apart):
        note += f" A row that {listed(list(apart))} has an easier task and is not compared."
    if results.swept:
        note += " Rows are compared with the baseline of the same setting."
    if results.targets_are_attacked:
        note += (
            " The attack also changes the targets, so compare routers within a column, not columns with each other; only "
            "the columns of untouched words have the same targets."
        )
    if any(row.cost for row in results.rows):
        note += (
            " The cost is the rise of the perplexity of untouched words, paired word by word, with its 95% interval over "
            "seeds and blocks of the text."
        )
    return note


def _by_router(
    title: str, results: Results, cells: Callable[[Row], Iterable[tuple[str, str]]], note: str, shown: object = True
) -> Table:
    """Return a table with a row for each router, without empty columns; without rows if it is not `shown`."""
    rows = ({"router": row.label, **dict(cells(row))} for row in results.rows if shown)
    return Table.of(title, rows, note).without_empty()


def cost_table(results: Results) -> Table:
    """Return what the models of each router cost."""
    of = "image" if results.run.recipe.get("task") == "images" else "token"

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        yield "weights", f"{row.parameters:,}"
        yield "experts per token", decimal(row.experts_per_token)
        if any(one.step_seconds is not None for one in results.rows):
            yield "time of a training step, ms", decimal(row.step_seconds and 1000 * row.step_seconds, 1)
        if any(one.flops is not None for one in results.rows):
            yield f"MFLOPs of a forward, per {of}", decimal(row.flops and row.flops / 1e6)
        if any(one.peak_bytes is not None for one in results.rows):
            yield "peak GPU memory, MiB", decimal(row.peak_bytes and row.peak_bytes / 2**20, 1)
        seconds = known_mean(cell.origin.seconds for cell in results.cells_of(row))
        if seconds is not None:
            yield "training, evaluation and attacks of a seed, s", decimal(seconds, 1)

    note = (
        "Means over seeds. The time of a step is the median within a training, on a CPU the processor's time. FLOPs are "
        "those of matrix products in evaluation."
    )
    return _by_router("Cost", results, cells, note)


def domain_table(results: Results, *, brief: bool = False) -> Table:
    """Return the accuracy on every held-out domain, the mean and the worst, with differences; empty for other tasks."""
    domains = list(dict.fromkeys(domain for row in results.domains for domain in row.accuracy))

    def cells(row: DomainRow) -> Iterator[tuple[str, str]]:
        yield "router", ", ".join(filter(None, [row.router, written_pairs(row.settings)]))
        yield "seeds", str(len(row.seeds))
        for domain in domains:
            level = row.accuracy.get(domain)
            yield f"{domain}, %", decimal(level.mean if level else None)
        for name, level, found in (("mean", row.mean, row.mean_difference), ("worst", row.worst, row.worst_difference)):
            cell = decimal(level.mean)
            if not brief and level.low is not None and level.high is not None:
                only = "" if level.over == EVERYTHING else f", {level.over}"
                text = f"{cell} (95% interval {decimal(level.low)} to {decimal(level.high)}{only})"
                cell = Cell(text, level.mean, level.low, level.high)
            yield f"{name}, %", cell
            yield f"{name}, difference", difference_cell(results, row, found, 2 if brief else None, "no seed in common")

    note = (
        "Accuracy on the whole held-out domain of models that were trained on the others, in percent; higher is better. "
        "Mean and worst are over the held-out domains of each seed, then means over the seeds that have all of them, with "
        f"differences to {results.baseline.router}, paired by seed and by image. From {FEWEST_SEEDS} seeds on, 95% "
        "intervals cover seeds and images."
    )
    return Table.of("Held-out domains", (dict(cells(row)) for row in results.domains), note)


def settings_table(results: Results) -> Table:
    """Return the settings of a sweep side by side: the clean and the attacked result of every router.

    The table is empty without a sweep, and if only the held-out domain differs: `domain_table` compares domains.
    """
    names = {row.router: row.name for row in results.rows}
    rows = {(row.router, row.setting_label): row for row in results.rows}
    digits, some = results.run.measure.digits, any(row.attacks_some for row in results.rows)

    def cells(setting: str) -> Iterator[tuple[str, str]]:
        yield "setting", setting
        for router, name in names.items():
            row = rows.get((router, setting))
            clean = None if row is None else row.clean_beside_attacked if some else row.clean
            yield f"{name}, clean{', attacked examples' if some else ''}", decimal(clean, digits)
            yield f"{name}, attacked", decimal(row.attacked if row else None, digits)

    is_shown = results.swept and not (results.domains and results.swept == [HELD_OUT])
    equal = (
        "Settings with the same held-out domain have the same test data, and the attack is the same in all."
        if results.domains
        else "The test data and the attack are the same in all settings."
    )
    note = f"{results.run.measure.sentence} Means over seeds. {equal}"
    return Table.of("Settings side by side", (dict(cells(one)) for one in results.settings if is_shown), note)


def metrics_table(results: Results, *, brief: bool = False) -> Table:
    """Return the further metrics of the recipe; empty if it has none."""
    metrics, some = results.run.metrics, any(row.attacks_some for row in results.rows)

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        for name in (metric.name for metric in metrics):
            if (found := row.metrics.get(name)) is not None:
                short = 4 if brief else None
                yield f"{name}, clean", decimal(found.clean, 4)
                yield f"{name}, clean, difference", difference_cell(results, row, found.clean_difference, short)
                if some:
                    yield f"{name}, clean, attacked examples", decimal(found.attacked_clean, 4)
                if found.attacked is not None:
                    yield f"{name}, attacked", decimal(found.attacked, 4)
                    yield f"{name}, attacked, difference", difference_cell(results, row, found.attacked_difference, short)

    each = " ".join(f"{metric.name}: {metric.about}; {metric.better} is better." for metric in metrics)
    note = f"{each} Means over seeds; differences to {results.baseline.router}, paired by seed."
    return _by_router("Other metrics", results, cells, note, metrics)


def shifts_table(results: Results, *, brief: bool = False) -> Table:
    """Return the results on shifted test sets; empty if there are none."""
    tests = {name: shift.measure for row in results.rows for name, shift in row.shifts.items()}
    better = {shift.measure: shift.better for row in results.rows for shift in row.shifts.values()}

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        for name, measure in tests.items():
            shift = row.shifts.get(name)
            yield f"{name}, {measure}", decimal(shift.figure if shift else None)
            difference = shift.difference if shift else None
            yield f"{name}, difference", difference_cell(results, row, difference, 2 if brief else None)

    each = " ".join(f"{measure.partition(',')[0]}: {which} is better." for measure, which in better.items())
    note = f"{each} Means over seeds; differences to {results.baseline.router}, paired by seed."
    return _by_router("Shifted test sets", results, cells, note, tests)


def accuracy_table(results: Results, *, brief: bool = False) -> Table:
    """Return the accuracy on clean images and under every attack; empty for other tasks."""
    names = list(dict.fromkeys(name for row in results.rows for name in row.scores))
    is_shown = names and results.run.recipe.get("task") == "images"

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        for name in names:
            score = row.scores.get(name)
            if name != "clean":
                yield f"clean, images of {name}", decimal(100 - score.clean if score and score.clean is not None else None)
            error = score.level if score else None
            accuracy = decimal(100 - error.mean if error else None)
            if error and error.low is not None and error.high is not None:
                low, high = 100 - error.high, 100 - error.low
                accuracy = Cell(f"{accuracy} ({decimal(low)} to {decimal(high)})", accuracy.value, low, high)
            yield name, accuracy
            difference = -score.difference if score and score.difference else None  # of accuracies, not of errors
            yield f"{name}, difference", difference_cell(results, row, difference, 2 if brief else None)

    counts: dict[str, int] = {}  # the same in every cell: they follow from the recipe
    for cell in results.cells:
        stored = {"clean": cell.clean.examples, **{name: trial.examples for name, trial in cell.trials.items()}}
        counts |= {name: count for name, count in stored.items() if count is not None}
    note = (
        "The share of images that is classified correctly, in percent; higher is better. Means over seeds with 95% "
        f"intervals{intervals_cover(results)}; differences to {results.baseline.router}, paired by seed and by image. "
        "Beside each attack stands the clean accuracy of the same images."
    )
    if counts:
        note += f" Test images: {', '.join(f'{name} {count:,}' for name, count in counts.items())}."
    return _by_router("Accuracy, clean and attacked", results, cells, note, is_shown)


def intervals_cover(results: Results) -> str:
    """Return what the intervals of the rows cover, as an addition to the word."""
    levels = [score.level for row in results.rows for score in row.scores.values()]
    overs = dict.fromkeys(level.over for level in levels if level and level.over)
    return f" ({', '.join(overs)})" if overs else ""


def attacks_table(results: Results) -> Table:
    """Return the result under every attack; empty if there was no attack, or if `accuracy_table` has them."""
    names = attack_names(results) if results.run.recipe.get("task") != "images" else []
    with_cost = {name for cell in results.cells for name, trial in cell.trials.items() if trial.cost}

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        for name in names:
            trials = [cell.trials[name] for cell in results.cells_of(row) if name in cell.trials]
            yield name, decimal(known_mean(trial.figure for trial in trials), results.run.measure.digits)
            if name in with_cost:
                nats = known_mean(trial.cost.mean for trial in trials if trial.cost)
                cost = NONE if nats is None else Cell(signed(rise(nats), ".2f") + "%", rise(nats))
                yield f"{name}, cost on untouched words", cost
            changed = known_mean(trial.predictions_changed for trial in trials)
            if changed is not None:
                yield f"{name}, predictions changed", percent(changed)

    note = f"{results.run.measure.sentence} Means over seeds."
    if results.targets_are_attacked:
        note += (
            " A misspelt word is often the unknown word, which is easy to predict, so a result may be below the clean one; "
            "the cost is measured on the untouched words."
        )
    return _by_router("Every attack", results, cells, note, names)


def attack_names(results: Results) -> list[str]:
    """Return the names of all attacks, in the order of the stored results."""
    return list(dict.fromkeys(name for cell in results.cells for name in cell.trials))


def routing_table(results: Results) -> Table:
    """Return the routing metrics on clean data, means over layers and seeds."""
    every = [layer for cell in results.cells for layer in cell.clean.routing.layers]
    widths = sorted({strip.width for layer in every for strip in layer.near_ties.strips})
    limited = any(layer.dropped for layer in every)

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        cells = results.cells_of(row)
        layers = [layer for cell in cells for layer in cell.clean.routing.layers]
        yield "entropy, nats", decimal(known_mean(layer.entropy for layer in layers), 3)
        yield "load unevenness (CV)", decimal(known_mean(layer.load.cv for layer in layers), 3)
        dead = known_mean(sum(len(layer.load.dead) for layer in cell.clean.routing.layers) for cell in cells)
        yield "dead experts per run", decimal(dead, 1)
        if limited:
            yield "dropped experts", percent(known_mean(layer.dropped.share for layer in layers if layer.dropped))
        apart = known_mean(layer.instability for layer in layers)
        yield "pairs of tokens separated or joined by the next layer", percent(apart)
        for width in widths:  # the widths of all routers, so that all rows have the same columns
            strips = [strip for layer in layers for strip in layer.near_ties.strips if strip.width == width]
            yield f"near-ties ({width:g})", percent(known_mean(strip.share for strip in strips))

    note = (
        "On clean data, means over layers and seeds. A dead expert is one that no token selected. Near-ties (w): tokens "
        "whose last selected expert and the next differ by less than w."
    )
    return _by_router("Routing metrics", results, cells, note)


MODALITY_COLUMNS = {  # of ModalityLayer
    "overlap of the loads of images and texts": "overlap",
    "experts of one modality": "one_modality",
    "image tokens that flip, pictures corrupted": "image_corrupted",
    "text tokens that flip, pictures corrupted": "text_corrupted",
    "image tokens that flip, questions reworded": "image_reworded",
    "text tokens that flip, questions reworded": "text_reworded",
}
MODALITY_NOTE = (
    "Overlap: 100% if tokens of images and of texts use experts alike, 0% if they have none in common. Experts of one "
    "modality: those that serve tokens of one modality only, among all that are used. Flips: the share of tokens whose "
    "experts change; of reworded questions, tokens that are in both texts."
)


def modalities_table(results: Results, *, brief: bool = False) -> Table:
    """Return how tokens of images and of texts are routed in vision-language models; empty for other tasks."""

    def cells(row: Row) -> Iterator[tuple[str, str]]:
        layers = [layer for cell in results.cells_of(row) for layer in cell.clean.modalities]
        for name, key in MODALITY_COLUMNS.items():
            yield name, percent(known_mean(getattr(layer, key) for layer in layers))

    is_shown = any(cell.clean.modalities for cell in results.cells)
    note = f"{MODALITY_NOTE} Means over seeds and over the layers that have such tokens."
    return _by_router("Images and texts", results, cells, note, is_shown)


def published_table(published: Published, results: Results | None = None) -> Table:
    """Return the rows of the paper's table, and after each figure ours, if there are results; then the routers it lacks."""
    title, note = "Published figures", ""
    if results is not None and (paper := results.paper) is not None:
        title = f"{paper.name} ({', '.join(paper.covers)}): published figures, and ours"
        note = f"The page lists {len(paper.deviations)} deviations from the paper's experiment."
    rows = {} if results is None else _paper_rows(results)
    printed_routers = {row.get("router") for row in published.rows}
    listed = [*published.rows, *({"name": "", "router": name} for name in rows if name not in printed_routers)]

    def cells(printed: dict[str, object]) -> Iterator[tuple[str, str]]:
        yield "in the paper", str(printed["name"])
        yield "router", str(printed.get("router", ""))
        for key, column in published.columns.items():
            yield column.heading, str(printed.get(key, ""))
            if results is not None and column.ours is not None:
                row = rows.get(str(printed.get("router")))
                of_cells = {} if row is None or results.paper is None else results.paper.of_cells.get(row.router, {})
                ours = "" if row is None else our_figure(_over_domains(row, results), column, of_cells)
                yield f"{column.heading}, here", ours

    return Table.of(title, (dict(cells(row)) for row in listed), note)


def _paper_rows(results: Results) -> dict[str, Row]:
    """Return the row of each router that stands for the paper's; none of a sweep that the paper does not have."""
    if results.swept and results.paper is not None and results.paper.sweep == results.swept:
        sign = 1 if results.run.measure.better == "lower" else -1
        worst_first = sorted(results.rows, key=lambda row: math.inf if row.clean is None else sign * row.clean, reverse=True)
        return {row.router: row for row in worst_first}
    return {row.router: row for row in results.rows} if results.domains or not results.swept else {}


def _over_domains(row: Row, results: Results) -> Row:
    """Return a row with the mean error over held-out domains, if several were held out."""
    means = {one.router: one.mean.mean for one in results.domains}
    return replace(row, clean=100 - means[row.router]) if row.router in means else row


def our_figure(row: Row, column: Column, of_cells: Mapping[str, float | None]) -> str:
    """Return our number for a published column, as text; empty if the row, or its cells, have none."""
    assert column.ours is not None
    name = column.number
    if name == "parameters":
        return f"{row.parameters / 1e6:.0f} M"
    kind, _, test = name.partition(":")
    if kind == "shift":
        value = row.shifts[test].figure if test in row.shifts else None
    elif kind in OF_CELLS:
        value = of_cells.get(name)
    elif kind == "attack":
        value = row.scores[test].mean if test in row.scores else None
    else:
        value = {"clean": row.clean, "attacked": row.attacked, "bits": row.clean_bits_per_byte}[name]
    if value is None:
        return ""
    if column.ours.startswith("100 - "):
        value = 100 - value
    return decimal(100 * value if column.ours.startswith("100 * ") else value)
