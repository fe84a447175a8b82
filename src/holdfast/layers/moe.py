"""The MoE layer: a router chooses, experts run, shared experts join in.

One dense feed-forward network: the shared expert that every token passes.
"""

from torch import Tensor, nn

from holdfast.layers.experts import Activation, Experts, resolve
from holdfast.routing import Context, Router, Routing


class MoE(nn.Module):
    """y = experts(x, routing) + shared(x), where every token passes `shared` (DeepSeek's shared experts).

    `forward` returns the output and the `Routing`, whose losses the caller adds to the training loss. A token of padding
    that holds NaN or huge numbers is 0 to all of them.
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        if router.experts != experts.experts:
            raise ValueError(f"the router chooses among {router.experts} experts, but there are {experts.experts}.")
        if router.dim != experts.dim:
            raise ValueError(f"the router reads tokens of width {router.dim}, the experts of width {experts.dim}.")
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, tokens: Tensor, context: Context | None = None) -> tuple[Tensor, Routing]:
        if context is not None and context.token_mask is not None:
            tokens = context.clean(tokens.view(*context.token_mask.shape, -1)).view(tokens.shape)
        routing: Routing = self.router(tokens, context)
        out = self.experts(tokens.reshape(-1, tokens.shape[-1]), routing.experts, routing.weights).view(tokens.shape)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out, routing


def name_layers(model: nn.Module) -> nn.Module:
    """Tell every router in `model` its place there, so that an error can name the layer. Returns the model."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.layer = name or module.layer
    return model


class FeedForward(nn.Module):
    """down(activation(gate x) * up x), or down(activation(up x)) when not `gated`."""

    def __init__(
        self, dim: int, hidden: int, *, activation: str | Activation = "silu", gated: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        _, self.activation = resolve(activation)
        self.gate_proj = nn.Linear(dim, hidden, bias=bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        up = self.up_proj(tokens)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(tokens)) * up
        out: Tensor = self.down_proj(hidden)
        return out
