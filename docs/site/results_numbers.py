"""The numbers of stored experiments: columns by task, means over seeds, and differences to the baseline with intervals.

An experiment is compared by the numbers of its task, which its cells have:

    text                perplexity or bits per byte: clean, attacked, the cost of each attack on untouched words
    labels              the recipe's measure: clean, attacked, with typos
    images              error: clean, under each attack, with corruptions, on shifted test sets
    vision-language     error: clean, without seeing, by generation, with corrupted pictures, on held-out combinations
    all                 load, fluctuation and consistency of the routing

and by what `results/audits` has of them. A row is compared with the baseline of the same setting and the same training:
`smooth{method=pgd}` with `smoe{method=pgd}`.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.metrics import Difference, difference_of, level_of
from holdfast.metrics.paired import FEWEST_SEEDS
from holdfast.train.ledger import Experiment
from holdfast.train.results import Row

# From a cell's result to a score: "figure", "per_example"; empty where it was not measured.
Read = Callable[[Mapping[str, Any]], Mapping[str, Any]]
IN_TABLE = 3  # numbers beside each other
ROUTING = ("load", "fluctuation", "consistency")
RUN_TO_RUN = 0.01  # bits per byte: the same seed does not give the same run on a GPU
KINDS = {"attacked": "changed words", "cost": "changed words", "typos": "typos", "cost of typos": "typos"}  # of robustness


@dataclass(frozen=True)
class Number:
    """A column of a table.

    kind        the kind of robustness that it measures; "" if it measures none
    constant    of the data, the same for all routers: it stands below the table
    floor       a difference below it means nothing, whatever its interval
    """

    heading: str
    read: Read
    digits: int = 3
    percent: bool = False
    about: str = ""
    better: Literal["lower", "higher"] = "lower"
    kind: str = ""
    constant: bool = False
    floor: float = 0.0


def at(result: Any, *place: str) -> Any:
    """Return what a result has at these keys; an empty mapping if it has nothing there."""
    for key in place:
        result = (result or {}).get(key)
    return {} if result is None else result


def score(*place: str) -> Read:
    return lambda result: at(result, *place)


def figure(*place: str) -> Read:
    """Return how a number without results of single examples is read."""

    def read(result: Mapping[str, Any]) -> Mapping[str, Any]:
        found = at(result, *place)
        return {} if found == {} else {"figure": found}

    return read


def bits(*place: str) -> Read:
    """Return how the bits per byte of a text are read, with those of its blocks."""

    def read(result: Mapping[str, Any]) -> Mapping[str, Any]:
        found = at(result, *place)
        if "per_example" not in found or found.get("bits_per_byte") is None:
            return {"figure": found.get("bits_per_byte")} if found else {}
        blocks, mean = found["per_example"], found["bits_per_byte"]
        scale = mean * sum(blocks["words"]) / sum(blocks["losses"])
        losses = [scale * loss for loss in blocks["losses"]]
        return {"figure": mean, "per_example": {**blocks, "losses": losses, "perplexity": False}}

    return read


def layers_mean(values: Sequence[float | None]) -> Mapping[str, Any]:
    known = [value for value in values if value is not None]
    return {"figure": statistics.fmean(known)} if known else {}


LOSS = Number("training loss", lambda result: {})
COST = "by how much {} raise the loss on untouched words, in hundredths of a nat: about the rise of their perplexity"
PIXELS = ("FGSM", "PGD", "SPSA", "adaptive")  # attacks on pixels, which are one kind
SHARED = {
    "load": Number(
        "load std, %",
        figure("clean", "routing", "overall", "load", "std"),
        1,
        about="standard deviation over experts of the percentage of tokens that each gets",
    ),
    "fluctuation": Number(
        "fluctuation",
        lambda result: layers_mean(
            [value for layer in at(result, "snapshots", "layers") for value in (layer["fluctuation"] or [])[-1:]]
        ),
        2,
        about="share of tokens whose k best experts change over the last fifth of training",
        kind="steadiness in training",
    ),
    "consistency": Number(
        "consistency",
        lambda result: layers_mean(at(result, "consistency", "layers") or []),
        4,
        about="share of tokens whose k best experts stay the same under noise of 5% of each embedding's length",
        better="higher",
        kind="noise",
    ),
}


def task_of(experiment: Experiment) -> str:
    return str(experiment.cells[0].experiment["recipe"].get("task", "text"))


def of_bytes(experiment: Experiment) -> bool:
    return task_of(experiment) == "text" and experiment.cells[0].experiment["recipe"]["data"].get("tokens") == "bytes"


def columns(experiment: Experiment) -> dict[str, Number]:
    """Return the columns of an experiment by name: those of which at least one cell has a number."""
    of_task = {"text": _of_text, "labels": _of_labels, "vision-language": _of_questions}.get(task_of(experiment), _of_images)
    found = {**of_task(experiment), **SHARED}
    results = [cell.result for cell in experiment.cells]
    return {
        name: number
        for name, number in found.items()
        if any(number.read(result).get("figure") is not None for result in results)
    }


def _of_text(experiment: Experiment) -> dict[str, Number]:
    read, unit, digits = (bits, "bits per byte", 4) if of_bytes(experiment) else (score, "perplexity", 2)
    floor = RUN_TO_RUN if of_bytes(experiment) else 0.0

    def cost(words: str, *place: str) -> Number:
        return Number(f"cost of {words}, %", score(*place, "cost"), 2, percent=True)

    found = {
        "clean": Number(f"clean, {unit}", read("clean"), digits, about=f"{unit} of the held-out test text", floor=floor),
        "attacked": Number("attacked", read("attacked"), digits, about="words of the test text are swapped", floor=floor),
        "cost": replace(cost("swaps", "attacked"), about=COST.format("swapped words")),
        "cost of typos": replace(cost("typos", "trials", "typos"), about=COST.format("typos")),
    }
    # Attacked words are targets too, so that only the costs compare like with like.
    return {name: replace(one, kind=KINDS[name] if "cost" in name else "") for name, one in found.items()}


def _main(experiment: Experiment, name: str, read: Read, about: str, kind: str = "") -> Number:
    """Return a column in the recipe's measure."""
    measure = experiment.cells[0].measure
    heading = f"clean {measure.name}" if name == "clean" else name
    return Number(heading, read, measure.digits, about=about, better=measure.better, kind=kind)


