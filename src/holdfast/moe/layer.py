"""The MoE layer: a router chooses, experts run, shared experts join in."""

from torch import Tensor, nn

from holdfast.moe.experts import Experts
from holdfast.routing import Context, Router, Routing
from holdfast.routing.records import drop_padding


class MoE(nn.Module):
    """y = experts(x, routing) + shared(x), where every token passes `shared` (DeepSeek's shared experts).

    `forward` returns the output and the `Routing`, whose losses the caller adds to the training loss. A token of padding,
    whatever it holds, goes to no expert and enters `shared` as 0.
    """

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        if router.experts != experts.experts:
            raise ValueError(f"the router chooses among {router.experts} experts, but there are {experts.experts}.")
        if router.dim != experts.dim:
            raise ValueError(f"the router reads tokens of width {router.dim}, the experts of width {experts.dim}.")
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, tokens: Tensor, context: Context | None = None) -> tuple[Tensor, Routing]:
        routing: Routing = self.router(tokens, context)
        slots = drop_padding(routing.experts, routing.weights, context, self.experts.experts)
        out = self.experts(tokens.reshape(-1, tokens.shape[-1]), *slots).view(tokens.shape)
        if self.shared is not None:
            out = out + self.shared(tokens if context is None else _without_padding(tokens, context))
        return out, routing


def _without_padding(tokens: Tensor, context: Context) -> Tensor:
    """`tokens (B,N,d)`, or (T,d) with a padding mask of shape (1,T), with 0 in padding."""
    return context.only_real(tokens if tokens.dim() == 3 else tokens.unsqueeze(0)).view(tokens.shape)


def name_layers(model: nn.Module) -> nn.Module:
    """Tell every router in `model` its place there, so that an error can name the layer. Returns the model."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.layer = name or module.layer
    return model
