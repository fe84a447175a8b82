"""A router's context on another device, for tests that compare a GPU with the mathematics on a CPU."""

import copy
from dataclasses import replace
from typing import Any

from holdfast import Context
from holdfast.routing import Previous


def on_device(context: Context, device: str) -> Context:
    """Return a copy of the context on `device`; gradients still reach the tensors that it was made from."""
    attention, previous = context.attention, context.previous
    assert attention is not None and previous is not None
    heads: dict[str, Any] = {name: getattr(attention, name).to(device) for name in ("query", "key", "value", "output")}
    mask = None if attention.mask is None else attention.mask.to(device)
    projection = copy.deepcopy(attention.projection).to(device)  # type: ignore[union-attr]
    return replace(
        context,
        token_mask=None if context.token_mask is None else context.token_mask.to(device),
        token_ids=None if context.token_ids is None else context.token_ids.to(device),
        modality=None if context.modality is None else context.modality.to(device),
        attention=replace(attention, projection=projection, mask=mask, **heads),
        previous=Previous(previous.tokens.to(device), previous.routing.map_tokens(lambda rows: rows.to(device))),
    )
