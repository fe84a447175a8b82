"""Layers in which every token uses every expert: SoftMoE and SMEAR. Neither is causal.

    SoftMoE     Y = C f(D^T X): experts run on slots, which are weighted means of a sequence's tokens
    SMEAR       Y = f_theta(X), theta = sum_e g_e theta_e: all experts are merged into one for each sequence

B sequences of N tokens, width d, E experts with p slots each
"""

from typing import final

import torch
from torch import Tensor

from holdfast.kernels.torch_internals import is_exporting
from holdfast.layers.experts import Experts
from holdfast.layers.moe import MoE, RoutedLayer
from holdfast.routing import Routing
from holdfast.routing.declarations import LayerKind


@final
class SoftMoE(RoutedLayer):
    """Y = C f(D^T X) + shared(X): each expert runs on its p slots, which are means of the tokens (Puigcerver et al. 2024).

    D and C are those of the router: `holdfast.create_router("softmoe", dim=, experts=, slots=p)`, or "softmoe+symphony",
    "softmoe+ac". The weight of a slot in C is the weight of its expert times the share of the slot. The routing has K = E:
    all experts, sorted by weight. A sequence without a real token gets 0.
    """

    kind = "soft"

    @staticmethod
    def run(
        experts: Experts,
        tokens: Tensor,
        routing: Routing,
        weights: Tensor,
        real: Tensor | None,
        most_rows: int | None = None,
    ) -> Tensor:
        assert routing.dispatch is not None and routing.shares is not None
        (sequences, length, dim), (_, count, slots) = tokens.shape, routing.shares.shape
        dispatch = routing.dispatch.flatten(1)
        if is_exporting():  # torch 2.13 cannot export views that first join and then split dimensions of unknown size
            dispatch = dispatch.clone(memory_format=torch.contiguous_format)
        dispatch = dispatch.view(sequences, length, count * slots)
        mixed = torch.bmm(dispatch.transpose(1, 2).to(tokens.dtype), tokens)
        # The rows of one expert are adjacent: (E,B,p).
        rows = mixed.reshape(sequences, count, slots, dim).transpose(0, 1).reshape(-1, dim)
        index = (torch.arange(rows.shape[0], device=rows.device) // max(sequences * slots, 1)).unsqueeze(1)
        outputs = experts(rows, index, torch.ones_like(index, dtype=torch.float32))
        outputs = outputs.reshape(count, sequences, slots, dim).transpose(0, 1).reshape(sequences, count * slots, dim)
        dense = torch.zeros_like(routing.gates).scatter(1, routing.experts, weights)
        combine = (dense.unsqueeze(-1) * routing.shares).reshape(sequences, length, count * slots)
        return torch.bmm(combine.to(outputs.dtype), outputs)


@final
class SMEAR(RoutedLayer):
    """Y = f_theta(X) + shared(X), theta = sum_e g_e theta_e: one merged expert for each sequence (Muqeeth et al. 2024).

    The router is `holdfast.create_router("smear", dim=, experts=)`. Merging takes memory for one expert for each sequence.
    """

    kind = "smear"

    @staticmethod
    def run(
        experts: Experts,
        tokens: Tensor,
        routing: Routing,
        weights: Tensor,
        real: Tensor | None,
        most_rows: int | None = None,
    ) -> Tensor:
        dense = torch.zeros_like(routing.gates).scatter(1, routing.experts, weights).unflatten(0, tokens.shape[:2])
        # All tokens of a sequence have the same gates. Padding that contains NaN has no gradient: take a real token.
        if tokens.shape[1] == 0:
            gates = dense.sum(1)
        elif real is None:
            gates = dense[:, 0]
        else:
            first = real.int().argmax(1).view(-1, 1, 1).expand(-1, 1, dense.shape[-1])
            gates = dense.gather(1, first).squeeze(1)
        return experts.run_merged(tokens, gates)


LAYERS: dict[LayerKind, type[RoutedLayer]] = {"moe": MoE, "soft": SoftMoE, "smear": SMEAR}
