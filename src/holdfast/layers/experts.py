"""Activations by name, so that configurations can hold them; any callable on tensors works too.

The experts: E feed-forward networks with fused weights in the Hugging Face layout, run without dropping a token.
"""

import functools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.errors import unknown
from holdfast.kernels.dispatch import Dispatch, dispatch
from holdfast.kernels.grouped import gather_mm, mm_combine
from holdfast.kernels.quantised import as_float
from holdfast.layers.expert_parallel import Owners

Activation = Callable[[Tensor], Tensor]


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu_squared,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
}


def resolve(activation: str | Activation) -> tuple[str | None, Activation]:
    """The name, if it has one, and the function."""
    if callable(activation):
        return None, activation
    if activation not in ACTIVATIONS:
        raise ValueError(unknown("activation", activation, ACTIVATIONS))
    return activation, ACTIVATIONS[activation]


UNKNOWN_FORMAT = "experts cannot be run from this format; leave them out when quantising"


class Experts(nn.Module):
    """y_t = sum_s weight_ts FFN_{expert_ts}(x_t), with FFN(x) = down(activation(gate x) * up x) or down(activation(up x)).

    Parameters are `gate_up_proj (E,2*hidden,dim)` (plain: `up_proj (E,hidden,dim)`) and `down_proj (E,dim,hidden)`, with
    `bias=True` also `gate_up_proj_bias`/`up_proj_bias` and `down_proj_bias`. An index of E is a slot that is not used.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter
    owners: Owners | None = None  # where experts are spread over processes (`shard_experts`)

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        activation: str | Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for what, value in (("dim", dim), ("hidden", hidden), ("experts", experts)):
            if value < 1:
                raise ValueError(f"{what} is {value}; Experts needs at least 1.")
        self.dim, self.hidden, self.experts, self.gated = dim, hidden, experts, gated
        self.activation_name, self.activation = resolve(activation)
        self._up_name = "gate_up_proj" if gated else "up_proj"
        inner = 2 * hidden if gated else hidden
        shapes: dict[str, tuple[int, ...]] = {self._up_name: (experts, inner, dim), "down_proj": (experts, dim, hidden)}
        if bias:
            shapes |= {f"{self._up_name}_bias": (experts, inner), "down_proj_bias": (experts, dim)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.has_bias = bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert starts as an `nn.Linear` of its size would."""
        for name, parameter in self.named_parameters():
            bound = 1 / math.sqrt(self.hidden if name.startswith("down") else self.dim)
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """`tokens (T,d)`, `experts (T,K)`, `weights (T,K)` to `(T,d)`; the sum over slots is taken in float32."""
        self._check(tokens, experts, weights)
        up_bias = self.get_parameter(f"{self._up_name}_bias") if self.has_bias else None
        down_bias = self.down_proj_bias if self.has_bias else None
        return run_experts(
            tokens,
            experts,
            weights,
            as_float(self, self._up_name, UNKNOWN_FORMAT),
            as_float(self, "down_proj", UNKNOWN_FORMAT),
            up_bias,
            down_bias,
            activate=self._activate,
            glu=self.activation_name if self.gated else None,
            owners=self.owners,
        )

    def _activate(self, hidden: Tensor, plan: Dispatch) -> Tensor:
        activation = self._gate if self.gated else self.activation
        return activate_used(hidden, plan, activation) if self.activation_name is None else activation(hidden)

    def _gate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _check(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> None:
        if tokens.dim() != 2 or tokens.shape[1] != self.dim:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; these experts take (T, {self.dim}).")
        if experts.dim() != 2 or experts.shape != weights.shape or experts.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"experts {tuple(experts.shape)} and weights {tuple(weights.shape)} must both be (T, K) "
                f"with T = {tokens.shape[0]}, the number of tokens."
            )
        if experts.device.type == "cpu" and not torch.compiler.is_compiling() and experts.numel() > 0:
            low, high = (int(bound) for bound in experts.aminmax())
            if low < 0 or high > self.experts:
                raise ValueError(
                    f"expert indices run from {low} to {high}; expected 0 to {self.experts - 1}, "
                    f"or {self.experts} for an unused slot."
                )

    def extra_repr(self) -> str:
        kind = "gated" if self.gated else "plain"
        name = self.activation_name or getattr(self.activation, "__name__", repr(self.activation))
        return f"dim={self.dim}, hidden={self.hidden}, experts={self.experts}, {kind}, {name}, bias={self.has_bias}"


