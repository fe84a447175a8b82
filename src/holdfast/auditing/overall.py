"""The numbers of a whole model, from those of its layers and of its perturbations."""

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.auditing.rounding import DTYPES
from holdfast.metrics.near_ties import WIDTHS

PLAIN = ("layers", "tokens", "experts_per_token", "loss", "perplexity", "entropy", "entropy_share", "instability")
INNER: dict[str, Iterable[str]] = {
    "load": ("std", "cv", "dead"),
    "near_ties": [f"{width:g}" for width in WIDTHS],
    "undecided": DTYPES,
    "undecided_worst": DTYPES,
    "radius": ("median_worst", "below_0.001"),
    "co_selection": ("spectral_gap", "groups"),
}
PERTURBED = ("flips", "first_flips", "weight_change", "prediction_flips", "loss_change")
OUTPUT = ("total", "flip", "rest", "flip_share")


def names(perturbations: Iterable[str]) -> list[str]:
    """The dotted names of all numbers that an audit with these perturbations may have."""
    ran = list(perturbations)
    inner = [f"{name}.{key}" for name, keys in INNER.items() for key in keys]
    changes = [f"{key}.{one}" for key in PERTURBED for one in ran]
    return [*PLAIN, *inner, *changes, *(f"output.{one}.{key}" for one in ran for key in OUTPUT)]


def overall(baseline: dict[str, Any], perturbed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over layers, where nothing else is said."""
    layers, found = baseline["layers"], baseline["overall"]
    loss = baseline["loss"]
    ran = {name: one["overall"] for name, one in perturbed.items() if one["skipped"] is None}
    return {
        "layers": len(layers),
        "tokens": max(layer["tokens"] for layer in layers),
        "experts_per_token": found["experts_per_token"]["mean"],
        "loss": loss,
        "perplexity": None if loss is None else math.exp(loss) if loss < 700 else math.inf,
        "entropy": found["entropy"],
        "entropy_share": statistics.fmean(layer["entropy_share"] for layer in layers),
        "load": found["load"],
        "instability": found["instability"],
        "near_ties": {f"{strip['width']:g}": strip["share"] for strip in found["near_ties"]["strips"]},
        "undecided": _undecided(layers, statistics.fmean),
        "undecided_worst": _undecided(layers, max),
        "radius": _radius(layers),
        "co_selection": {
            "spectral_gap": found["co_selection"]["spectral_gap"],
            "groups": max(layer["co_selection"]["groups"] for layer in layers),
        },
        **{key: {name: one[key] for name, one in ran.items()} for key in ("flips", "first_flips", "weight_change")},
        "output": {name: one["output"] for name, one in ran.items()},
        "prediction_flips": {name: one["prediction_flips"] for name, one in ran.items()},
        "loss_change": {name: None if one["loss"] is None else one["loss"]["change"] for name, one in ran.items()},
    }


def _undecided(layers: list[dict[str, Any]], join: Callable[[list[float]], float]) -> dict[str, float]:
    """Of the layers that have a certificate."""
    known = [layer["undecided"] for layer in layers if "skipped" not in layer["undecided"]]
    return {name: join([found[name]["share"] for found in known]) for name in (known[0] if known else ())}


def _radius(layers: list[dict[str, Any]]) -> dict[str, float]:
    """The smallest median, because a model is as robust as its weakest layer, and the mean share of low ones."""
    known = [layer["radius"] for layer in layers if "skipped" not in layer["radius"]]
    if not known:
        return {}
    medians = [math.inf if found["median"] is None else found["median"] for found in known]
    return {"median_worst": min(medians), "below_0.001": statistics.fmean(found["below_0.001"] for found in known)}
