"""`AuditReport`: the results of an audit as plain data, and the overall numbers of the model.

docs/audit.md explains every key.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, final

from holdfast.auditing.layer_certificates import DTYPES
from holdfast.auditing.stored_report import StoredReport
from holdfast.metrics.near_ties import WIDTHS


@final
@dataclass(frozen=True, kw_only=True)
class AuditReport(StoredReport):
    """The results of an audit."""

    kind: ClassVar[str] = "an audit"
    remedy: ClassVar[str] = "audit the model again"
    indent: ClassVar[int | None] = 1

    overall: dict[str, Any]  # means over layers; conditions refer to these numbers
    layers: list[dict[str, Any]]  # the unperturbed model, layer by layer
    perturbations: dict[str, dict[str, Any]]  # by name: changes, or the reason under "skipped"
    at_risk: list[dict[str, Any]]  # the tokens with the smallest relative radii
    what_if: dict[str, Any] | None = None
    view: dict[str, Any] | None = None  # the first tokens of a text, with the radius of each token in every layer

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers of `overall` by dotted name: "undecided.bf16", "flips.noise.0.01"."""
        return dict(_flat(self.overall))

    @classmethod
    def _damaged(cls, stored: dict[str, Any]) -> str | None:
        for entry in fields(cls):
            kinds = _KINDS.get(entry.name, dict)
            if entry.name in stored and not isinstance(stored[entry.name], kinds):
                return entry.name
        broken = [name for name, value in _flat(stored["overall"]) if not _is_number(value)]
        return f"overall.{broken[0]}, which is not a number" if broken else None


_KINDS: dict[str, Any] = {  # types of the fields that are not dicts
    "status": str,
    "seconds": (int, float),
    "layers": list,
    "at_risk": list,
    "what_if": (dict, type(None)),
    "view": (dict, type(None)),
    "schema": int,
}


def _is_number(value: Any) -> bool:
    """Return whether the value is None or a finite number."""
    try:
        return value is None or (not isinstance(value, bool | str) and math.isfinite(value))
    except (TypeError, OverflowError):
        return False


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences(before: AuditReport, after: AuditReport) -> list[tuple[str, float | None, float | None]]:
    """Return the overall numbers in which two audits differ, or which only one of them has: (name, before, after)."""
    one, two = before.numbers(), after.numbers()
    names = [*one, *(name for name in two if name not in one)]
    return [(name, one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)]


# The keys of `overall`, known before an audit, so that conditions can be checked.
PLAIN = ("layers", "tokens", "experts_per_token", "loss", "perplexity", "entropy", "entropy_share", "instability")
INNER: dict[str, Iterable[str]] = {
    "load": ("std", "cv", "dead"),
    "dropped": ("share", "tokens"),
    "near_ties": [f"{width:g}" for width in WIDTHS],
    "undecided": DTYPES,
    "undecided_worst": DTYPES,
    "radius": ("median_worst", "below_0.001"),
    "co_selection": ("spectral_gap", "groups"),
}
PERTURBED = ("flips", "first_flips", "weight_change", "prediction_flips", "loss_change")
OUTPUT = ("total", "flip", "rest", "flip_share")


def names(perturbations: Iterable[str]) -> list[str]:
    """Return the dotted names of all numbers that an audit with these perturbations may have."""
    ran = list(perturbations)
    inner = [f"{name}.{key}" for name, keys in INNER.items() for key in keys]
    changes = [f"{key}.{one}" for key in PERTURBED for one in ran]
    return [*PLAIN, *inner, *changes, *(f"output.{one}.{key}" for one in ran for key in OUTPUT)]


def overall(baseline: dict[str, Any], perturbed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of the whole model: means over layers, except where the name says otherwise."""
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
        **({"dropped": found["dropped"]} if "dropped" in found else {}),
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
    """Return the share of undecided tokens by dtype, over the layers that have certificates."""
    known = [layer["undecided"] for layer in layers if "skipped" not in layer["undecided"]]
    return {name: join([found[name]["share"] for found in known]) for name in (known[0] if known else ())}


def _radius(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the smallest median, because a model is as robust as its weakest layer, and the mean share of low radii."""
    known = [layer["radius"] for layer in layers if "skipped" not in layer["radius"]]
    if not known:
        return {}
    medians = [math.inf if found["median"] is None else found["median"] for found in known]
    return {"median_worst": min(medians), "below_0.001": statistics.fmean(found["below_0.001"] for found in known)}
