"""Which tokens are real, from whatever a model was given as its attention mask."""

import torch
from torch import Tensor


def token_mask_of(mask: object, sequences: int, length: int, past: int | None = None) -> Tensor | None:
    """(B,N) bool, True where a token is real; None if all are.

    A 2-D mask may be longer than the tokens at hand: the earlier ones are in the cache. Of a 4-D mask the diagonal tells: a
    real token may always look at itself. `past` is how many tokens came before; what a static cache has not written yet
    comes after those at hand. A dict holds a mask for each kind of attention.
    """
    if isinstance(mask, dict):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    columns = mask.shape[-1]
    start = columns - length if past is None else min(past, columns - length)
    if mask.dim() == 2:
        return (mask[:, start : start + length] != 0).expand(sequences, length)
    if mask.dim() == 4:
        own = mask[:, 0, :, start : start + length]
        own = own.diagonal(dim1=-2, dim2=-1) if own.shape[-2] == length else own[:, -1]
        allowed = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
        return allowed.expand(sequences, length)
    raise ValueError(f"the attention mask has {mask.dim()} dimensions; expected (B, N) or (B, 1, N, M).")
