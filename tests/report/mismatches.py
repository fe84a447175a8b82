"""A stored mismatch report by hand: a recorded rollout with two remedies, a simulated one with three and one skipped."""

from collections.abc import Callable
from functools import partial
from typing import Any

from report import audited

from holdfast.checked import from_mapping
from holdfast.mismatch import MismatchReport

TAIL = [0.001, 0.01, 0.1, 1.0]


def estimate(value: float, half: float | None = None) -> dict[str, Any]:
    return {"value": value, "low": None, "high": None} if half is None else {
        "value": value,
        "low": value - half,
        "high": value + half,
    }  # fmt: skip


def row(remedy: str, rollout: str, share: float, gap: float, router: str = "native") -> dict[str, Any]:
    """Return a row whose numbers follow from a share and a gap."""
    change = {"mean": estimate(gap - 0.0123, 0.001), "outside": estimate(-0.0456, 0.001)}
    return {
        "remedy": remedy,
        "rollout": rollout,
        "router": router,
        "sets": {
            "tokens": 1000,
            "routers_differ": estimate(share, 0.001),
            "tokens_differ": estimate(3 * share, 0.002),
            "layers": [
                {
                    "layer": layer,
                    "routers_differ": estimate(share * (layer + 1), 0.001),
                    "tokens_differ_so_far": estimate(2 * share * (layer + 1), 0.001),
                }
                for layer in range(3)
            ],
        },
        "logprobs": {
            "tokens": 990,
            "mean": estimate(gap, 0.0005),
            "std": 2.5 * gap,
            "quantiles": {
                "50": estimate(gap / 2),
                "90": estimate(3 * gap),
                "99": estimate(7 * gap, 0.001),
                "99.9": estimate(9 * gap),
            },
            "largest": 11 * gap,
            "ratio": estimate(1.00071, 0.0001),
            "outside": estimate(share / 7, 0.0001),
            "tail": [0.9, 0.25, gap, 0.0],
            "change": None if remedy == "live" else change,
        },
        "loss": 3.4567,
        "experts_per_token": 2.0,
    }


def stored_mismatch() -> dict[str, Any]:
    skipped = {"remedy": "float32", "rollout": "simulated", "reason": "its gates are of two kinds."}
    return {
        "schema": 1,
        "status": "complete",
        "model": dict(audited.STORED["model"]),
        "data": {
            "kind": "rollout",
            "checksum": "f70d1419",
            "sequences": 8,
            "tokens": 1000,
            "engine": "vLLM on a GPU",
            "logprobs": True,
        },
        "settings": {
            "rollout_dtype": "bfloat16",
            "rollout_batch": 1,
            "rollout_decode": True,
            "clip": [0.8, 1.2],
            "draws": 1000,
            "tail": TAIL,
        },
        "versions": {"torch": "2.13.7"},
        "seconds": 12.34,
        "rows": [
            row("live", "recorded", 0.0213, 0.0123),
            row("replay", "recorded", 0.0, 0.0045),
            row("live", "simulated", 0.0187, 0.0123),
            row("replay", "simulated", 0.0, 0.0041),
            row("smooth", "simulated", 0.0311, 0.0067, router="smooth[budget=0.25]"),
        ],
        "skipped": [skipped],
    }


# As it is read from its file.
report_of: Callable[[dict[str, Any]], MismatchReport] = partial(from_mapping, MismatchReport)
