"""Experts: E feed-forward networks with fused weights in the Hugging Face layout. No token is dropped.

    y_t = sum_s weight_ts FFN_{expert_ts}(x_t),   FFN(x) = down(activation(gate x) * up x)  or  down(activation(up x))

Slots are sorted by expert, each expert multiplies its rows, and the results are added in float32 (`kernels.grouped`).

Gradients of experts can be scaled by their load, so that an expert with few tokens learns as fast as one with many:

    n_e the real tokens of expert e in the batch of all ranks, c = `gradient_scaling`
    gradient of e's weights  <-  gradient * clip(mean_e n_e / max(n_e, 1), 1/c, c)

A loss that is a mean over T tokens gives an expert (n_e / T) times its mean gradient per token. Within the clip this becomes
(mean_e n_e / T) times that mean, whatever its load is (survey, section 4.3). Only weights and biases of experts are scaled:
gradients of tokens and of routers stay. With several micro-batches per step, each is scaled by its own loads.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.certificates.outputs import Networks
from holdfast.errors import require_known
from holdfast.kernels.grouped import Dispatch, dispatch, gather_mm, mm_combine
from holdfast.kernels.quantised import FLOATS, as_float
from holdfast.kernels.torch_internals import is_exporting
from holdfast.layers.expert_parallel import ExpertShards
from holdfast.layers.gelu_new import gelu_new
from holdfast.routing import Router, Routing
from holdfast.routing.declarations import NoCertificate
from holdfast.routing.state import sum_over_ranks

Activation = Callable[[Tensor], Tensor]
UNKNOWN_FORMAT = "experts cannot run with weights in this format; exclude them from quantisation"


class Experts(nn.Module):
    """y_t = sum_s weight_ts FFN_{expert_ts}(x_t), with FFN(x) = down(activation(gate x) * up x) or down(activation(up x)).

    Parameters are `gate_up_proj (E,2*hidden,dim)` (not gated: `up_proj (E,hidden,dim)`) and `down_proj (E,out,hidden)`, with
    `bias=True` also `gate_up_proj_bias`/`up_proj_bias` and `down_proj_bias`. An expert index of E marks an unused slot.

    out   the width of outputs; None: `dim`
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter
    shards: ExpertShards | None = None  # set by `shard_experts`

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        out: int | None = None,
        activation: str | Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out = dim if out is None else out
        for what, value in (("dim", dim), ("hidden", hidden), ("experts", experts), ("out", out)):
            if value < 1:
                raise ValueError(f"{what} is {value}; Experts needs at least 1.")
        self.dim, self.hidden, self.experts, self.out, self.gated = dim, hidden, experts, out, gated
        self._given_name, self.activation = resolve_activation(activation)
        self._up_name = "gate_up_proj" if gated else "up_proj"
        inner = 2 * hidden if gated else hidden
        shapes: dict[str, tuple[int, ...]] = {self._up_name: (experts, inner, dim), "down_proj": (experts, out, hidden)}
        if bias:
            shapes |= {f"{self._up_name}_bias": (experts, inner), "down_proj_bias": (experts, out)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.has_bias = bias
        self.reset_parameters()

    @property
    def activation_name(self) -> str | None:
        """The name of the activation; None if it is a function without a name, or if another one was assigned since."""
        name = self._given_name
        return name if name is not None and ACTIVATIONS[name] is self.activation else None

    def reset_parameters(self) -> None:
        """Initialise each expert as an `nn.Linear` of its size."""
        for name, parameter in self.named_parameters():
            bound = 1 / math.sqrt(self.hidden if name.startswith("down") else self.dim)
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        tokens: Tensor,
        experts: Tensor,
        weights: Tensor,
        most_rows: int | None = None,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Return (T,out) for `tokens (T,d)`, `experts (T,K)` and `weights (T,K)`; the sum over slots is taken in float32.

        most_rows   at most this many slots have an expert; on a GPU, memory is allocated for them only. None: all slots
        factors     (E,), by which the gradients of experts are multiplied; None: by 1
        """
        self._check(tokens, experts, weights)
        up_bias, down_bias = (getattr(self, f"{self._up_name}_bias"), self.down_proj_bias) if self.has_bias else (None, None)
        glu = self.activation_name if self.gated else None
        up, down = self._weight(self._up_name), self._weight("down_proj")
        network = Network(up, down, up_bias, down_bias, self._activate, glu)
        return run_experts(tokens, experts, weights, network, self.shards, most_rows, factors)

    def networks(self, activation: Activation | None = None) -> Networks:
        """Return the experts as certificates read them; raise NoCertificate if how far they move has no known bound.

        activation   the activation in evaluation; None: `self.activation`
        """
        activation = self.activation if activation is None else activation
        up, down = (as_float(self, name, UNKNOWN_FORMAT) for name in (self._up_name, "down_proj"))
        up_bias, down_bias = (getattr(self, f"{self._up_name}_bias"), self.down_proj_bias) if self.has_bias else (None, None)
        if self.shards is not None:
            raise NoCertificate("no bound of the output is known on one rank: these experts are sharded over ranks")
        return Networks(up, down, activation, slope_of(activation), self.gated, up_bias, down_bias)

    def _weight(self, name: str) -> Tensor:
        """Return a weight as floating-point numbers; raise ValueError if that is not possible."""
        weight = self._parameters.get(name)
        # In a class of one's own, and for other tensors, a quantiser may have put something else in the place of the weight.
        if type(self) is Experts and type(weight) is nn.Parameter and weight.dtype in FLOATS:
            return weight
        return as_float(self, name, UNKNOWN_FORMAT)

    def run_merged(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """Return (B,N,out) for `tokens (B,N,d)`: one expert for each sequence, the sum of all weighted by `gates (B,E)`.

        Merging is linear in the weights and biases of experts. All experts must be on this rank.
        """
        if self.shards is not None:
            raise ValueError("these experts are sharded over ranks, and merging needs all of them; do not shard them.")
        dtype = _compute_dtype(tokens, as_float(self, self._up_name, UNKNOWN_FORMAT))

        def merged(parameter: Tensor) -> Tensor:
            return (gates.to(dtype) @ parameter.to(dtype).flatten(1)).view(gates.shape[0], *parameter.shape[1:])

        def linear(rows: Tensor, name: str) -> Tensor:
            out = rows @ merged(as_float(self, name, UNKNOWN_FORMAT)).transpose(1, 2)
            return out + merged(getattr(self, f"{name}_bias")).unsqueeze(1) if self.has_bias else out

        hidden = linear(tokens.to(dtype), self._up_name)
        out = linear(self._gate(hidden) if self.gated else self.activation(hidden), "down_proj")
        return out if torch.is_autocast_enabled(tokens.device.type) else out.to(tokens.dtype)

    def _activate(self, hidden: Tensor, plan: Dispatch) -> Tensor:
        activation = self._gate if self.gated else self.activation
        return activate_used_rows(hidden, plan, activation) if self.activation_name is None else activation(hidden)

    def _gate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _check(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> None:
        if tokens.dim() != 2 or tokens.shape[1] != self.dim:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; these experts take (T, {self.dim}).")
        if experts.dim() != 2 or experts.shape != weights.shape or experts.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"experts {tuple(experts.shape)} and weights {tuple(weights.shape)} are not (T, K), T = {len(tokens)}."
            )
        if experts.device.type == "cpu" and not torch.compiler.is_compiling() and experts.numel() > 0:
            low, high = (int(bound) for bound in experts.aminmax())
            if low < 0 or high > self.experts:
                raise ValueError(f"experts are {low} to {high}, not 0 to {self.experts - 1}, or {self.experts} if unused.")

    def extra_repr(self) -> str:
        kind = "gated" if self.gated else "plain"
        name = self.activation_name or getattr(self.activation, "__name__", repr(self.activation))
        out = "" if self.out == self.dim else f"out={self.out}, "
        return f"dim={self.dim}, hidden={self.hidden}, {out}experts={self.experts}, {kind}, {name}, bias={self.has_bias}"


class Network(NamedTuple):
    """The weights of all experts, which are DTensors if experts are sharded, and their activation."""

    up: Tensor  # (E,inner,d)
    down: Tensor  # (E,out,hidden)
    up_bias: Tensor | None  # (E,inner)
    down_bias: Tensor | None  # (E,out)
    activate: Callable[[Tensor, Dispatch], Tensor]  # on rows in the order of a `Dispatch`
    glu: str | None  # the name of the activation if it is gated, because there may be a kernel for it


def run_experts(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    network: Network,
    shards: ExpertShards | None,
    most_rows: int | None,
    factors: Tensor | None = None,
) -> Tensor:
    """Run `tokens (T,d)` through the experts of their slots; index E marks an unused slot.

    shards      with sharded experts: tokens are sent to the ranks of their experts
    most_rows   at most this many slots have an expert. Sharded experts count their slots exactly and ignore it
    factors     (E,), by which the gradients of experts are multiplied; None: by 1
    """
    dtype = _compute_dtype(tokens, network.up)
    if shards is None:
        out = _run_local(_scaled(network, factors), tokens.to(dtype), experts, weights.float(), most_rows)
    elif is_exporting():
        raise ValueError("these experts are sharded over ranks: export the model on one rank, without shard_experts.")
    else:
        parts = (None if weight is None else shards.local_part(weight) for weight in network[:4])
        local = Network._make((*parts, *network[4:]))
        local = _scaled(local, None if factors is None else factors[shards.own])
        out = shards.run(partial(_run_local, local), tokens.to(dtype), experts, weights.float())
    return out if torch.is_autocast_enabled(tokens.device.type) else out.to(tokens.dtype)


def _scaled(network: Network, factors: Tensor | None) -> Network:
    """Return the same network, with gradients of each expert's weights that are multiplied by its factor."""
    if factors is None:
        return network
    return Network._make(
        (*(None if weight is None else with_scaled_gradient(weight, factors) for weight in network[:4]), *network[4:])
    )


def _run_local(network: Network, tokens: Tensor, experts: Tensor, weights: Tensor, most_rows: int | None) -> Tensor:
    """Run experts that are all on this rank, on tokens in the dtype of the products, with float32 weights."""
    if is_exporting():
        return _run_all_experts(network, tokens, experts, weights)
    up, down, up_bias, down_bias, activate, glu = network
    plan = dispatch(experts, up.shape[0], most_rows)
    hidden = gather_mm(tokens, up.to(tokens.dtype), plan, up_bias)
    return mm_combine(hidden, down.to(tokens.dtype), weights, plan, activate=activate, glu=glu, bias=down_bias)


def _run_all_experts(network: Network, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Run every expert on every token and add the results of the selected ones, for exported programs.

    Shapes do not depend on the routing, and all operators are torch's. It takes E / K times as many products.
    """
    up, down, up_bias, down_bias, activate, _ = network
    up, down = up.to(tokens.dtype), down.to(tokens.dtype)
    count = up.shape[0]
    tokens = tokens.where((experts < count).any(1, keepdim=True), 0.0)  # a token without an expert may contain NaN
    hidden = torch.matmul(tokens.unsqueeze(0), up.transpose(1, 2))  # (E,T,inner)
    hidden = hidden if up_bias is None else hidden + up_bias.to(hidden.dtype).unsqueeze(1)
    rows = hidden.flatten(0, 1)
    all_used = Dispatch(experts, experts, torch.full((1,), rows.shape[0], device=rows.device))
    outputs = torch.bmm(activate(rows, all_used).view(count, tokens.shape[0], -1), down.transpose(1, 2)).float()
    outputs = outputs if down_bias is None else outputs + down_bias.float().unsqueeze(1)
    dense = weights.new_zeros(tokens.shape[0], count + 1).scatter_add(1, experts, weights)[:, :count]
    chosen = (experts.unsqueeze(-1) == torch.arange(count, device=experts.device)).any(1)  # (T,E)
    # A weight of 0 is not enough: an expert that was not selected may overflow, and 0 times infinity is NaN.
    return (outputs.where(chosen.t().unsqueeze(-1), 0.0) * dense.t().unsqueeze(-1)).sum(0).to(tokens.dtype)


def activate_used_rows(hidden: Tensor, plan: Dispatch, activation: Activation) -> Tensor:
    """Apply an activation without a known name, which may have parameters, with 0 in unused rows.

    Parameters must not get gradients from unused rows: on a GPU these are uninitialised memory. On a CPU there are none.
    """
    if hidden.device.type == "cpu":
        return activation(hidden)
    in_use = (torch.arange(hidden.shape[0], device=hidden.device) < plan.used).unsqueeze(1)
    return activation(hidden.where(in_use, 0.0)).where(in_use, 0.0)


def _compute_dtype(tokens: Tensor, weight: Tensor) -> torch.dtype:
    device = tokens.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def resolve_activation(activation: str | Activation) -> tuple[str | None, Activation]:
    """Return the name, or None for a callable, and the function of an activation."""
    if callable(activation):
        return None, activation
    require_known("activation", activation, ACTIVATIONS)
    return activation, ACTIVATIONS[activation]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")  # a function, not a `partial`: a copied module has the same one


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_new": gelu_new,
    "relu": F.relu,
    "relu2": _relu_squared,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
}
# The largest |act'(z)|, rounded up. That of relu2 has no bound.
SLOPES = {
    "silu": 1.09984,
    "gelu": 1.12891,
    "gelu_tanh": 1.129,
    "gelu_new": 1.129,
    "relu": 1.0,
    "tanh": 1.0,
    "sigmoid": 0.25,
}
# Classes of torch and transformers that compute these functions.
MODULES = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_new",
    "FastGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
}


def slope_of(activation: Activation) -> float:
    """Return the steepest slope of an activation; raise NoCertificate if it has none, or is not known."""
    kind = type(activation)
    name = next((name for name, function in ACTIVATIONS.items() if function is activation), None)
    if name is None and kind.__module__.split(".")[0] in ("torch", "transformers"):
        name = MODULES.get(kind.__name__)
    if name not in SLOPES:
        called = name or getattr(activation, "__name__", kind.__name__)
        reason = f"no steepest slope is known for their activation, {called}; known are {', '.join(SLOPES)}"
        raise NoCertificate(f"no bound of the output is known for these experts: {reason}")
    return SLOPES[name]


def gradient_factors(router: Router, routing: Routing, token_mask: Tensor | None) -> Tensor | None:
    """Return (E,): the factor of each expert's gradients in this forward; None if they stay. Every rank must call it."""
    largest = router.gradient_scaling
    assert largest is not None
    if not (router.training and torch.is_grad_enabled()):
        return None
    with torch.no_grad():
        used = routing.chosen if token_mask is None else routing.chosen & token_mask.reshape(-1, 1)
        loads = sum_over_ranks(used.sum(0).float())
        return (loads.mean() / loads.clamp_min(1)).clamp(1 / largest, largest)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (factors,) = ctx.saved_tensors
        return grad * factors.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)), None


def with_scaled_gradient(weight: Tensor, factors: Tensor) -> Tensor:
    """Return `weight (E,...)`; in its gradient each expert is multiplied by its entry of `factors (E,)`."""
    scaled: Tensor = _ScaledGradient.apply(weight, factors)
    return scaled
