"""Output classes of transformers with fields for the routers' losses and logits.

DDP and `torch.compile` rebuild outputs from the fields that their class declares, and lose a field that is not declared, or
raise an error.
"""

import dataclasses
import typing
from typing import Any

ROUTER_FIELDS = ("router_loss", "aux_loss", "router_logits")

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