def _of_labels(experiment: Experiment) -> dict[str, Number]:
    measure = experiment.cells[0].measure
    found = {
        "clean": _main(experiment, "clean", score("clean"), measure.long),
        "attacked": _main(experiment, "attacked", score("attacked"), f"after {measure.attack}", KINDS["attacked"]),
        "typos": _main(experiment, "typos", score("trials", "typos"), "the same share of words is misspelt", KINDS["typos"]),
    }
    majority = _main(
        experiment, "majority", figure("clean", "majority", "figure"), "if every answer is the most frequent class"
    )
    return {**found, "majority": replace(majority, constant=True)} | _metrics(experiment, found)


def _of_images(experiment: Experiment) -> dict[str, Number]:
    measure = experiment.cells[0].measure
    found = {"clean": _main(experiment, "clean", score("clean"), measure.long), **_trials(experiment)}
    return found | _metrics(experiment, found) | _shifts(experiment)


def _of_questions(experiment: Experiment) -> dict[str, Number]:
    measure = experiment.cells[0].measure
    found = {"clean": _main(experiment, "clean", score("clean"), measure.long)}
    for name, heading, about in (
        ("error without pictures, %", "without pictures", "the same model, every picture is grey"),
        ("error by generation, %", "by generation", "greedy answers in place of the most likely option"),
        ("error of the answer prior, %", "answer prior", "if every answer is the most frequent one of its kind of question"),
    ):
        read = _without_pictures if heading == "without pictures" else figure("clean", "metrics", name)
        found[heading] = replace(_main(experiment, heading, read, about), constant=heading == "answer prior")
    return found | _shifts(experiment) | _trials(experiment)


def _without_pictures(result: Mapping[str, Any]) -> Mapping[str, Any]:
    found = figure("clean", "metrics", "error without pictures, %")(result)
    single = at(result, "clean", "without_pictures")
    return {**found, "per_example": single} if found and single else found


def _trials(experiment: Experiment) -> dict[str, Number]:
    """Return the error under each attack or change of the inputs, and its cost where the same examples have a clean one."""
    trials = {name: trial for cell in experiment.cells for name, trial in at(cell.result, "trials").items()}
    found = {}
    for name, trial in trials.items():
        about, costs = _of_trial(experiment, name), name not in PIXELS and trial.get("clean") is not None
        kind = "" if costs else "attacks on pixels" if name in PIXELS else name
        found[name] = _main(experiment, name, score("trials", name), about, kind)
        if costs:  # a model with fewer errors has fewer of them here too
            words = f"by how much this raises the {experiment.cells[0].measure.noun} of the same examples"
            found[f"cost of {name}"] = replace(
                found[name], heading=f"cost of {name}", read=_cost(name), about=words, kind=name
            )
    return found


