"""The parts of a vision-language model: its vision tower, its connector and its language model.

`sparsify` and `reroute` name them, and count layers within each (`choose_in_parts`, `routers_in_parts` in convert.py).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.errors import require_known
from holdfast.hub.families import (
    PARTS,
    VISION_LANGUAGE_FAMILIES,
    DenseLayer,
    Part,
    VisionLanguageFamily,
    text_config,
)
from holdfast.hub.families.recognition import fused_experts


class OfPart(Protocol):
    """A layer that knows its part; None in a model without parts."""

    @property
    def part(self) -> Part | None: ...


InPart = TypeVar("InPart", bound=OfPart)


def model_type_of(model: Any) -> str:
    """Return `config.model_type` of a model. Raise ValueError if it has none."""
    model_type: Any = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(f"{type(model).__name__} is no Hugging Face model (it has no config.model_type) and has no Router.")
    return str(model_type)


def vision_language_family(model: Any) -> VisionLanguageFamily | None:
    """Return where the parts of a vision-language model are; None for any other model."""
    return VISION_LANGUAGE_FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))


def part_of(model: Any, name: str) -> Part | None:
    """Return the part of a vision-language model that the module `name` belongs to; None in any other model, and outside.

    "vision" is the tower, "connector" the network after it, "language" the language model.
    """
    family = vision_language_family(model)
    if family is None:
        return None
    inside = name.removeprefix(base_prefix(model))
    places: dict[Part, str] = {"vision": family.vision, "language": family.language}
    if family.connector is not None:  # first: it may be inside the tower
        places = {"connector": family.connector.place, **places}
    return next((part for part, place in places.items() if f"{inside}.".startswith(f"{place}.")), None)


def chosen_parts(model: Any, parts: str | Sequence[str] | None) -> tuple[Part, ...] | None:
    """Return `parts` in the order of `PARTS`; None if it is None. Raise ValueError if the model has no such parts."""
    if parts is None:
        return None
    if vision_language_family(model) is None:
        known = ", ".join(sorted(VISION_LANGUAGE_FAMILIES))
        raise ValueError(
            f"parts is {parts!r}, and a {model_type_of(model)} model has no parts; leave it out (vision-language models "
            f"that Holdfast knows: {known})."
        )
    given = [parts] if isinstance(parts, str) else list(parts)
    for part in given:
        require_known("part", part, PARTS)
    if not given:
        raise ValueError("parts is empty; name at least one of 'vision', 'connector' and 'language'.")
    return tuple(part for part in PARTS if part in given)


def require_dense_language(model: Any) -> None:
    """Raise ValueError if a vision-language model has experts of its own."""
    name = next((name for name, _ in fused_experts(model)), None)
    if name is not None:
        raise ValueError(
            f"{name}: this {model_type_of(model)} model has experts of its own; change its routers with holdfast.reroute. "
            "Sparsify makes parts of a model sparse whose parts are all dense."
        )


def no_dense_layer(model: Any, part: Part) -> str:
    """Return the error for a part of a vision-language model in which no layer can become sparse."""
    family, model_type = vision_language_family(model), model_type_of(model)
    if part == "connector" and (family is None or family.connector is None):
        return (
            f"the connector of {model_type} is one linear map without a hidden layer, so there is no feed-forward network "
            "to copy into experts; leave 'connector' out of parts."
        )
    config = part_config(model, part)
    return (
        f"Holdfast does not know where the feed-forward networks of {config.model_type} are, the part {part!r} of this "
        f"{model_type} model; leave it out of parts, or declare the family with holdfast.register_family."
    )


def is_read(model: Any, layer: DenseLayer, stack: Sequence[DenseLayer]) -> bool:
    """Whether a layer of `stack`, which are all layers of its part, can change an output of the model."""
    family = vision_language_family(model)
    if layer.part != "vision" or family is None:
        return True
    return next(n for n, other in enumerate(stack) if other is layer) < family.layers_read(model.config, len(stack))


def in_parts(layers: Iterable[InPart]) -> dict[Part | None, list[InPart]]:
    """Return the layers of each part, in the order of the model."""
    found: dict[Part | None, list[InPart]] = {}
    for layer in layers:
        found.setdefault(layer.part, []).append(layer)
    return found


def base_prefix(model: Any) -> str:
    """Return what the names of the base model's modules start with in `model`; "" if it is the base model."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and getattr(model, "base_model", model) is not model else ""


def part_config(model: Any, part: Part) -> Any:
    """Return the config of a part of a vision-language model; a connector has none of its own."""
    if part == "connector":
        return model.config
    return model.config.vision_config if part == "vision" else text_config(model)
