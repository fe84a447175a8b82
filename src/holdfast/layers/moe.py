"""Layers with a router and experts: the MoE layer, and the base class of all.

y = experts(x, routing) + shared(x)
"""

from abc import ABC, abstractmethod
from typing import ClassVar, final

from torch import Tensor, nn

from holdfast.layers.experts import Activation, Experts, resolve_activation
from holdfast.routing import Context, Router, Routing
from holdfast.routing.declarations import LayerKind

LAYER_NAMES: dict[LayerKind, str] = {"moe": "MoE", "soft": "SoftMoE", "smear": "SMEAR"}


class RoutedLayer(nn.Module, ABC):
    """y = experts(x, routing) + shared(x), where `shared` runs on every token (abstract).

    `forward` returns the output and the `Routing`, whose losses the caller adds to the training loss. Padding that contains
    NaN or huge numbers is replaced by 0.
    """

    kind: ClassVar[LayerKind]

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        if router.experts != experts.experts:
            raise ValueError(
                f"the router selects from {router.experts} experts, but there are {experts.experts}; use the same number."
            )
        if router.dim != experts.dim:
            raise ValueError(f"the router has width {router.dim} and the experts {experts.dim}; use the same width.")
        if router.select.layer_kind != self.kind:
            raise ValueError(
                f"{type(router.select).__name__} selects for a layer of its own; use holdfast."
                f"{LAYER_NAMES[router.select.layer_kind]} instead of {LAYER_NAMES[self.kind]}."
            )
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, tokens: Tensor, context: Context | None = None) -> tuple[Tensor, Routing]:
        if context is not None and context.causal and self.router.select.declares.refuses_causal:
            raise ValueError(not_causal(LAYER_NAMES[self.kind]))
        if context is not None and context.token_mask is not None:
            tokens = context.zero_unusable(tokens.view(*context.token_mask.shape, -1)).view(tokens.shape)
        routing: Routing = self.router(tokens, context)
        real = None if context is None else context.token_mask
        replays = context is not None and context.replayed is not None
        most_rows = None if replays else self.router.select.most_rows(routing.experts.shape[0])
        out = self.run(self.experts, tokens, routing, routing.weights, real, most_rows)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out, routing

    @staticmethod
    @abstractmethod
    def run(
        experts: Experts,
        tokens: Tensor,
        routing: Routing,
        weights: Tensor,
        real: Tensor | None,
        most_rows: int | None = None,
    ) -> Tensor:
        """Return the outputs of `experts` for `tokens (B,N,d)`, with `weights (T,K)` in the place of the routing's.

        most_rows   as the selector that returned the routing declares it; None: not known
        """


def not_causal(layer: str) -> str:
    """Return the error for a layer that a causal model may not use."""
    return (
        f"{layer} computes a token from the whole sequence, so in this causal model a token would read later ones; choose "
        "another router, or give the option causal=False to accept that the model cannot generate."
    )


@final
class MoE(RoutedLayer):
    """y = experts(x, routing) + shared(x), where `shared` runs on every token (DeepSeek's shared experts).

    `forward` returns the output and the `Routing`, whose losses the caller adds to the training loss. Padding that contains
    NaN or huge numbers is replaced by 0.
    """

    kind = "moe"

    @staticmethod
    def run(
        experts: Experts,
        tokens: Tensor,
        routing: Routing,
        weights: Tensor,
        real: Tensor | None,
        most_rows: int | None = None,
    ) -> Tensor:
        limit = {} if most_rows is None else {"most_rows": most_rows}  # experts of one's own need not know it
        out: Tensor = experts(tokens.reshape(-1, tokens.shape[-1]), routing.experts, weights, **limit)
        return out.view(tokens.shape)


def name_layers(model: nn.Module) -> nn.Module:
    """Set `Router.layer` of every router in `model` to its module path, for error messages; return the model."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.layer = name or module.layer
    return model


class FeedForward(nn.Module):
    """A dense feed-forward network: down(activation(gate x) * up x), or down(activation(up x)) if not `gated`."""

    def __init__(
        self, dim: int, hidden: int, *, activation: str | Activation = "silu", gated: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        _, self.activation = resolve_activation(activation)
        self.gate_proj = nn.Linear(dim, hidden, bias=bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        up = self.up_proj(tokens)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(tokens)) * up
        out: Tensor = self.down_proj(hidden)
        return out