def _cost(name: str) -> Read:
    """Return how the change of a measure under a trial is read; it has no results of single examples."""

    def read(result: Mapping[str, Any]) -> Mapping[str, Any]:
        trial = at(result, "trials", name)
        return {"figure": trial["figure"] - trial["clean"]} if trial.get("clean") is not None else {}

    return read


def _of_trial(experiment: Experiment, name: str) -> str:
    found = next(trial for cell in experiment.cells if (trial := at(cell.result, "trials", name)))
    severities = found.get("severities") or ([found["severity"]] if "severity" in found else [])
    how = ["test examples" if "examples" not in found else f"{found['examples']:,} test examples"]
    if "budget" in found:
        how.append(f"within {255 * found['budget']:.3g}/255 ({found['norm'].replace('linf', 'l_inf')})")
    if (found.get("steps") or 1) > 1:
        how.append(f"{found['steps']} steps")
    if severities:
        how.append(f"the mean over kinds, severity {' and '.join(map(str, severities))}")
    return ", ".join(how)


def _metrics(experiment: Experiment, found: Mapping[str, Number]) -> dict[str, Number]:
    names = dict.fromkeys(name for cell in experiment.cells for name in at(cell.result, "clean", "metrics"))
    about = "a further metric of the recipe, on clean data"
    return {name: Number(name, figure("clean", "metrics", name), about=about) for name in names if name not in found}


def _shifts(experiment: Experiment) -> dict[str, Number]:
    shifts = {name: shift for cell in experiment.cells for name, shift in at(cell.result, "shifts").items()}
    found = {}
    for name, shift in shifts.items():
        prior = f"; the answer prior has {shift['prior']:.2f}" if "prior" in shift else ""
        about = f"{shift['measure']} on this shifted test set{prior}"
        kind = "shifted test sets"
        found[name] = Number(name, score("shifts", name), 2, about=about, better=shift["better"], kind=kind)
    return found


# Rows


def training_of(row: Row) -> str:
    """Return what the braces of a router choice say: how it is trained."""
    return row.router.partition("{")[2].removesuffix("}")


def shown_name(row: Row) -> str:
    """Return a row's name as the first cell of a table."""
    name = f"`{row.router}`".replace("|", "\\|")
    return ", ".join(filter(None, [name, row.setting_label, row.apart and f"{row.apart}, not compared"]))


def rows_of(experiment: Experiment) -> list[Row]:
    """Return the rows by training, the plain one first, and in each the baseline first."""
    found = experiment.rows
    trainings = list(dict.fromkeys(["", *map(training_of, found)]))

    def order(row: Row) -> tuple[int, bool, bool]:
        return trainings.index(training_of(row)), not is_baseline(experiment, row), row.apart is not None

    return sorted(found, key=order)


def baseline_of(experiment: Experiment, row: Row) -> Row | None:
    """Return the row that a row is compared with; None for a baseline, and where there is none."""
    name = baseline_name(experiment)
    trained = f"{name}{{{training_of(row)}}}" if training_of(row) else name
    same = [one for one in experiment.rows if one.router == trained and one.settings == row.settings]
    return None if not same or same[0] == row else same[0]


def baseline_name(experiment: Experiment) -> str:
    """Return the router that others are compared with, without its training: smoe, or the first if it was not trained."""
    names = [row.router.partition("{")[0] for row in experiment.rows]
    return "smoe" if "smoe" in names else names[0]


def is_baseline(experiment: Experiment, row: Row) -> bool:
    """Return whether the others of the same setting and training are compared with this row."""
    return row.router.partition("{")[0] == baseline_name(experiment)


def results_of(experiment: Experiment, row: Row) -> dict[int, Mapping[str, Any]]:
    return {cell.seed: cell.result for cell in experiment.cells_of(row)}


def shared_seeds(experiment: Experiment, row: Row, other: Row) -> list[int]:
    return sorted(results_of(experiment, row).keys() & results_of(experiment, other).keys())


def level(experiment: Experiment, row: Row, number: Number) -> Difference | None:
    """Return the mean over the seeds in which the number was measured; None if one of them has no figure."""
    return level_of([found for result in results_of(experiment, row).values() if (found := number.read(result))])


