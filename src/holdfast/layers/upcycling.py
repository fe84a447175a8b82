"""The initial weights of experts and shared experts: copies of a dense network (sparse upcycling), or random numbers.

`DenseTeacher` keeps the dense network itself, for the loss distillation.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.layers.experts import Activation, Experts
from holdfast.layers.moe import FeedForward


def new_shared(experts: Experts, count: int) -> FeedForward:
    """Return `count` shared experts as one network of `count` times the width: their sum is the same."""
    activation = experts.activation_name or experts.activation
    shared = FeedForward(
        experts.dim,
        count * experts.hidden,
        out=experts.out,
        activation=activation,
        gated=experts.gated,
        bias=experts.has_bias,
    )
    return shared.to(device=experts.down_proj.device, dtype=experts.down_proj.dtype)


@torch.no_grad()
def fill_experts(experts: Experts, dense: dict[str, Tensor] | None, noise: float, std: float) -> None:
    """Set the weights of experts: copies of `dense`, the weights of one network, with noise; without it, random ones."""
    for name, parameter in experts.named_parameters():
        if dense is None:
            parameter.zero_() if name.endswith("_bias") else parameter.normal_(std=std)
            continue
        parameter.copy_(dense[name].expand_as(parameter))
        if noise and not name.endswith("_bias"):
            parameter.add_(torch.randn_like(parameter), alpha=noise * float(dense[name].float().std()))


@torch.no_grad()
def fill_shared(shared: nn.Module, dense: dict[str, Tensor] | None, std: float) -> None:
    """Set the weights of shared experts; with `dense`, the weights of one network, so that they return 0 at first.

    Their output projections are 0 then, and get gradients from the first step on. Copies of one network would get equal
    gradients forever, so only the first shared expert is a copy.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())  # whatever numbers the router has drawn
    for name, parameter in shared.named_parameters():
        is_zero = name.endswith("bias") or (dense is not None and name.startswith("down_proj"))
        parameter.zero_() if is_zero else parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    if dense is None:
        return
    fused, paths = ("gate_up_proj", ("gate_proj", "up_proj")) if "gate_up_proj" in dense else ("up_proj", ("up_proj",))
    for name, kind in ((fused, "weight"), (f"{fused}_bias", "bias")):
        if name in dense:
            for path, part in zip(paths, dense[name].chunk(len(paths)), strict=True):
                shared.get_parameter(f"{path}.{kind}")[: part.shape[0]].copy_(part)


class DenseTeacher(nn.Module):
    """The dense network that the experts of a layer are copies of, frozen: (T,d) to (T,out).

    Its weights are buffers that are not saved: no optimiser trains them, they move with the model, and they take the memory
    of one expert. A saved model has the experts that it has taught.
    """

    activation: Activation

    def __init__(self, weights: Mapping[str, Tensor], activation: Activation) -> None:
        super().__init__()
        self.gated = "gate_up_proj" in weights
        self.__dict__["activation"] = activation  # not a submodule: that of the experts
        for name, weight in weights.items():
            self.register_buffer(name, weight.clone(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self._linear(tokens.to(self.get_buffer("down_proj").dtype), "gate_up_proj" if self.gated else "up_proj")
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            return self._linear(self.activation(gate) * up, "down_proj")
        return self._linear(self.activation(hidden), "down_proj")

    def _linear(self, rows: Tensor, name: str) -> Tensor:
        return F.linear(rows, self.get_buffer(name), self._buffers.get(f"{name}_bias"))
