"""Rows of records: those of real tokens, and what is kept of them for later.

padding (B,N) or (T,) bool, True where the token is real; None if all are
"""

import torch
from torch import Tensor

from holdfast.routing import Routing


def kept(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """The rows of `values (T, ...)` that belong to real tokens."""
    if token_mask is None:
        return values
    tokens = values.shape[0]
    if token_mask.dtype != torch.bool or token_mask.numel() != tokens:
        raise ValueError(
            f"token_mask is {token_mask.dtype} of shape {tuple(token_mask.shape)}; expected {tokens} bools, "
            "True where the token is real (for an attention mask of 0 and 1: mask.bool())."
        )
    return values[token_mask.reshape(-1).to(values.device)]


def only_real(routing: Routing, token_mask: Tensor | None, device: torch.device | None = None) -> Routing:
    """The rows of the real tokens, detached and without losses; on `device`, where another record is, if given."""
    fields = (routing.logits, routing.gates, routing.experts, routing.weights)
    logits, gates, experts, weights = (kept(field.detach(), token_mask).to(device or field.device) for field in fields)
    return Routing(logits, gates, experts, weights)


def selection_only(routing: Routing) -> Routing:
    """Experts and weights, to be kept for a while: of logits and gates only the shape is left, one zero expanded."""
    gates = routing.gates.new_zeros(()).expand(routing.gates.shape)
    return Routing(gates, gates, routing.experts.detach(), routing.weights.detach())


def same_padding(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other.to(one.device))
