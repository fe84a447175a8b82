"""The stage score: how well each expert fits a token. All arithmetic is float32, whatever the dtype of the model.

    Linear      x W^T + b
    Frozen      x W^T with a random W that is never trained
    Cosine      the cosine of a projection of x and an embedding of each expert
    TwoLayer    W relu(V x + c) + b, a network with one hidden layer
    ModalityLinear      x W_m^T with a matrix for each modality m: text and image tokens are scored by other weights

The functions at the end handle weights that accelerate offloads: they are loaded only for the forward of their module.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.routing.declarations import FLOAT, Cosines, Cost, Order, Values
from holdfast.routing.parts import LinearScore, Score, ScoreDeclarations
from holdfast.routing.records import Context

LARGE, SMALLER = 2.0**56, 2.0**-70  # a projection with a larger number is scaled down
SHORTEST = 1e-6  # a shorter projection is not scaled up to length 1, nor is its gradient


class Linear(LinearScore):
    """logits = x W^T (+ b).

    bias    add b, which is trained and starts at 0
    """

    bias: Tensor | None

    def __init__(self, dim: int, experts: int, *, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.experts = dim, experts
        self.weight = nn.Parameter(torch.empty(experts, dim).uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim)))
        self.bias = nn.Parameter(torch.zeros(experts)) if bias else None

    def finish(self, projected: Tensor) -> Tensor:
        return projected if self.bias is None else projected + self.bias.float()

    @property
    def declares(self) -> ScoreDeclarations:
        def order(tokens: Tensor, context: Context) -> Order:
            return Order(self.weight, None if self.bias is None else self.bias.float(), values=Values())

        return replace(super().declares, order=order)


class Frozen(Linear):
    """logits = x W^T (+ b) with a random W that is never trained (SMoE-dropout; the random router of Symphony's appendix C).

    bias    add b, which is random and never trained too
    """

    def __init__(self, dim: int, experts: int, *, bias: bool = False) -> None:
        LinearScore.__init__(self)  # no parameters
        self.dim, self.experts = dim, experts
        self.register_buffer("weight", torch.randn(experts, dim, dtype=torch.float32) / math.sqrt(dim))
        if bias:
            self.register_buffer("bias", torch.randn(experts, dtype=torch.float32) / math.sqrt(dim))
        else:
            self.bias = None  # not a buffer without a value, which accelerate cannot offload


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
        self.projection = nn.Parameter(nn.init.orthogonal_(torch.empty(width, dim)))
        self.embeddings = nn.Parameter(torch.randn(experts, width))
        # The parameter is the logarithm: no step and no weight decay can make the temperature zero or negative.
        self.log_temperature = nn.Parameter(torch.tensor([math.log(temperature)]))

    @property
    def matrix(self) -> Tensor:
        return self.projection

    def finish(self, projected: Tensor) -> Tensor:
        # A length is a sum of squares, which overflows from 1e19 on. A factor that is a power of 2 is exact.
        huge = projected.detach().abs().amax(-1, keepdim=True) > LARGE
        projected = projected * torch.where(huge, SMALLER, 1.0)
        cosines = linear_float32(F.normalize(projected, dim=-1, eps=SHORTEST), F.normalize(self.embeddings.float(), dim=-1))
        return cosines / self.log_temperature.float().exp()

    @property
    def declares(self) -> ScoreDeclarations:
        return replace(super().declares, order=self._order)

    def _order(self, tokens: Tensor, context: Context) -> Order:
        """Return z.e: dividing by the temperature and by the length of z, both positive, changes neither order nor sign."""
        units = F.normalize(self.embeddings.double(), dim=-1)
        cosines = Cosines(self.log_temperature.double().exp(), SHORTEST)
        # Two normalisations, the cosines and the temperature come after the product.
        roundings = 3 * self.projection.shape[0] + 16
        return Order(self.projection, combine=units, roundings=roundings, values=Values(cosines))


class TwoLayer(LinearScore):
    """logits = W relu(V x + c) (+ b): a gate with one hidden layer, the light MLP of the survey (section 2.2).

    hidden  the width of the hidden layer; None: four times the number of experts
    bias    add b, which is trained and starts at 0, as c does

    At the start its logits are as large as those of linear scores. The regions in which tokens keep their experts are not
    bounded by planes: no order is declared, and certificates are refused.
    """

    def __init__(self, dim: int, experts: int, *, hidden: int | None = None, bias: bool = False) -> None:
        super().__init__()
        hidden = 4 * experts if hidden is None else hidden
        if hidden < 1:
            raise ValueError(f"hidden is {hidden}; the hidden layer of a gate needs a width of at least 1.")
        self.dim, self.experts = dim, experts
        self.hidden = nn.Parameter(torch.empty(hidden, dim).uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim)))
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.weight = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(experts, hidden), nonlinearity="relu"))
        self.bias = nn.Parameter(torch.zeros(experts)) if bias else None

    @property
    def matrix(self) -> Tensor:
        return self.hidden

    def finish(self, projected: Tensor) -> Tensor:
        logits = linear_float32(F.relu(projected + self.hidden_bias.float()), self.weight)
        return logits if self.bias is None else logits + self.bias.float()

    @property
    def declares(self) -> ScoreDeclarations:
        kept = FLOAT * (self.experts + len(self.hidden_bias))
        return replace(super().declares, cost=lambda sizes: Cost("score", kept=kept))


class ModalityLinear(Score):
    """logits = x W_m^T with one matrix for each modality m, from 0 on, in `Context.modality (B,N)` (survey 3.5).

    modalities  how many there are

    The experts are shared, and the load is balanced within each modality: the balance loss is the mean over the modalities
    that are present (`Routing.balance_groups`). Otherwise a batch with few image tokens could send all to one expert.
    """

    reads = ("modality",)

    def __init__(self, dim: int, experts: int, *, modalities: int = 2) -> None:
        super().__init__()
        if modalities < 1:
            raise ValueError(f"modalities is {modalities}; a score needs at least 1.")
        self.dim, self.experts, self.modalities = dim, experts, modalities
        drawn = torch.empty(modalities * experts, dim).uniform_(-1 / math.sqrt(dim), 1 / math.sqrt(dim))
        self.weight = nn.Parameter(drawn)  # the experts of modality 0 first

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        modality = token_modality(tokens, context, self.modalities)
        # One product for all modalities, as there are few: tokens need not be sorted, and shapes stay static.
        logits = linear_float32(tokens, self.weight).unflatten(-1, (self.modalities, self.experts))
        index = modality[..., None, None].expand(*modality.shape, 1, self.experts)
        return logits.gather(2, index).squeeze(2)

    def balance_groups(self, tokens: Tensor, context: Context) -> Tensor:
        return balance_by_modality(tokens, context, self.modalities)

    @property
    def declares(self) -> ScoreDeclarations:
        return ScoreDeclarations(
            cost=lambda sizes: Cost("score", kept=FLOAT * self.experts * self.modalities), order=self._order
        )

    def _order(self, tokens: Tensor, context: Context) -> Order:
        """Return logits that are affine in the token, given its modality, which is not perturbed."""
        matrices = self.weight.unflatten(0, (self.modalities, self.experts))
        block = token_modality(tokens, context, self.modalities).flatten()
        return Order(matrices.transpose(0, 1).flatten(1), block=block, values=Values())


def token_modality(tokens: Tensor, context: Context, modalities: int) -> Tensor:
    """Return (B,N) int64: the modality of each token; raise ValueError if it is missing or wrong."""
    modality = context.modality
    if modality is None:
        raise ValueError(
            "this router has scores or groups for each modality, and the context has no modality: pass "
            "Context(modality=...) (a Hugging Face model needs an image token in its config, and input_ids, not "
            "inputs_embeds)."
        )
    return context.known_numbers(modality, "modality", modalities, tokens).long()


def balance_by_modality(tokens: Tensor, context: Context, modalities: int) -> Tensor:
    """Return (B,N,modalities) bool, `Part.balance_groups` of a part that balances loads within each modality."""
    modality = token_modality(tokens, context, modalities)
    return modality.unsqueeze(-1) == torch.arange(modalities, device=modality.device)


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
