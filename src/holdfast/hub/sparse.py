"""The layer that takes a feed-forward network's place."""

from typing import Any

from torch import Tensor, nn

from holdfast.hub.adapters import running
from holdfast.layers import Experts
from holdfast.routing import Router


class SparseLayer(nn.Module):
    """Experts and a router where a model had one feed-forward network: `(B,N,d)` to `(B,N,d)`."""

    surroundings: Any  # set by `wire`

    def __init__(self, router: Router, experts: Experts, dropout: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.dropout = router, experts, dropout
        # What `reroute` took out, the router and its spec, for `restore`: not a part of the model any more.
        self.__dict__["former"] = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        surroundings = self.surroundings
        router = running(self.router)
        surroundings.follow(router)
        context = surroundings.context(hidden_states)
        routing = self.router(hidden_states, context)
        weights = surroundings.leave(hidden_states, routing, context, router.losses)
        flat = context.clean(hidden_states).reshape(-1, hidden_states.shape[-1])
        out = self.experts(flat, routing.experts, weights).view(hidden_states.shape)
        return out if self.dropout is None else self.dropout(out)
