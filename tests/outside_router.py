"""A router outside the package, which is registered, certified and planned as those inside it."""

import torch
from torch import Tensor, nn

import holdfast
from holdfast.routing import (
    Context,
    Cost,
    LayerSizes,
    Order,
    Score,
    ScoreDeclarations,
    Values,
    gamma,
    linear_float32,
    unit,
)


@holdfast.register("distance", stage="score", about="minus half the squared distance to a centre", paper="this page")
class Distance(Score):
    """logit_e = -|x - c_e|^2 / (2 width^2)"""

    def __init__(self, dim: int, experts: int, *, width: float = 3.0) -> None:
        super().__init__()
        if not width > 0:
            raise ValueError(f"width is {width}; it divides the distances and must be positive.")
        self.dim, self.experts, self.width = dim, experts, width
        self.centres = nn.Parameter(torch.randn(experts, dim))

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        products = linear_float32(tokens, self.centres)  # float32 even under autocast and with TF32 switched on
        lengths = tokens.float().square().sum(-1, keepdim=True) + self.centres.float().square().sum(-1)
        return (products - lengths / 2) / self.width**2

    @property
    def declares(self) -> ScoreDeclarations:
        return ScoreDeclarations(cost=self.cost, order=self.order)

    def cost(self, sizes: LayerSizes) -> Cost:
        """For `plan`: the logits are kept for the backward and, unless the model is float32, the token as float32."""
        copied = 0 if sizes.number == 4 else 4 * sizes.dim  # `number`: bytes of a number of the model
        return Cost("score", kept=4 * sizes.experts + copied)

    def order(self, tokens: Tensor, context: Context) -> Order:
        """For `certify`: |x|^2 is the same for all experts, so x.c / width^2 - |c|^2 / (2 width^2) has the logits' order."""
        centres = self.centres.detach().double()
        longest = float(centres.norm(dim=-1).max())
        terms = gamma(self.dim + 8, unit(torch.float32))  # d terms, then at most 8 roundings
        return Order(
            matrix=centres / self.width**2,
            bias=-centres.square().sum(-1) / (2 * self.width**2),
            shifted=True,
            rounding=lambda lengths: terms * (lengths + longest) ** 2 / self.width**2,
            values=Values(),  # the logits are these keys, up to that shift
        )
