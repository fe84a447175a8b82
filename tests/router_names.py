"""The registered routers, by what they need, for tests that run all of them."""

from typing import Any

import holdfast
from holdfast.routing.presets import REGISTRY

VOCABULARY = 64  # token ids in the contexts of the tests
# Options without a default; a Hugging Face model gives them.
NEEDED: dict[str, dict[str, Any]] = {
    "attention": {"heads": 2},
    "hash": {"vocabulary": VOCABULARY},
    "stablemoe": {"vocabulary": VOCABULARY},
    "softmoe": {"causal": False},  # these two refuse the causal contexts of the tests otherwise
    "smear": {"causal": False},
}
BY_ID = ["hash", "stablemoe"]  # they read token ids
BY_MODALITY = ["modality"]  # they need a model with images
OTHER_LAYERS = [name for name in holdfast.list_routers() if REGISTRY.layer_kind(name) != "moe"]  # SoftMoE and SMEAR
MOE = [name for name in holdfast.list_routers() if name not in OTHER_LAYERS]  # `reroute` takes them
IN_TEXT_MODELS = [name for name in MOE if name not in BY_MODALITY]
WITHOUT_CONTEXT = [name for name in MOE if name not in ("attention", *BY_ID, *BY_MODALITY)]


def needed(name: str, **known: Any) -> dict[str, Any]:
    """Return the options that the names joined in `name` need, with the values of `known` where it has them."""
    options = {key: value for part in name.split("+") for key, value in NEEDED.get(part, {}).items()}
    return {key: known.get(key, value) for key, value in options.items()}
