"""Model outputs with fields for what routers add: `router_loss`, `aux_loss`, `router_logits`.

A field that its class does not declare gets lost, or stops DDP and `torch.compile`, which take outputs apart and build them
again from the class.
"""

import dataclasses
import typing
from typing import Any

FIELDS = ("router_loss", "aux_loss", "router_logits")
_extended: dict[type, type] = {}


def extended(kind: type) -> type:
    """Return the output class `kind` with the fields; always the same one."""
    if kind not in _extended:
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        fields = [(name, Any, dataclasses.field(default=None)) for name in FIELDS if name not in known]
        made = dataclasses.make_dataclass(
            kind.__name__, fields, bases=(kind,), namespace={"__doc__": kind.__doc__, "__reduce_ex__": _reduce}
        )
        made.__module__, made.__qualname__ = kind.__module__, kind.__qualname__
        _extended[kind] = made
    return _extended[kind]


def _reduce(outputs: Any, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles: the class cannot be found by its name, which is another's, but made again."""
    return _made_again, (type(outputs).__bases__[0], {name: getattr(outputs, name) for name in outputs})


def _made_again(kind: type, values: dict[str, Any]) -> Any:
    return extended(kind)(**values)


def extend_annotated(model: Any) -> None:
    """Make the extended class of what the model's forward returns now: a compiler cannot make one while it traces."""
    from transformers.utils import ModelOutput

    try:
        returned = typing.get_type_hints(type(model).forward).get("return")
    except (NameError, TypeError, AttributeError):
        return
    for kind in (returned, *typing.get_args(returned)):
        if isinstance(kind, type) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind):
            extended(kind)


def with_fields(outputs: Any) -> Any:
    """Return the outputs as an instance of their extended class."""
    kind = type(outputs)
    if kind in _extended.values():
        return outputs
    return _extended[kind](**outputs) if kind in _extended else extended(kind)(**outputs)
