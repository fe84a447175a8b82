"""The modules of a layer that `sparsify` makes, experts and shared experts, and the weights that they start with."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.families import DenseFamily
from holdfast.hub.layers import LayerSpec
from holdfast.hub.replacements import SparseLayer
from holdfast.layers import Experts, FeedForward
from holdfast.layers.experts import ACTIVATIONS, Activation

OUR_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}  # by transformers' names


def new_experts(family: DenseFamily, layer: nn.Module, spec: LayerSpec) -> Experts:
    down: Any = layer.get_submodule(family.down)
    dim, inner = linear_shape(down)
    return Experts(
        dim,
        spec.hidden or inner,
        spec.experts or 0,
        activation=activation_of(layer.get_submodule(family.attention).config, family),
        gated=family.gated,
        bias=getattr(down, "bias", None) is not None,
        **device_and_dtype(down.weight),
    )


def new_shared(experts: Experts, count: int | None) -> FeedForward | None:
    """Return `count` shared experts as one network of `count` times the width: their sum is the same."""
    if not count:
        return None
    activation = experts.activation_name or experts.activation
    shared = FeedForward(
        experts.dim, count * experts.hidden, activation=activation, gated=experts.gated, bias=experts.has_bias
    )
    return shared.to(**device_and_dtype(experts.down_proj))


def activation_of(config: Any, family: DenseFamily) -> str | Activation:
    """Return the config's activation: our name for it if there is a fused kernel, else transformers' function."""
    from transformers.activations import ACT2FN

    name = getattr(config, family.activation)
    name = OUR_ACTIVATIONS.get(name, name)
    known: str | Activation = name if name in ACTIVATIONS else ACT2FN[name]
    return known


def linear_shape(linear: Any) -> tuple[int, int]:
    """Return (out, in) of a linear map; GPT-2's layers store their weight transposed."""
    from transformers.pytorch_utils import Conv1D

    out, inner = linear.weight.shape
    return (inner, out) if isinstance(linear, Conv1D) else (out, inner)


def device_and_dtype(weight: torch.Tensor, module: nn.Module | None = None) -> dict[str, Any]:
    """Return device and dtype of a weight; for one that accelerate has offloaded, the device that computes with it."""
    device = weight.device
    if device.type == "meta" and module is not None and hasattr(module, "_hf_hook"):
        device = torch.device(getattr(module._hf_hook, "execution_device", None) or "cpu")
    return {"device": device, "dtype": weight.dtype} if weight.is_floating_point() else {"device": device}


@torch.no_grad()
def dense_weights(family: DenseFamily, layer: nn.Module) -> dict[str, Tensor]:
    """Return the dense network's weights with the names and shapes of one expert."""
    from transformers.pytorch_utils import Conv1D

    up_name = "gate_up_proj" if family.gated else "up_proj"
    weights = {}
    for name, paths in ((up_name, family.up), ("down_proj", (family.down,))):
        linears: list[Any] = [layer.get_submodule(path) for path in paths]
        matrices = [linear.weight.t() if isinstance(linear, Conv1D) else linear.weight for linear in linears]
        weights[name] = torch.cat([matrix.detach() for matrix in matrices])
        biases: list[Any] = [getattr(linear, "bias", None) for linear in linears]
        if biases[0] is not None:
            weights[f"{name}_bias"] = torch.cat([bias.detach() for bias in biases])
    return weights


@torch.no_grad()
def fill_experts(sparse: SparseLayer, dense: dict[str, Tensor] | None, noise: float, std: float) -> None:
    for name, parameter in sparse.experts.named_parameters():
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


def initial_std(layer: nn.Module, family: DenseFamily) -> float:
    """Return the standard deviation of the model's initial weights."""
    return float(getattr(layer.get_submodule(family.attention).config, "initializer_range", 0.02))