def difference(
    experiment: Experiment, row: Row, number: Number, other: Row | None = None, seeds: Sequence[int] | None = None
) -> Difference | None:
    """Return the difference over the seeds that both rows have; None for a baseline, and where nothing can be compared.

    other    the row to compare with, by default its baseline; seeds    only these
    """
    other = baseline_of(experiment, row) if other is None else other
    if other is None or row.apart or other.apart:
        return None
    mine, theirs = results_of(experiment, row), results_of(experiment, other)
    both = [
        (number.read(theirs[seed]), number.read(mine[seed]))
        for seed in shared_seeds(experiment, row, other)
        if seeds is None or seed in seeds
    ]
    if not (measured := [pair for pair in both if all(pair)]):
        return None
    found = difference_of(*map(list, zip(*measured, strict=True)))
    # Too few seeds show nothing about others, so that an interval over examples would be taken for more than it is.
    return found if found is None or found.seeds >= FEWEST_SEEDS else replace(found, low=None, high=None, over=None)


def written(found: Difference | None, number: Number, *, bold: bool | None = None, missing: str = "baseline") -> str:
    """Return a difference with its interval; bold if that excludes 0 and it reaches the floor, unless `bold` decides."""
    if found is None:
        return missing
    low, high = found.low, found.high
    times = 100 if number.percent else 1
    if low is None or high is None:
        return f"{times * found.mean:+.{number.digits}f}"
    shown = "{:+.{d}f} ({:+.{d}f} to {:+.{d}f})".format(times * found.mean, times * low, times * high, d=number.digits)
    if bold is None:
        bold = (low > 0 or high < 0) and abs(found.mean) >= number.floor
    return f"**{shown}**" if bold else shown


def written_level(experiment: Experiment, row: Row, number: Number) -> str:
    found = level(experiment, row, number)
    return "-" if found is None else f"{found.mean * (100 if number.percent else 1):.{number.digits}f}"


def tables(experiment: Experiment, *, differences: bool = True) -> Iterator[str]:
    """Yield the tables of an experiment, three numbers in each, and below each what its numbers are."""
    found = columns(experiment)
    of_task = [number for name, number in found.items() if name not in ROUTING and not number.constant]
    if task_of(experiment) == "text":
        of_task = [number for number in of_task if number is not found.get("cost of typos")]  # stands with robustness
    parts = [of_task[start : start + IN_TABLE] for start in range(0, len(of_task), IN_TABLE)]
    parts.append([found[name] for name in ROUTING if name in found])
    constants = [number for number in found.values() if number.constant]
    for place, part in enumerate(filter(None, parts)):
        yield from table(experiment, part, differences=differences)
        yield ""
        yield from (f"- *{number.heading}*: {number.about}" for number in part)
        for number in constants if place == 0 else []:
            yield f"- *{number.heading}*: {written_level(experiment, experiment.rows[0], number)} {number.about}"
        yield ""


def has_enough_seeds(experiment: Experiment) -> bool:
    """Return whether a router has seeds enough to be compared with its baseline."""
    pairs = [(row, baseline_of(experiment, row)) for row in experiment.rows]
    return any(len(shared_seeds(experiment, row, other)) >= FEWEST_SEEDS for row, other in pairs if other is not None)


def table(experiment: Experiment, numbers: Sequence[Number], *, differences: bool = True) -> Iterator[str]:
    """Yield the lines of a table of an experiment with these numbers."""
    heads = ["router", "seeds", "experts per token"]
    for number in numbers:
        heads += [number.heading, "difference"] if differences else [number.heading]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows_of(experiment):
        other = baseline_of(experiment, row)
        paired = len(row.seeds) if other is None else len(shared_seeds(experiment, row, other))
        seeds = f"{len(row.seeds)}" if paired == len(row.seeds) else f"{len(row.seeds)}, {paired} of them paired"
        cells = [shown_name(row), seeds, f"{row.experts_per_token:.2f}"]
        missing = "baseline" if is_baseline(experiment, row) else "-"
        for number in numbers:
            cells.append(written_level(experiment, row, number))
            if differences:
                cells.append(written(difference(experiment, row, number), number, missing=missing))
        yield "| " + " | ".join(cells) + " |"


def data_name(experiment: Experiment) -> str:
    return str(experiment.cells[0].experiment["data"]["name"])
