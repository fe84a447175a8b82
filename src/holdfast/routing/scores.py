"""The stage score: how well each expert fits a token. All arithmetic is float32, whatever the dtype of the model.

    Linear      x W^T + b
    Frozen      x W^T with a random W that is never trained
    Cosine      the cosine of a projection of x and an embedding of each expert

The functions at the end handle weights that accelerate offloads: they are loaded only for the forward of their module.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.routing.declarations import FLOAT, Cosines, Cost, LayerSizes, Order, Values, projection_flops
from holdfast.routing.parts import LinearScore
from holdfast.routing.records import Context

LARGE, SMALLER = 2.0**56, 2.0**-70  # a projection with a larger number is scaled down
SHORTEST = 1e-6  # a shorter projection is not scaled up to length 1, nor is its gradient


class Linear(LinearScore):
    """logits = x W^T (+ b).

    bias    add b, which is trained and starts at 0
    """

    def __init__(self, dim: int, experts: int, *, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.experts = dim, experts
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.bias = nn.Parameter(torch.zeros(experts)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))

    @property
    def matrix(self) -> Tensor:
        return self.weight

    def finish(self, projected: Tensor) -> Tensor:
        return projected if self.bias is None else projected + self.bias.float()

    def order(self, tokens: Tensor, context: Context) -> Order:
        return Order(self.weight, None if self.bias is None else self.bias.float())

    def values(self, tokens: Tensor, context: Context) -> Values:
        return Values()


class Frozen(LinearScore):
    """logits = x W^T with a random W that is never trained (SMoE-dropout; the random router of Symphony's appendix C)."""

    weight: Tensor

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.dim, self.experts = dim, experts
        self.register_buffer("weight", torch.randn(experts, dim, dtype=torch.float32) / math.sqrt(dim))

    @property
    def matrix(self) -> Tensor:
        return self.weight

    def finish(self, projected: Tensor) -> Tensor:
        return projected

    def cost(self, sizes: LayerSizes) -> Cost:
        """Count one gradient: the weights have none."""
        forward = projection_flops(self.weight)
        return Cost("score", forward, forward, kept=FLOAT * sizes.experts)

    def order(self, tokens: Tensor, context: Context) -> Order:
        return Order(self.weight)

    def values(self, tokens: Tensor, context: Context) -> Values:
        return Values()


class Cosine(LinearScore):
    """logits = cos(Omega x, e) / temperature, in a low-dimensional space (XMoE, Chi et al. 2022).

    width           of the space; None: half the number of experts, at least 8
    temperature     at the start; it is trained
    """

    def __init__(self, dim: int, experts: int, *, width: int | None = None, temperature: float = 0.07) -> None:
        super().__init__()
        width = max(8, experts // 2) if width is None else width
        if width < 1:
            raise ValueError(f"width is {width}; the cosine score needs a space of at least 1 dimension.")
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it divides the cosines and must be positive.")
        self.dim, self.experts = dim, experts
        self.projection = nn.Parameter(torch.empty(width, dim))
        self.embeddings = nn.Parameter(torch.empty(experts, width))
        # The parameter is the logarithm: no step and no weight decay can make the temperature zero or negative.
        self.log_temperature = nn.Parameter(torch.tensor([math.log(temperature)]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.projection)
        nn.init.normal_(self.embeddings)

    @property
    def matrix(self) -> Tensor:
        return self.projection

    def finish(self, projected: Tensor) -> Tensor:
        # A length is a sum of squares, which overflows from 1e19 on. A factor that is a power of 2 is exact.
        huge = projected.detach().abs().amax(-1, keepdim=True) > LARGE
        projected = projected * torch.where(huge, SMALLER, 1.0)
        cosines = linear_float32(F.normalize(projected, dim=-1, eps=SHORTEST), F.normalize(self.embeddings.float(), dim=-1))
        return cosines / self.log_temperature.float().exp()

    def cost(self, sizes: LayerSizes) -> Cost:
        forward = projection_flops(self.projection) + projection_flops(self.embeddings)
        return Cost("score", forward, 2 * forward, kept=FLOAT * sizes.experts)

    def order(self, tokens: Tensor, context: Context) -> Order:
        """Declare z.e: dividing by the temperature and by the length of z, both positive, changes neither order nor sign."""
        units = F.normalize(self.embeddings.detach().double(), dim=-1)
        # Two normalisations, the cosines and the temperature come after the product.
        return Order(self.projection, combine=units, roundings=3 * self.projection.shape[0] + 16)

    def values(self, tokens: Tensor, context: Context) -> Values:
        return Values(Cosines(float(self.log_temperature.detach().double().exp()), SHORTEST))


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate has offloaded weights of this module or of a module inside it."""
    return any("_hf_hook" in part.__dict__ and _has_offloaded_weights(part) for part in module.modules())


@contextlib.contextmanager
def weights_loaded(module: nn.Module) -> Iterator[None]:
    """Load offloaded weights of `module` inside the `with`, for code that reads them outside of the module's forward.

    Tensors that were read inside stay valid afterwards; the module releases its own references.
    """
    hooked: list[Any] = [part for part in module.modules() if "_hf_hook" in part.__dict__ and _has_offloaded_weights(part)]
    for part in hooked:
        part._hf_hook.pre_forward(part)
    try:
        yield
    finally:
        for part in hooked:
            part._hf_hook.post_forward(part, None)


def _has_offloaded_weights(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
