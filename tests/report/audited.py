"""A stored audit by hand: two layers of four experts, figures that can be followed."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from report.routes import stored_routes

from holdfast.auditing import AuditReport
from holdfast.checked import from_mapping

PARTS = ("total", "flip", "rest", "flip_share")
EDGES = [0.0001, 0.001, 0.01, 0.1]


def stored_audit() -> dict[str, Any]:
    return copy.deepcopy(STORED)


def layer(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "layer": number,
        "name": f"model.layers.{number}.mlp",
        "tokens": 400,
        "experts": 4,
        "entropy": 0.5,
        "entropy_share": 0.36,
        "load": {"percent": [80.0, 60.0, 60.0, 0.0], "std": 30.0, "cv": 0.612, "dead": [3]},
        "experts_per_token": {"mean": 2.0, "histogram": [0, 0, 400]},
        "weight_sum": {"mean": 1.0, "std": 0.0},
        "near_ties": {"strips": [{"width": 0.01, "share": 0.04, "experts": 0.1}], "explained": 1.0},
        "instability": None,
        "co_selection": {"counts": [[1] * 4] * 4, "spectral_gap": 0.5, "groups": 1},
        "radius": {
            "kind": "exact",
            "median": 0.0123,
            "low": 0.01,
            "none": 0.0,
            "edges": EDGES,
            "counts": [1, 3, 96, 200, 100],
        },
        "undecided": {
            "bf16": {"share": 0.015, "of_undecided_flip": 0.5, "decided_that_flip": 0},
            "fp16": {"share": 0.001, "of_undecided_flip": None, "decided_that_flip": 0},
        },
        "boundaries": {"skipped": "its ties are not flats."},
        **changed,
    }


def changes(flips: float) -> dict[str, Any]:
    """In a perturbation that changes no route, nothing changes."""
    output = {"total": 0.07, "flip": 0.0625, "rest": 0.011, "flip_share": 0.9} if flips else dict.fromkeys(PARTS, 0.0)
    return {"flips": flips, "first_flips": flips / 2, "weight_change": 0.1 if flips else 0.0, "output": output}


def perturbed(about: str, *flips: float, harmless: bool = False) -> dict[str, Any]:
    overall, loss = changes(sum(flips) / len(flips)), 0.25 if any(flips) else 0.0
    return {
        "about": about,
        "harmless": harmless,
        "layers": [{"layer": number, "tokens": 400, **changes(share)} for number, share in enumerate(flips)],
        "overall": {
            **overall,
            "tokens": 400,
            "predictions": 400,
            "prediction_flips": 0.031 if any(flips) else 0.0,
            "loss": {"before": 2.0, "after": 2.0 + loss, "change": loss, "size": 1.2 * loss},
        },
        "details": [],
    }


def at_risk(relative: float, text: str | None, context: str | None, **changed: Any) -> dict[str, Any]:
    where = {"batch": 0, "layer": 1, "place": 7, "sequence": 0, "position": 7, "token": 26}
    size = {"relative": relative, "radius": relative * 5, "leaves": 3, "enters": 0}
    return {**where, "text": text, "context": context, **size, **changed}


def pair(before: float | None, after: float | None) -> dict[str, float | None]:
    return {"before": before, "after": after}


UNDECIDED = {
    "bf16": {"share": 0.3, "of_undecided_flip": 0.5, "decided_that_flip": 0},
    "fp16": {"share": 0.01, "of_undecided_flip": 0.25, "decided_that_flip": 0},
}
PLAIN = ("experts_per_token", "loss", "perplexity", "entropy", "entropy_share", "instability")
GROUPS = (
    *("load", "dropped", "near_ties", "undecided", "undecided_worst", "radius", "co_selection"),
    *("flips", "first_flips", "weight_change", "output", "prediction_flips", "loss_change"),
)
OVERALL: dict[str, Any] = {"layers": 2, "tokens": 400, **dict.fromkeys(PLAIN), **{name: {} for name in GROUPS}}
STORED: dict[str, Any] = {
    "schema": 1,
    "status": "complete",
    "model": {
        "name": "tiny-mixtral",
        "type": "mixtral",
        "architecture": "MixtralForCausalLM",
        "dtype": "float32",
        "parameters": 1234,
        "layers": ["model.layers.0.mlp", "model.layers.1.mlp"],
        "experts": [4, 4],
        "routers": ["native", "native"],
    },
    "data": {"kind": "texts", "checksum": "f70d1419", "batches": 2, "sequences": 8, "tokens": 400},
    "settings": {"perturb": ["none", "noise"], "noise": [0.01], "seed": 7},
    "versions": {"holdfast": "0.1.0", "torch": "2.13.7"},
    "seconds": 5.83,
    "overall": OVERALL,
    "layers": [
        layer(0),
        layer(
            1,
            load={"percent": [50.0, 50.0, 50.0, 50.0], "std": 0.0, "cv": 0.0, "dead": []},
            radius={**layer(1)["radius"], "counts": [0, 0, 0, 100, 300], "median": None},
            undecided=UNDECIDED,
        ),
    ],
    "perturbations": {
        "none": perturbed("the same forward a second time", 0.0, 0.0, harmless=True),
        "noise.0.01": perturbed("router inputs with noise of 0.01 of their length", 0.01, 0.1),
    },
    "skipped": {"words": {"about": "10% of the words swapped", "reason": "there are no texts, only inputs."}},
    "at_risk": [
        at_risk(0.000002, " night", "in the night of the year"),
        at_risk(0.0005, "the", "the cat and the dog"),
        at_risk(0.02, None, None, layer=0),
        at_risk(0.03, None, None, sequence=None, position=None, token=None),
    ],
    "what_if": {
        "router": "smooth",
        "cost": {"loss": pair(2.0, 2.125), "perplexity": pair(7.389, 8.373), "experts_per_token": pair(2.0, 3.5)},
        "flips": {"none": pair(0.0, 0.0), "noise.0.01": pair(0.055, 0.021)},
        "flip_output": {"none": pair(0.0, 0.0), "noise.0.01": pair(0.0625, 0.003)},
        "output": {"none": pair(0.0, 0.0), "noise.0.01": pair(0.07, 0.081)},
        "prediction_flips": {"none": pair(0.0, 0.0), "noise.0.01": pair(0.031, None)},
        "overall": OVERALL,
        "routes": stored_routes(8, 2, 1, flips=()),
    },
    "view": {
        "examples": [{"pieces": ["Hold", "fast", " in", " the", " night"]}, {"pieces": ["An", "other", " text"]}],
        "routes": stored_routes(8, 2, flips=(1, 4)),
    },
}


# As it is read from its file.
report_of: Callable[[dict[str, Any]], AuditReport] = partial(from_mapping, AuditReport)
