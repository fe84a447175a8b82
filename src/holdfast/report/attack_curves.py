"""Plots of the error against the budget of an attack, and the table of accuracies with intervals."""

from collections.abc import Iterator, Sequence

from holdfast.metrics.paired import Difference as Paired
from holdfast.report.page_shell import decimal
from holdfast.report.plot_data import Plot, Trace, curve_of, escaped
from holdfast.report.stored_comparison import Difference, OverSeeds, Results

LEVELS = 255  # budgets are shown as multiples of 1/255, the step of a pixel's value in a file
ERRORS = {"figure": ("error", ""), "top5": ("top-5 error", ", top 5")}  # key of a curve: its name, and the end of a title
CARRIED = "What an attack found at a smaller budget counts at larger ones too."
BASELINE, NONE = "baseline", "\u2013"


def budget_curve(place: int, label: str, budgets: Sequence[float], errors: Sequence[OverSeeds]) -> Trace:
    """Return the curve of one router or attack, with its intervals if it has any."""
    known = [(budget, error) for budget, error in zip(budgets, errors, strict=True) if error.mean is not None]
    means = [error.mean for _, error in known]
    style = {}
    if known and all(error.low is not None and error.high is not None for _, error in known):
        style["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [(error.high or 0.0) - (error.mean or 0.0) for _, error in known],
            "arrayminus": [(error.mean or 0.0) - (error.low or 0.0) for _, error in known],
            "thickness": 1.5,
            "width": 3,
        }
    hover = f"{escaped(label)}, budget %{{x:.3g}}/{LEVELS}: %{{y:.2f}}%<extra></extra>"
    return curve_of(place, None, [LEVELS * budget for budget, _ in known], means, hover, **style)


def budget_plot(name: str, title: str, caption: str, data: list[Trace], error: str) -> Plot:
    layout = {
        "xaxis": {"title": {"text": f"budget (l_inf), in 1/{LEVELS}"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": f"{error}, %"}, "rangemode": "tozero"},
    }
    return Plot(name, title, caption, data, layout)


def attack_curves(results: Results) -> Iterator[Plot]:
    """Yield a plot for each attack that was run at several budgets, of the error and of the top-5 error."""
    for number, attack in enumerate(dict.fromkeys(name for row in results.rows for name in row.curves)):
        for key, (error, end) in ERRORS.items():
            data: list[Trace] = []
            images = set()
            for place, row in enumerate(results.rows):
                curve = row.curves.get(attack)
                if curve is not None and any(point.mean is not None for point in getattr(curve, key)):
                    data.append(budget_curve(place, row.label, curve.budgets, getattr(curve, key)))
                    images.add(curve.examples)
            if not data:
                continue
            if key == "top5" and not any(value for trace in data for value in trace["y"]):
                continue  # always so with five classes or fewer
            caption = (
                f"The {error} under {attack} on {', '.join(map(str, sorted(images)))} test images: means over seeds, with "
                f"95% intervals{_only(results)}. A budget of 0 is the clean {error} of these images. {CARRIED}"
            )
            title = f"{attack}, error against budget{end}"
            yield budget_plot(f"curve-{number}-{key}", title, caption, data, error)


def accuracy_table(results: Results) -> Iterator[dict[str, str]]:
    """Yield for each router its accuracy on clean images and under every attack; nothing for other tasks."""
    if results.run.recipe.get("task") != "images":
        return
    names = list(dict.fromkeys(name for row in results.rows for name in row.scores))
    for row in results.rows if names else []:
        columns = {}
        for name in names:
            found = row.scores.get(name)
            if name != "clean":
                same = None if found is None or found.clean is None else 100 - found.clean
                columns[f"clean, images of {name}"] = decimal(same)
            columns[name] = NONE if found is None else _accuracy(found)
            if results.is_baseline(row):
                columns[f"{name}, difference"] = BASELINE
            else:
                columns[f"{name}, difference"] = NONE if found is None else _in_accuracy(found.difference)
        yield columns


def accuracy_caption(results: Results) -> str:
    return (
        "The share of images that is classified correctly, in percent; higher is better. Means over seeds with 95% "
        f"intervals{_only(results)}; differences to {results.rows[0].router}, paired by seed and by image. Beside each "
        f"attack stands the clean accuracy of the same images. {_counts_of_images(results)}"
    )


def _only(results: Results) -> str:
    """Return what the intervals of the rows cover, as an addition to the word."""
    overs = dict.fromkeys(score.over for row in results.rows for score in row.scores.values() if score.over)
    return f" ({', '.join(overs)})" if overs else ""


def _counts_of_images(results: Results) -> str:
    """Return on how many test images each column was measured, as far as it is stored."""
    counts: dict[str, int] = {}
    for cell in results.cells:
        found = {"clean": cell.clean.examples, **{name: trial.examples for name, trial in cell.trials.items()}}
        # The same in every cell: they follow from the recipe.
        counts |= {name: count for name, count in found.items() if count is not None}
    parts = [f"{name} {count:,}" for name, count in counts.items()]
    return f"Test images: {', '.join(parts)}." if parts else ""


def _accuracy(error: OverSeeds) -> str:
    if error.mean is None:
        return NONE
    mean = decimal(100 - error.mean)
    if error.low is None or error.high is None:
        return mean
    return f"{mean} ({decimal(100 - error.high)} to {decimal(100 - error.low)})"


def _in_accuracy(error: Difference | None) -> str:
    """Return the difference of accuracies as text, from the difference of errors."""
    if error is None or error.mean is None:
        return NONE
    low, high = (None if value is None else 0.0 - value for value in (error.high, error.low))  # 0, not -0
    return Paired(0.0 - error.mean, low, high, error.seeds, error.over).words
