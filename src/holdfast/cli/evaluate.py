"""`holdfast evaluate`: score a saved model on clean and attacked data, and print metrics of its routing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.cli.common import TestedModel, forwards, require_free, show, write_out
from holdfast.progress import quiet


@dataclass(frozen=True)
class Evaluate(TestedModel):
    """Score a saved model on its test data, clean and attacked, and print metrics of each layer's routing.

    Examples: `holdfast evaluate comparison/cells/smoe-seed0`, `holdfast evaluate runs/smooth --out smooth.json`,
    `holdfast evaluate path/to/olmoe --source wikitext-2 --data ~/data --length 1024`,
    `holdfast evaluate path/to/vit --source imagenet/val --shift imagenet-a imagenet-r imagenet-o imagenet-c corruptions`
    """

    metrics: tuple[str, ...] = ()
    """Further metrics, besides those of the model's recipe: accuracy, top5-accuracy, perplexity, or those of a plugin."""
    shift: tuple[str, ...] = ()
    """Score an image classifier on these shifted test sets, and on its clean test images, instead of attacking it. Folders
    laid out as ImageNet-A, -R, -O (CLASS/file) or -C (CORRUPTION/SEVERITY/CLASS/file) are recognised; outliers=FOLDER has
    images of other classes, and `corruptions` are applied to the clean images. A folder may have some of the classes."""

    def run(self) -> None:
        from holdfast.metrics import ChosenMetrics
        from holdfast.stored import without_nan
        from holdfast.version import versions

        require_free(self.out, self.force)
        quiet()
        ChosenMetrics(self.metrics)  # raises if a name is unknown
        if self.shift:
            self._run_shifts()
            return
        model, task = self.test_data.load(self.model, self.loading)
        task.recipe = replace(task.recipe, metrics=list(dict.fromkeys([*task.recipe.metrics, *self.metrics])))
        with forwards(model, f"scoring {self.model}", task.inputs_to_score()):
            found = without_nan(task.score(model))
        scores = {"clean": found["clean"], **found["clean"].get("other_tests", {}), **found.get("shifts", {})}
        print_scores(self.model, {**scores, "attacked": found["attacked"], **found.get("trials", {})}, task)
        print_certainty(found, task.measure)
        print_routing(found["clean"].get("routing"))
        print_modalities(found["clean"].get("modalities", []))
        described = {**task.describe(), "measure": asdict(task.measure), "metrics": task.other_metrics}
        write_out(self.out, {"model": self.model, **described, "versions": versions(), **found})

    def _run_shifts(self) -> None:
        from holdfast.stored import without_nan
        from holdfast.train.shift_evaluation import load_with_shifts
        from holdfast.version import versions

        if self.metrics:
            raise ValueError("--metrics are not computed on shifted test sets; leave out --metrics, or --shift.")
        loaded = load_with_shifts(self.model, self.shift, **self.test_data.where, loading=self.loading.options())
        for one in loaded.found:
            if one is not None:
                print(one.about)
        with forwards(loaded.model, f"scoring {self.model}", loaded.inputs_to_score()):
            found = without_nan(loaded.score())
        print_shifts(self.model, found)
        if loaded.no_clean is not None:
            print(f"Clean images are not scored: {loaded.no_clean}")
        stored = {"model": self.model, "data": loaded.tests.describe(), "versions": versions(), "shifts": found}
        write_out(self.out, stored)


def print_shifts(title: str, found: dict[str, dict[str, Any]]) -> None:
    """Print the results on shifted test sets, and a table of the error on each corruption at each severity."""
    from holdfast.report.page_shell import decimal
    from holdfast.report.tables import Table

    note = "error: share of images that are classified wrongly; AUPR: detection of outliers by a low confidence, higher "
    note += "is better; mCE: errors relative to AlexNet's, which are 100."
    further = {
        "top-5 error, %": "top5",
        "the same images, clean, %": "clean_same",
        "relative mCE, %": "relative_mce",
        "by chance, %": "chance",
    }
    rows = [
        {
            "test images": name,
            "number": f"{score['examples']:,}",
            "classes": score.get("classes", ""),
            "measure": score["measure"],
            "figure": decimal(score["figure"]),
            **{column: f"{score[key]:.2f}" for column, key in further.items() if score.get(key) is not None},
        }
        for name, score in found.items()
    ]
    show(Table.of(title, rows, note))
    for name, score in found.items():
        if errors := score.get("errors"):
            severities = sorted({severity for by_severity in errors.values() for severity in by_severity})
            cells = [
                [corruption, *(f"{by_severity[one]:.2f}" if one in by_severity else "" for one in severities)]
                for corruption, by_severity in errors.items()
            ]
            show(Table(f"{name}: error, %", ["corruption", *(f"severity {one}" for one in severities)], cells))
        for key in ("undefined", "note"):
            if key in score:
                print(f"{name}: {score[key]}")


