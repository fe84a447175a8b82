"""The MoE layer: a router selects experts, they run, and a shared expert is added.

y = experts(x, routing) + shared(x)
"""

from torch import Tensor, nn

from holdfast.layers.experts import Activation, Experts, resolve_activation
from holdfast.routing import Context, Router, Routing


class MoE(nn.Module):
    """y = experts(x, routing) + shared(x), where `shared` runs on every token (DeepSeek's shared experts).

    `forward` returns the output and the `Routing`, whose losses the caller adds to the training loss. Padding that contains
    NaN or huge numbers is replaced by 0.
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        if router.experts != experts.experts:
            raise ValueError(
                f"the router selects from {router.experts} experts, but there are {experts.experts}; use the same number."
            )
        if router.dim != experts.dim:
            raise ValueError(f"the router has width {router.dim} and the experts {experts.dim}; use the same width.")
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, tokens: Tensor, context: Context | None = None) -> tuple[Tensor, Routing]:
        if context is not None and context.token_mask is not None:
            tokens = context.zero_unusable(tokens.view(*context.token_mask.shape, -1)).view(tokens.shape)
        routing: Routing = self.router(tokens, context)
        out = self.experts(tokens.reshape(-1, tokens.shape[-1]), routing.experts, routing.weights).view(tokens.shape)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out, routing


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
