"""What is known about a model's inputs and outputs.

Inputs: what its config says of its text part, its image tokens, its token ids. Outputs: its output classes, with fields for
the routers' losses and logits (`ROUTER_FIELDS`).
"""

import dataclasses
import typing
from typing import Any

import torch
from torch import Tensor

ROUTER_FIELDS = ("router_loss", "aux_loss", "router_logits")
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # entries of a config


def text_config(model: Any) -> Any:
    """Return the config of the model's text part, which is the config itself in most models."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def image_tokens(model: Any) -> list[int]:
    """Return the token ids in whose place a vision and language model puts the parts of an image or a video."""
    found = (getattr(model.config, name, None) for name in IMAGE_TOKENS)
    return sorted({token for token in found if isinstance(token, int) and not isinstance(token, bool)})


def modality_of(ids: Tensor | None, image_tokens: list[int]) -> Tensor | None:
    """Return (B,N): 1 for token `ids (B,N)` that stand for a part of an image, 0 for text; None if that is not known."""
    if ids is None or not image_tokens:
        return None
    return torch.stack([ids == token for token in image_tokens]).any(0).long()


def as_token_ids(given: Any) -> Tensor | None:
    """Return a model's first argument if it is token ids (B,N); None if it is pixels or embeddings."""
    return given if isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point() else None


_classes_with_fields: dict[type, type] = {}


def class_with_router_fields(kind: type) -> type:
    """Return a subclass of the output class `kind` with `ROUTER_FIELDS`; the same one for every call."""
    if kind not in _classes_with_fields:
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        fields = [(name, Any, dataclasses.field(default=None)) for name in ROUTER_FIELDS if name not in known]
        made = dataclasses.make_dataclass(
            kind.__name__, fields, bases=(kind,), namespace={"__doc__": kind.__doc__, "__reduce_ex__": _reduce}
        )
        made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
        _classes_with_fields[kind] = made
    return _classes_with_fields[kind]


def _reduce(outputs: Any, protocol: Any) -> tuple[Any, ...]:
    """Support copying and pickling: the class cannot be imported by its name, which is its base's, so it is made again."""
    return _rebuild, (type(outputs).__bases__[0], {name: getattr(outputs, name) for name in outputs})


def _rebuild(kind: type, values: dict[str, Any]) -> Any:
    return class_with_router_fields(kind)(**values)


def prepare_output_classes(model: Any) -> None:
    """Make the class with `ROUTER_FIELDS` for the model's outputs now: a compiler cannot trace the creation of a class."""
    from transformers.utils import ModelOutput

    try:
        returned = typing.get_type_hints(type(model).forward).get("return")
    except (NameError, TypeError, AttributeError):
        return
    for kind in (returned, *typing.get_args(returned)):
        if isinstance(kind, type) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind):
            class_with_router_fields(kind)


def with_router_fields(outputs: Any) -> Any:
    """Return the outputs as an instance of their class with `ROUTER_FIELDS`."""
    kind = type(outputs)
    if kind in _classes_with_fields.values():
        return outputs
    # Look into the dictionary first: a compiler cannot trace the creation of a class.
    return (
        _classes_with_fields[kind](**outputs) if kind in _classes_with_fields else class_with_router_fields(kind)(**outputs)
    )
