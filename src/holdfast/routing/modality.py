"""A score for each modality over a shared pool of experts (survey 3.5): text and image tokens are scored by other weights.

    logits = x W_m^T,   m = Context.modality of the token

The load is balanced within each modality: the balance loss is the mean over the modalities that are present
(`Routing.balance_groups`). Otherwise a batch with few image tokens could send all of them to one expert.
"""

import math

import torch
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.routing.declarations import FLOAT, Cost, LayerSizes, Order, Values, projection_flops
from holdfast.routing.parts import Score
from holdfast.routing.records import Context


class ModalityLinear(Score):
    """logits = x W_m^T with one matrix for each modality m, from 0 on, in `Context.modality (B,N)`.

    modalities  how many there are
    """

    reads = ("modality",)

    def __init__(self, dim: int, experts: int, *, modalities: int = 2) -> None:
        super().__init__()
        if modalities < 1:
            raise ValueError(f"modalities is {modalities}; a score needs at least 1.")
        self.dim, self.experts, self.modalities = dim, experts, modalities
        self.weight = nn.Parameter(torch.empty(modalities * experts, dim))  # the experts of modality 0 first
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        modality = self._modality(tokens, context)
        # One product for all modalities, as there are few: tokens need not be sorted, and shapes stay static.
        logits = linear_float32(tokens, self.weight).unflatten(-1, (self.modalities, self.experts))
        index = modality[..., None, None].expand(*modality.shape, 1, self.experts)
        return logits.gather(2, index).squeeze(2)

    def balance_groups(self, tokens: Tensor, context: Context) -> Tensor:
        modality = self._modality(tokens, context)
        return modality.unsqueeze(-1) == torch.arange(self.modalities, device=modality.device)

    def cost(self, sizes: LayerSizes) -> Cost:
        forward = projection_flops(self.weight)
        return Cost("score", forward, 2 * forward, kept=FLOAT * sizes.experts * self.modalities)

    def order(self, tokens: Tensor, context: Context) -> Order:
        """Declare logits that are affine in the token, given its modality, which is not perturbed."""
        matrices = self.weight.unflatten(0, (self.modalities, self.experts))
        return Order(matrices.transpose(0, 1).flatten(1), block=self._modality(tokens, context).flatten())

    def values(self, tokens: Tensor, context: Context) -> Values:
        return Values()

    def _modality(self, tokens: Tensor, context: Context) -> Tensor:
        """Return (B,N) int64: the modality of each token; raise ValueError if it is missing or wrong."""
        modality = context.modality
        if modality is None:
            raise ValueError(
                "this router has a score for each modality, and the context has no modality: pass Context(modality=...) (a "
                "Hugging Face model needs an image token in its config, and input_ids, not inputs_embeds)."
            )
        if modality.shape != tokens.shape[:2] or modality.is_floating_point():
            raise ValueError(
                f"modality is {modality.dtype} of shape {tuple(modality.shape)}; expected whole numbers of shape "
                f"{tuple(tokens.shape[:2])}."
            )
        modality = modality.long().to(tokens.device)  # a model on several devices has its ids on the first
        if context.token_mask is not None:
            known = (modality >= 0) & (modality < self.modalities)
            modality = modality.where(context.token_mask | known, 0)
        if modality.device.type == "cpu" and not torch.compiler.is_compiling() and modality.numel():
            low, high = int(modality.min()), int(modality.max())
            if low < 0 or high >= self.modalities:
                raise ValueError(f"modality has values from {low} to {high}; expected 0 to {self.modalities - 1}.")
        return modality
