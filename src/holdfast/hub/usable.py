"""What a model must be before it is tried: finite, with a row for every token and a place for every position."""

from typing import Any

import torch
from torch import Tensor

CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def require_finite(model: Any) -> None:
    """Of the weights that are in memory; those on a disk cannot be looked at."""
    for name, weight in model.state_dict().items():
        here = weight.to_local() if hasattr(weight, "to_local") else weight  # of one that is spread, this process's part
        if here.dtype in CHECKED and not here.is_meta and not _is_finite(here):
            raise ValueError(f"{name}: its weights hold NaN or infinity; the checkpoint is broken.")


def _is_finite(weight: Tensor) -> bool:
    # A sum takes no memory, and is not finite where any weight is not. Finite ones may overflow: then each is looked at.
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def require_known(model: Any, ids: Tensor) -> None:
    """Of each token: an embedding says nothing of use about one that it has no row for."""
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and ids.numel() and (largest := int(ids.max())) >= known:
        raise ValueError(f"there is a token {largest}, but this model has {known}: the tokeniser is not this model's.")


def require_room(model: Any, length: int) -> None:
    """For sequences of that length."""
    longest = longest_sequence(model)
    if longest is not None and length > longest:
        raise ValueError(f"length is {length}, but the model's positions end at {longest} (max_position_embeddings).")


def longest_sequence(model: Any) -> int | None:
    """Where its config says so; some say -1 for no end."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(longest) if longest and longest > 0 else None
