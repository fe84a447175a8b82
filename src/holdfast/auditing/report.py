"""What an audit found, as plain data. docs/audit.md explains every key.

The numbers of a whole model, from those of its layers and of its perturbations.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, final

from holdfast.auditing.layer_certificates import DTYPES
from holdfast.files import LARGEST, read_json, write_whole
from holdfast.metrics.near_ties import WIDTHS
from holdfast.metrics.report import plain

SCHEMA = 1


@final
@dataclass(frozen=True)
class AuditReport:
    """Dicts, lists, numbers, strings and None only. Two audits of one model on one data differ in "seconds" alone."""

    status: Literal["complete", "interrupted"]
    model: dict[str, Any]  # name, type, class, dtype, parameters, layers, experts, routers
    data: dict[str, Any]  # kind, checksum, batches, sequences, tokens
    settings: dict[str, Any]  # all that decides what was done, seeds included
    versions: dict[str, str]
    seconds: float
    overall: dict[str, Any]  # means over layers; what conditions are about
    layers: list[dict[str, Any]]  # the model as it is, layer by layer
    perturbations: dict[str, dict[str, Any]]  # by name: changes, or "skipped" and why
    at_risk: list[dict[str, Any]]  # the tokens with the smallest relative radii
    what_if: dict[str, Any] | None = None
    view: dict[str, Any] | None = None  # the beginning of a text, token by token, with each one's radius in every layer
    schema: int = field(default=SCHEMA)

    def numbers(self) -> dict[str, float | None]:
        """The numbers of `overall` by dotted name: "undecided.bf16", "flips.noise.0.01"."""
        return dict(_flat(self.overall))

    def to_json(self) -> str:
        return json.dumps(plain(asdict(self)), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the file whole or not at all."""
        write_whole(Path(path), self.to_json())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "AuditReport":
        try:
            stored = read_json(Path(path), limit=LARGEST)
        except (OSError, ValueError) as problem:
            raise ValueError(f"{path} cannot be read as an audit: {problem}") from None
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            found = stored.get("schema") if isinstance(stored, dict) else None
            raise ValueError(f"{path} is no audit of schema {SCHEMA} (it says {found!r}); audit the model again.")
        names = {entry.name for entry in fields(cls)}
        needed = {entry.name for entry in fields(cls) if entry.default is MISSING}
        wrong = (needed - stored.keys()) | (stored.keys() - names)
        if wrong:
            raise ValueError(f"{path} is no whole audit: {', '.join(sorted(wrong))} do not fit.")
        for entry in fields(cls):
            kinds = _KINDS.get(entry.name, dict)
            if entry.name in stored and not isinstance(stored[entry.name], kinds):
                raise ValueError(f"{path} is damaged at {entry.name}; audit the model again.")
        if broken := [name for name, value in _flat(stored["overall"]) if not _is_number(value)]:
            raise ValueError(f"{path} is damaged at overall.{broken[0]}, which is no number; audit the model again.")
        return cls(**stored)


_KINDS: dict[str, Any] = {  # of the fields that are no dict
    "status": str,
    "seconds": (int, float),
    "layers": list,
    "at_risk": list,
    "what_if": (dict, type(None)),
    "view": (dict, type(None)),
    "schema": int,
}


def _is_number(value: Any) -> bool:
    """Whether it is None or a number that a float can hold."""
    try:
        return value is None or (not isinstance(value, bool | str) and math.isfinite(value))
    except (TypeError, OverflowError):
        return False


def _flat(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float | None]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def differences(before: AuditReport, after: AuditReport) -> list[tuple[str, float | None, float | None]]:
    """The overall numbers in which two audits differ, or which only one has."""
    one, two = before.numbers(), after.numbers()
    names = [*one, *(name for name in two if name not in one)]
    return [(name, one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)]


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
