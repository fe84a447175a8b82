"""One dense feed-forward network: the shared expert that every token passes."""

from torch import Tensor, nn

from holdfast.layers.activations import Activation, resolve


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
