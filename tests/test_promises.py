"""What users were promised stays: names, commands and their options, routers, families, recipes, attacks and metrics."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import holdfast
from holdfast_command import COMMANDS

STORED = Path(__file__).with_name("promises.json")


def promises() -> dict[str, Any]:
    from holdfast.attacks.registry import ATTACKS
    from holdfast.cli.main import command_class
    from holdfast.hub.families import DENSE_FAMILIES, MOE_FAMILIES, VISION_LANGUAGE_FAMILIES
    from holdfast.metrics.registry import METRICS
    from holdfast.train import recipes

    return {
        "names": sorted(holdfast.__all__),
        "options": {name: sorted(entry.name for entry in fields(command_class(name))) for name in COMMANDS},
        "routers": sorted(holdfast.list_routers()),
        "families": sorted([*DENSE_FAMILIES, *MOE_FAMILIES, *VISION_LANGUAGE_FAMILIES]),
        "recipes": sorted(recipes()),
        "attacks": sorted(attack.name for attack in ATTACKS),
        "metrics": sorted(metric.name for metric in METRICS),
    }


def missing(promised: Any, offered: Any) -> list[str]:
    """Return what was promised and is not offered. More may be offered: other tests register routers of their own."""
    if isinstance(promised, dict):
        return [f"{key}: {name}" for key, names in promised.items() for name in missing(names, offered.get(key, []))]
    return sorted(set(promised) - set(offered))


def test_nothing_that_was_promised_is_gone() -> None:
    assert missing(json.loads(STORED.read_text(encoding="utf-8")), promises()) == []
