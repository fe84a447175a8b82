"""Reading the attention masks of models: padding, sliding windows, and rows that hold several sequences.

B sequences, N current tokens, M keys; a mask is bool, or numbers that are added to the attention's scores
"""

from typing import Any

import torch
from torch import Tensor


def window_mask(
    queries: int, keys: int, window: int | None, device: torch.device, positions: Tensor | None = None
) -> Tensor:
    """Return (1,1,N,M) bool: True for keys less than `window` tokens before the query, and for later keys.

    `Context.causal` masks the later keys. With the `positions (N,)` of the queries in a static cache they are False here.
    """
    places = torch.arange(keys, device=device)
    distance = (places[-queries:] if positions is None else positions).unsqueeze(1) - places
    allowed = torch.ones_like(distance, dtype=torch.bool) if window is None else distance < window
    return (allowed if positions is None else allowed & (distance >= 0)).view(1, 1, queries, -1)


def token_mask_of(
    mask: object, sequences: int, length: int, past: int | None = None, positions: Tensor | None = None
) -> Tensor | None:
    """Return (B,N) bool, True where a token is real, from a model's attention mask; None if all tokens are real.

    mask        (B,M): the last N columns are the current tokens. (B,1,N,M): the diagonal is read, since a real token always
                attends to itself. A dict with a mask for each kind of attention: the first one is read
    past        number of tokens before the current ones. With a static cache, the mask also has columns after the current
                tokens
    positions   (N,), the columns of the current tokens, instead of `past`
    """
    if isinstance(mask, dict):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() not in (2, 4):
        raise ValueError(f"the attention mask has {mask.dim()} dimensions; expected (B, N) or (B, 1, N, M).")
    columns = mask.shape[-1]
    if positions is not None:
        shift = (positions[-1:] - columns + 1).clamp_min(0)
        current = (mask if mask.dim() == 2 else mask[:, 0]).index_select(-1, positions - shift)
    else:
        start = columns - length if past is None else min(past, columns - length)
        current = (mask if mask.dim() == 2 else mask[:, 0])[..., start : start + length]
    if mask.dim() == 2:
        return (current != 0).expand(sequences, length)
    current = current.diagonal(dim1=-2, dim2=-1) if current.shape[-2] == length else current[:, -1]
    return allowed_by(current).expand(sequences, length)


def allowed_by(mask: Tensor) -> Tensor:
    """Return a mask as bool, True where attention is allowed. Other masks are added to the attention's scores."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def require_separate_sequences(mask: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if a row has several sequences and no mask from which a router can separate them."""
    if options.get("cache") is not None:
        raise ValueError(
            "continuous batching (generate_batch) puts sequences into one row and their tokens into pages, where a "
            "sequence-aware router cannot separate the sequences; use generate."
        )
    if options.get("cu_seq_lens_q") is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        raise ValueError(
            "sequences are packed into one row without a mask between them, where a sequence-aware router cannot "
            'separate the sequences; set the model\'s attention to "sdpa" or "eager".'
        )


def require_one_sequence_in_a_row(mask: Tensor, real: Tensor) -> None:
    """Raise ValueError if a mask `(B,1,N,N)` separates a real token from the real token before it."""
    places = torch.arange(real.shape[1], device=real.device)
    # (B,N-1): the last real token before each token; token 0 where there is none.
    before = places.where(real, 0).cummax(1).values[:, :-1]
    seen = allowed_by(mask[:, 0]).expand(len(real), -1, -1)[:, 1:].gather(2, before.unsqueeze(-1)).squeeze(-1)
    if bool((real[:, 1:] & real.gather(1, before) & ~seen).any()):
        raise ValueError(
            "the attention mask packs several sequences into one row, and a SoftMoE or SMEAR layer would mix them; put "
            "each sequence into a row of its own."
        )
