"""Certified predictions, from results/certified: accuracy at each radius, and what attacks on the votes leave."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from results_numbers import Number, written

from holdfast.checked import from_mapping
from holdfast.metrics import Difference, Shares, difference_of
from holdfast.metrics.paired import FEWEST_SEEDS
from holdfast.train.prediction_report import CertifiedExample, CertifiedModel, PredictionReport, PredictionSettings

ACCURACY = Number("certified accuracy", lambda result: {}, 1)
HEAD = """## Certified accuracy

Randomised smoothing ([certificates](certificates.md)): a vote over noisy copies of an image decides, and its class is
certified within a radius (l2, over all pixels). The column of a radius has the share of test examples that are right and
certified beyond it, in percent, the mean over seeds; at 0 they are right and have any certificate. In brackets is what an
attack on the vote within this radius left: apart from chance, never less than what is certified. Then follows the difference
to `smoe` that is trained in the same way, with its 95% interval over seeds and examples, bold where that excludes 0.

- *abstains*: share of examples without a certificate, in percent
- *violations*: certified examples whose vote inside their radius shows, with confidence, that the chance of the class is
  below 1/2, of so many certified examples, and how many chance explains at most; more would be a mistake of ours. A vote
  just below one half is no violation: it may be chance
"""


def reports(folder: Path, clean: Mapping[tuple[str, str, int], float]) -> Iterator[tuple[str, PredictionReport]]:
    """Yield a report for each experiment and settings, of all its stored models.

    clean    the clean figures of the cells; a report of another training of a cell is left out
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*/*.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = clean.get((path.parent.name, stored["router"], stored["seed"]))
        if known is None or not math.isclose(known, stored["clean"], rel_tol=1e-6):
            continue
        same = json.dumps([stored["settings"], stored["unit"], stored["data"]], sort_keys=True)
        found[path.parent.name, same].append(stored)
    for (name, _), models in sorted(found.items(), key=lambda item: (item[0][0], item[1][0]["settings"]["sigma"])):
        yield (
            name,
            PredictionReport(
                settings=from_mapping(PredictionSettings, models[0]["settings"]),
                unit=models[0]["unit"],
                data=models[0]["data"],
                models=sorted(map(_model, models), key=lambda one: (one.router.partition("{")[2], one.seed or 0)),
                skipped={},
                versions={},
            ),
        )


def _model(stored: dict[str, Any]) -> CertifiedModel:
    columns = stored["examples"]
    names = ("number", "label", "chosen", "hits", "radius", "attacked")
    examples = [
        from_mapping(
            CertifiedExample,
            {
                **dict(zip(names, values, strict=True)),
                "attacked": [dict(zip(("radius", "hits", "stays"), vote, strict=True)) for vote in values[-1]],
            },
        )
        for values in zip(*(columns[name] for name in names), strict=True)
    ]
    return CertifiedModel(path="", router=stored["router"], seed=stored["seed"], examples=examples)


def certified_difference(report: PredictionReport, label: str, radius: float) -> Difference | None:
    """Return the certified accuracy minus that of smoe that is trained in the same way, in percent; None for smoe."""
    brace, rest = label.partition("{")[1:]
    mine, theirs = ({one.seed: one for one in report.models_of(name)} for name in (label, f"smoe{brace}{rest}"))
    shared = sorted(mine.keys() & theirs.keys(), key=str)
    if mine == theirs or not shared:
        return None

    def score(model: CertifiedModel) -> dict[str, Any]:
        wrong = np.array([not one.certified(radius) for one in model.examples], float)
        return {"figure": 100 * float(wrong.mean()), "per_example": Shares(wrong).stored()}

    found = difference_of(*([score(models[seed]) for seed in shared] for models in (mine, theirs)))
    return found if found is None or len(shared) >= FEWEST_SEEDS else replace(found, low=None, high=None)


def certified(folder: Path, titles: dict[str, str], clean: Mapping[tuple[str, str, int], float]) -> Iterator[str]:
    """Yield the lines of the section; none without stored reports."""
    for place, (name, report) in enumerate(reports(folder, clean)):
        if place == 0:
            yield HEAD
        settings = report.settings
        yield (
            f"{titles.get(name, name)}: noise of standard deviation {settings.sigma:g} ({report.unit}), "
            f"{settings.samples:,} samples for each of {settings.examples:,} test examples, "
            f"confidence {1 - settings.alpha:.1%}; the vote is attacked by {settings.steps} steps at each radius, "
            f"with {settings.draws} draws in a step.\n"
        )
        radii = [0.0, *settings.radii]
        heads = [f"radius {radius:.3g}" for radius in radii]
        yield "| " + " | ".join(["router", "seeds", *heads, "abstains", "violations"]) + " |"
        yield "|" + "---|" * (4 + len(heads))
        for label in report.labels:
            models = report.models_of(label)
            cells = [f"`{label}`", str(len(models))]
            for radius in radii:
                text = f"{report.accuracy(label, radius).mean:.1f}"
                if settings.steps and radius:
                    text += f" [{report.accuracy(label, radius, attacked=True).mean:.1f}]"
                found = certified_difference(report, label, radius)
                cells.append(text if found is None else f"{text}, {written(found, ACCURACY)}")
            abstained = sum(one.abstained for one in models) / len(models)
            counted = report.violations(label)
            cells += [f"{100 * abstained:.1f}", f"{counted.count} of {counted.certified:,}; at most {counted.allowed}"]
            yield "| " + " | ".join(cells) + " |"
        yield ""
