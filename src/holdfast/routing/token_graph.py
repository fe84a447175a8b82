"""The token graph (Mutual-Inform SMoE): tokens of a sequence share their gates.

    G = (1 - strength) P + strength W P, with P the gates and W the token graph (N x N): each row is a distribution over
    the tokens of the sequence that may inform the token

    similarity.py    Similarity             W from the similarity of u_i and u_j
    posterior.py     AttentionPosterior     W from the attention before the layer

This file has what both share: strength, which tokens inform a token, and the attention's mask. Neither ever stores the
N x N matrix (kernels/token_mixing). While decoding, both read the rows of earlier tokens from the cache. A row of padding
keeps its own gates.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.errors import unknown_name
from holdfast.kernels.token_mixing import Levels
from holdfast.routing.declarations import FLOAT, NoCertificate
from holdfast.routing.parts import Informer
from holdfast.routing.records import Context, VisibleTokens

Strength = float | Literal["learned"]
From = Literal["all", "confident"]

FIRST_STRENGTH = 0.1  # a learned strength starts here
ENTROPY_ERROR = 1e-5  # nats: entropies that differ by rounding only count as equal, however their batch was rounded
FORBIDDEN = -1e8  # an additive mask below this (float16: half of the lowest number) excludes a token


class TokenGraph(Informer):
    """A token-side informer that mixes gates by a distribution over tokens (abstract).

    strength    a number from 0 (no mixing) to 1. "learned": sigmoid(strength_logit), a parameter that starts at 0.1
    from_       the option `from`: which tokens inform token i. "all": all that i may see. "confident": of these, only
                J_i = {j : H_j <= H_i}, with H the entropy of softmax(logits) of a token; i itself is always one of them
    """

    side = "token"
    static_rows = True
    strength_logit: nn.Parameter | None

    def __init__(self, *, strength: Strength = 1.0, from_: From = "all") -> None:
        super().__init__()
        if isinstance(strength, str):
            if strength != "learned":
                raise ValueError(f"strength is {strength!r}; it must be a number between 0 (no mixing) and 1, or 'learned'.")
        elif not 0 <= strength <= 1:
            raise ValueError(f"strength is {strength}; it must be between 0 (no mixing) and 1.")
        if from_ not in get_args(From):
            raise ValueError(unknown_name("value of from", from_, get_args(From)))
        self.from_: From = from_
        self._fixed_strength = None if isinstance(strength, str) else float(strength)
        first = torch.full((1,), math.log(FIRST_STRENGTH / (1 - FIRST_STRENGTH)))
        self.strength_logit = nn.Parameter(first) if self._fixed_strength is None else None

    @property
    def strength(self) -> float:
        """The strength now, as a number. On a GPU, reading a learned one waits for the device."""
        if self.strength_logit is None:
            assert self._fixed_strength is not None
            return self._fixed_strength
        return float(self.strength_logit.detach().float().sigmoid())

    @property
    def inert(self) -> bool:
        return self._fixed_strength == 0

    def snapshot(self) -> dict[str, Tensor]:
        """Return a learned strength."""
        return {} if self.strength_logit is None else {"strength": self.strength_logit.detach().float().sigmoid()}

    def combine(self, own: Tensor, mixed: Tensor, context: Context) -> Tensor:
        """Return (1 - strength) own + strength mixed; rows of padding keep their own gates."""
        if self.strength_logit is not None:
            strength = self.strength_logit.float().sigmoid()
            mixed = (1 - strength) * own + strength * mixed
        elif self._fixed_strength != 1:
            mixed = (1 - self.strength) * own + self.strength * mixed
        return mixed if context.token_mask is None else mixed.where(context.token_mask.unsqueeze(-1), own)

    def entropy_limits(self, logits: Tensor, context: Context, name: str) -> Levels | None:
        """Return the entropies that limit which tokens inform each other; None with `from="all"`.

        The entropies of earlier tokens are in the cache, under `name`.
        """
        if self.from_ == "all":
            return None
        entropy = torch.special.entr(logits.detach().float().softmax(-1)).sum(-1)
        keys = entropy
        if context.cache is not None:
            keys = visible_rows(context.cache.extend(f"{name}.entropy", entropy), context.visible_tokens)
        return Levels(entropy + ENTROPY_ERROR, keys)

    @property
    def level_bytes(self) -> int:
        """The bytes per token of an entropy, for costs."""
        return 0 if self.from_ == "all" else FLOAT

    def require_certificate(self) -> None:
        """Raise NoCertificate if the tokens that inform a token depend on the gates."""
        if self.from_ == "confident":
            raise NoCertificate(
                f"no certificate is known for {type(self).__name__} with from=confident: a perturbation changes entropies, "
                "and with them which tokens inform a token"
            )


def visible_rows(rows: Tensor, visible: VisibleTokens | None) -> Tensor:
    """Return the cached rows of tokens whose keys attention still has: a sliding window drops the earliest."""
    # The same object where all are visible: then keys that equal queries are still known to.
    return rows if visible is None or rows.shape[1] == visible.keys else rows[:, -visible.keys :]


def masks_of_heads(mask: Tensor | None) -> Tensor | None:
    """Return the mask of all heads, with position biases if there are any, as (B or 1, heads or 1, N or 1, M)."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"the attention mask has dtype {mask.dtype}; expected bool (True where allowed) or floats to add to scores."
        )
    return mask.view(*[1] * (4 - mask.dim()), *mask.shape)


def mask_of_head(mask: Tensor | None, head: Tensor | int) -> Tensor | None:
    """Return the mask of one head, as (B or 1, N or 1, M)."""
    masks = masks_of_heads(mask)
    if masks is None or masks.shape[1] == 1:
        return None if masks is None else masks[:, 0]
    return masks[:, head] if isinstance(head, int) else masks.index_select(1, head).squeeze(1)


def allowed_pairs(visible: VisibleTokens | None) -> Tensor | None:
    """Return which pairs of tokens the mask allows, as bool; an additive mask allows values above FORBIDDEN."""
    mask = None if visible is None else mask_of_head(visible.mask, 0)
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > max(FORBIDDEN, torch.finfo(mask.dtype).min / 2)