def run_experts(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activate: Callable[[Tensor, Dispatch], Tensor],
    glu: str | None = None,
    owners: Owners | None = None,
) -> Tensor:
    """`tokens (T,d)` through their experts, `up (E,inner,d)` and `down (E,d,hidden)`; an index of E is an unused slot.

    `glu` names the activation if `activate` is gated and it has a name: there may be a kernel for it. With `owners` the
    weights are this process's part of them, and tokens travel.
    """
    dtype = _compute_dtype(tokens, up)
    if owners is None:
        out = _run(tokens.to(dtype), experts, weights.float(), up, down, up_bias, down_bias, activate, glu)
    elif torch.compiler.is_exporting():
        raise ValueError(
            "these experts are spread over processes, which an exported program cannot reach; export on one process."
        )
    else:
        up, down = owners.own(up), owners.own(down)
        up_bias, down_bias = (None if bias is None else owners.own(bias) for bias in (up_bias, down_bias))
        run = partial(_run, up=up, down=down, up_bias=up_bias, down_bias=down_bias, activate=activate, glu=glu)
        out = owners.run(run, tokens.to(dtype), experts, weights.float())
    return out if torch.is_autocast_enabled(tokens.device.type) else out.to(tokens.dtype)


def _run(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activate: Callable[[Tensor, Dispatch], Tensor],
    glu: str | None,
) -> Tensor:
    """Experts that are all at hand, on tokens in the dtype of the products and float32 weights."""
    dtype = tokens.dtype
    if torch.compiler.is_exporting():
        out = _every_expert(tokens, experts, weights, up.to(dtype), down.to(dtype), up_bias, activate)
        return out if down_bias is None else out + _mixed_bias(experts, weights, down_bias).to(dtype)
    plan = dispatch(experts, up.shape[0])
    hidden = gather_mm(tokens, up.to(dtype), plan)
    if up_bias is not None:
        hidden = _add_bias(hidden, up_bias.to(dtype), plan)
    out = mm_combine(hidden, down.to(dtype), weights, plan, activate=activate, glu=glu)
    return out if down_bias is None else out + _mixed_bias(experts, weights, down_bias).to(dtype)


def _every_expert(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    activate: Callable[[Tensor, Dispatch], Tensor],
) -> Tensor:
    """Run every expert on every token and keep what was chosen.

    For exported programs: shapes do not depend on the routes, and no operator is ours. It costs E / K times the products.
    """
    count = up.shape[0]
    tokens = tokens.where((experts < count).any(1, keepdim=True), 0.0)  # one that takes no expert may hold NaN
    hidden = torch.matmul(tokens.unsqueeze(0), up.transpose(1, 2))  # (E,T,inner)
    hidden = hidden if up_bias is None else hidden + up_bias.to(hidden.dtype).unsqueeze(1)
    rows = hidden.flatten(0, 1)
    all_used = Dispatch(experts, experts, torch.full((1,), rows.shape[0], device=rows.device))
    outputs = torch.bmm(activate(rows, all_used).view(count, tokens.shape[0], -1), down.transpose(1, 2)).float()
    dense = weights.new_zeros(tokens.shape[0], count + 1).scatter_add(1, experts, weights)[:, :count]
    chosen = (experts.unsqueeze(-1) == torch.arange(count, device=experts.device)).any(1)  # (T,E)
    # Not a product with a weight of 0 alone: an expert that was not chosen may overflow, and 0 times infinity is NaN.
    return (outputs.where(chosen.t().unsqueeze(-1), 0.0) * dense.t().unsqueeze(-1)).sum(0).to(tokens.dtype)


def activate_used(hidden: Tensor, plan: Dispatch, activation: Activation) -> Tensor:
    """An activation we do not know: it may have parameters, which must not learn from rows of nobody.

    On a GPU those are uninitialised memory; on a CPU there are none.
    """
    if hidden.device.type == "cpu":
        return activation(hidden)
    in_use = (torch.arange(hidden.shape[0], device=hidden.device) < plan.used).unsqueeze(1)
    return activation(hidden.where(in_use, 0.0)).where(in_use, 0.0)


def _compute_dtype(tokens: Tensor, weight: Tensor) -> torch.dtype:
    device = tokens.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _add_bias(hidden: Tensor, bias: Tensor, plan: Dispatch) -> Tensor:
    """Each row plus its expert's bias, as a product with a 0/1 matrix: then the backward is one too, and repeats exactly."""
    row = torch.arange(hidden.shape[0], device=hidden.device)
    expert = torch.searchsorted(plan.offsets, row.to(plan.offsets.dtype), right=True)
    member = expert.unsqueeze(1) == torch.arange(bias.shape[0], device=hidden.device)
    in_use = (row < plan.used).unsqueeze(1)
    return torch.where(in_use, hidden + member.to(bias.dtype) @ bias, 0.0)


def _mixed_bias(experts: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """sum_s weight_ts bias_{expert_ts}, through the dense (T,E) weights."""
    dense = weights.new_zeros(weights.shape[0], bias.shape[0] + 1).scatter_add(1, experts, weights)
    with torch.autocast(weights.device.type, enabled=False):
        return dense[:, :-1] @ bias.float()