def print_scores(title: str, scores: dict[str, dict[str, Any]], task: Any) -> None:
    """Print the scores as a table with a row for the clean data and for each attack."""
    from holdfast.metrics.tasks import LABEL_METRICS
    from holdfast.report.tables import Table

    measure = task.measure
    columns = {
        measure.name: "figure",
        "clean, same images": "clean",
        "top-5 error, %": "top5",
        "of untouched words": "figure_of_kept",
        "bits per byte": "bits_per_byte",
        **{metric.name: name for name, metric in LABEL_METRICS.items()},
        "predictions changed": "predictions_changed",
        "mean change of a prediction": "mean_change",
    }
    shown = {name: key for name, key in columns.items() if any(key in score for score in scores.values())}
    # Attacks on images give the accuracy too, which their error says already; the clean row has none.
    shown = {name: key for name, key in shown.items() if key not in LABEL_METRICS or key in scores["clean"]}
    further = [name for name in scores["clean"].get("metrics", {}) if name not in columns]
    rows = []
    for name, score in scores.items():
        figures = [score.get(key) for key in shown.values()]
        figures += [score.get("metrics", {}).get(metric) for metric in further]
        rows.append([name, *("" if figure is None else f"{figure:.4f}" for figure in figures)])
    note = f"{measure.long}; attacked: under {measure.attack}. {measure.better.capitalize()} is better."
    show(Table(title, ["", *shown, *further], rows, note))


def print_certainty(found: dict[str, Any], measure: Any) -> None:
    """Print how certain the scores of a classifier of texts are, over its test texts; nothing for other tasks."""
    clean, attacked = found["clean"], found["attacked"]
    if "undefined" in clean:
        print(f"Clean texts: {clean['undefined']}")
    if clean.get("majority", {}).get("difference") is not None:
        print(against_majority(clean["majority"], measure))
    if attacked.get("paired") is not None:
        print(f"The attack changes the {measure.noun} by {attacked['paired']['words']}.")


def against_majority(majority: dict[str, Any], measure: Any) -> str:
    """Return whether the model is better than always predicting the most frequent class, and by how much."""
    difference, by_error = majority["difference"], measure.better == "lower"  # the model's figure minus that of the class
    worse = difference["mean"] > 0 if by_error else difference["mean"] < 0
    mean, low, high = difference["mean"], difference["low"], difference["high"]
    if mean < 0:
        low, high = (None, None) if low is None else (-high, -low)
    digits, unit = measure.digits, " points" if by_error else ""
    amount = f"{abs(mean):.{digits}f}"
    word = "as good" if not float(amount) else f"{'worse' if worse else 'better'} by {amount}{unit}"
    said = f"Always predicting the most frequent class has {majority['figure']:.{digits}f}; the model is {word}"
    if low is None or high is None:
        return f"{said} (no interval)."
    unclear = ", no clear difference" if low <= 0 <= high else ""
    return f"{said} (95% interval {low:+.{digits}f} to {high:+.{digits}f}, {difference['examples']} examples{unclear})."


def print_routing(routing: dict[str, Any] | None) -> None:
    """Print the routing metrics of each layer as a table."""
    from holdfast.report.page_shell import decimal, percent
    from holdfast.report.tables import Table

    if routing is None:
        print("The model is dense: it has no routers.")
        return
    rows = []
    for layer in routing["layers"]:
        close = next((strip["share"] for strip in layer["near_ties"]["strips"] if strip["width"] == 0.01), None)
        rows.append(
            {
                "layer": layer["layer"],
                "experts per token": f"{layer['experts_per_token']['mean']:.2f}",
                "entropy": decimal(layer["entropy"], 3),
                "load unevenness (CV)": decimal(layer["load"]["cv"], 3),
                "dead experts": len(layer["load"]["dead"]),
                "near-ties (0.01)": percent(close),
                **({"dropped": percent(layer["dropped"]["share"])} if "dropped" in layer else {}),
            }
        )
    show(Table.of("Routing on the clean data", rows))


def print_modalities(layers: list[dict[str, Any]]) -> None:
    """Print how the tokens of images and of texts are routed in each layer; nothing for other tasks."""
    from holdfast.report.comparison_tables import MODALITY_COLUMNS, MODALITY_NOTE
    from holdfast.report.page_shell import percent
    from holdfast.report.tables import Table

    rows = [
        {"layer": str(number), **{name: percent(layer[key]) for name, key in MODALITY_COLUMNS.items()}}
        for number, layer in enumerate(layers)
    ]
    if rows:
        show(Table.of("Images and texts", rows, MODALITY_NOTE).turned())
