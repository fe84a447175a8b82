"""Proposition 1 of Mutual-Inform: a bound of the entropy of informed gates, beside the entropy itself.

A token that shares gates has p_i = sum_j W_ij e_j, with weights W_i over the tokens of its sequence, e_j their gates. Then

    H(p_i) <= sum_j W_ij H(e_j) + H(W_i)                                       (eqn 18), and H(p_i) >= sum_j W_ij H(e_j)

If only tokens inform that are not less certain, the first term is at most H(e_i); as tau -> 0 the second one goes to 0.

N tokens of a sequence, E experts; entropies in nats
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class MixedEntropies:
    """Entropies of the gates of the tokens of a sequence, each (N,)."""

    own: Tensor  # H(e_i), before tokens inform each other
    informed: Tensor  # H(p_i)
    bound: Tensor  # sum_j W_ij H(e_j) + H(W_i)
    mixing: Tensor  # H(W_i), the part of the bound that the temperature controls


def entropy(shares: Tensor) -> Tensor:
    """Return -sum p log p over the last dimension."""
    return torch.special.entr(shares).sum(-1)


def mixed_entropies(gates: Tensor, weights: Tensor) -> MixedEntropies:
    """Return the entropies for `gates (N,E)` with rows that sum to 1, and `weights (N,N)` with rows that sum to 1."""
    gates, weights = gates.double(), weights.double()
    for name, rows in (("gates", gates), ("weights", weights)):
        if not (rows >= 0).all() or not torch.allclose(rows.sum(-1), torch.ones_like(rows[:, 0]), atol=1e-4):
            raise ValueError(f"rows of the {name} must not be negative and must sum to 1.")
    own, mixing = entropy(gates), entropy(weights)
    return MixedEntropies(own, entropy(weights @ gates), weights @ own + mixing, mixing)


def similarity_weights(
    tokens: Tensor, *, tau: float | None = None, causal: bool = True, certainty: Tensor | None = None
) -> Tensor:
    """Return W (N,N) = softmax_j(u_i . u_j / tau) over the tokens that may inform token i, of a sequence `tokens (N,d)`.

    tau         None: the root of the width
    causal      only earlier tokens and the token itself inform it
    certainty   (N,): entropies of the gates; only tokens whose entropy is not larger inform (J_i of the paper)
    """
    rows = tokens.double()
    scores = rows @ rows.t() / (math.sqrt(rows.shape[1]) if tau is None else tau)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if certainty is not None:
        allowed &= certainty.unsqueeze(0) <= certainty.unsqueeze(1)
    return torch.softmax(scores.where(allowed, -torch.inf), dim=-1)
