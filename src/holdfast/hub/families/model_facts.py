"""What a model's config says about its inputs: its text part, its image tokens, its token ids."""

from typing import Any

import torch
from torch import Tensor

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
