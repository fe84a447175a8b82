"""Layers with a router and experts.

    MoE         y = experts(x, routing) + shared(x)
    SoftMoE     Y = C f(D^T X): experts run on slots, which are weighted means of a sequence's tokens
    SMEAR       Y = f_theta(X), theta = sum_e g_e theta_e: all experts are merged into one for each sequence

In the last two every token uses every expert, and neither is causal.

B sequences of N tokens, width d, E experts with p slots each
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from holdfast.certificates import LayerParts, Networks, NoCertificate
from holdfast.kernels.torch_internals import is_exporting
from holdfast.layers.expert_losses import Teacher, of_experts
from holdfast.layers.experts import Activation, Experts, gradient_factors, resolve_activation, slope_of
from holdfast.layers.losses import Losses
from holdfast.routing import Context, Router, Routing
from holdfast.routing.declarations import LayerKind


class RoutedLayer(nn.Module, ABC):
    """y = experts(x, routing) + shared(x), where `shared` runs on every token (abstract).

    `forward` returns the output and the `Routing`, whose losses the caller adds to the training loss. Padding that contains
    NaN or huge numbers is replaced by 0.

    teacher   what the loss distillation compares experts with: a function from tokens (T,d) to (T,out), without gradients
    """

    kind: ClassVar[LayerKind]
    teacher: Teacher | None

    def __init__(
        self, router: Router, experts: Experts, shared: nn.Module | None = None, *, teacher: Teacher | None = None
    ) -> None:
        super().__init__()
        if router.experts != experts.experts:
            raise ValueError(f"the router has {router.experts} experts, but there are {experts.experts}; use equal numbers.")
        if router.dim != experts.dim:
            raise ValueError(f"the router has width {router.dim} and the experts {experts.dim}; use the same width.")
        if router.select.layer_kind != self.kind:
            raise ValueError(
                f"{type(router.select).__name__} selects for a layer of its own; use holdfast."
                f"{LAYERS[router.select.layer_kind].__name__} instead of {type(self).__name__}."
            )
        if isinstance(router.losses, Losses) and router.losses.consistency:
            raise ValueError(
                "the loss consistency compares two forwards of a model, and a layer runs one; call "
                "holdfast.layers.losses.consistency with the routings of both."
            )
        self.router, self.experts, self.shared = router, experts, shared
        self.__dict__["teacher"] = teacher  # not a submodule: it is neither trained nor saved
        # Read once: torch.compile of torch 2.11 cannot trace the declarations.
        self._refuses_causal = router.select.declares.refuses_causal

    def forward(self, tokens: Tensor, context: Context | None = None) -> tuple[Tensor, Routing]:
        context = context or Context()
        if context.causal and self._refuses_causal:
            raise ValueError(not_causal(type(self).__name__))
        if context.token_mask is not None:
            tokens = context.zero_unusable(tokens.view(*context.token_mask.shape, -1)).view(tokens.shape)
        routing: Routing = self.router(tokens, context)
        routing = with_expert_losses(routing, self.router, self.experts, tokens, context.token_mask, self.teacher)
        return run_layer(self.router, self.experts, self.shared, tokens, routing, routing.weights, context), routing

    @staticmethod
    @abstractmethod
    def run(experts: Experts, tokens: Tensor, routing: Routing, weights: Tensor, real: Tensor | None, **how: Any) -> Tensor:
        """Return the outputs (B,N,out) of `experts` for `tokens (B,N,d)`, with `weights (T,K)` for those of the routing.

        how     what `run_layer` knows more, for experts that are called with the tokens themselves
        """


def run_layer(
    router: Router,
    experts: Any,
    shared: nn.Module | None,
    tokens: Tensor,
    routing: Routing,
    weights: Tensor,
    context: Context,
) -> Tensor:
    """Return the output (B,N,out) of a layer for `tokens (B,N,d)`, with `weights (T,K)` for those of the routing."""
    how: dict[str, Any] = {}  # only what is known: experts of one's own need not have these arguments
    if context.replayed is None and (most_rows := router.select.most_rows(routing.experts.shape[0])) is not None:
        how["most_rows"] = most_rows
    if router.gradient_scaling is not None:  # (E,), by which the gradients of experts are multiplied; None: by 1
        how["factors"] = gradient_factors(router, routing, context.token_mask)
    out = LAYERS[router.select.layer_kind].run(experts, tokens, routing, weights, context.token_mask, **how)
    return out if shared is None else out + shared(tokens)


def with_expert_losses(
    routing: Routing, router: Router, experts: nn.Module, tokens: Tensor, real: Tensor | None, teacher: Teacher | None
) -> Routing:
    """Return the routing with the losses of the experts' outputs for `tokens (B,N,d)`, if the router's losses have some."""
    losses = router.losses
    if not (router.training and router.learning and isinstance(losses, Losses) and losses.reads_experts):
        return routing
    if losses.distillation and router.select.layer_kind != "moe":
        raise ValueError(
            f"{router.layer}: the loss distillation compares an expert's output for a token with a teacher's, and the "
            "experts of SoftMoE and SMEAR layers run on means of tokens or are merged; set distillation to 0."
        )
    count, rows = routing.gates.shape[-1], tokens.reshape(-1, tokens.shape[-1])
    terms = of_experts(losses, experts, count, rows, routing.experts, routing.weights, real, teacher, router.layer)
    return replace(routing, losses={**routing.losses, **terms})


def not_causal(layer: str) -> str:
    """Return the error for a layer that a causal model may not use."""
    return (
        f"{layer} computes a token from the whole sequence, so in this causal model a token would read later ones; choose "
        "another router, or give the option causal=False to accept that the model cannot generate."
    )


@final
class MoE(RoutedLayer):
    """y = experts(x, routing) + shared(x), where `shared` runs on every token (DeepSeek's shared experts).

    `forward` returns the output and the `Routing`, whose losses the caller adds to the training loss. Padding that contains
    NaN or huge numbers is replaced by 0.
    """

    kind = "moe"

    def output_parts(self) -> LayerParts:
        """Return what `holdfast.certificates.certify_output` reads; raise NoCertificate if a part has no known bound."""
        if not isinstance(self.experts, Experts):
            raise NoCertificate(f"no bound of the output is known for experts that are a {type(self.experts).__name__}")
        shared = None if self.shared is None else network_of(self.shared)
        return LayerParts(self.router, self.experts.networks(), shared, self.router.scale)

    @staticmethod
    def run(experts: Experts, tokens: Tensor, routing: Routing, weights: Tensor, real: Tensor | None, **how: Any) -> Tensor:
        out: Tensor = experts(tokens.reshape(-1, tokens.shape[-1]), routing.experts, weights, **how)
        return out.view(*tokens.shape[:-1], out.shape[-1])


@final
class SoftMoE(RoutedLayer):
    """Y = C f(D^T X) + shared(X): each expert runs on its p slots, which are means of the tokens (Puigcerver et al. 2024).

    D and C are those of the router: `holdfast.create_router("softmoe", dim=, experts=, slots=p)`, or "softmoe+symphony",
    "softmoe+ac". The weight of a slot in C is the weight of its expert times the share of the slot. The routing has K = E:
    all experts, sorted by weight. A sequence without a real token gets 0.
    """

    kind = "soft"

    @staticmethod
    def run(experts: Experts, tokens: Tensor, routing: Routing, weights: Tensor, real: Tensor | None, **how: Any) -> Tensor:
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
        out = outputs.shape[-1]
        outputs = outputs.reshape(count, sequences, slots, out).transpose(0, 1).reshape(sequences, count * slots, out)
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
    def run(experts: Experts, tokens: Tensor, routing: Routing, weights: Tensor, real: Tensor | None, **how: Any) -> Tensor:
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


def name_layers(model: nn.Module) -> nn.Module:
    """Set `Router.layer` of every router in `model` to its module path, for error messages; return the model."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.layer = name or module.layer
    return model


def network_of(module: nn.Module, switch: Tensor | None = None) -> Networks:
    """Return a dense feed-forward network with the submodules of `FeedForward`, as certificates read it.

    It may be another library's, with its activation as `act_fn`. `switch (d,)` as in `Networks`. Raise NoCertificate for
    others.
    """
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    activation: Any = getattr(module, "activation", getattr(module, "act_fn", None))
    ups: list[Any] = [up] if gate is None else [gate, up]
    if activation is None or not all(type(part) is nn.Linear for part in (*ups, down)):
        raise NoCertificate(f"no bound of the output is known for a shared expert that is a {type(module).__name__}")
    layers: list[Any] = [*ups, down]
    biases = [torch.zeros_like(part.weight[:, 0]) if part.bias is None else part.bias for part in layers]
    return Networks(
        torch.cat([part.weight for part in ups]).unsqueeze(0),
        layers[-1].weight.unsqueeze(0),
        activation,
        slope_of(activation),
        gate is not None,
        torch.cat(biases[:-1]).unsqueeze(0),
        biases[-1].unsqueeze(0),
        switch,
    )


class FeedForward(nn.Module):
    """A dense feed-forward network: down(activation(gate x) * up x), or down(activation(up x)) if not `gated`.

    out   the width of outputs; None: `dim`
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        out: int | None = None,
        activation: str | Activation = "silu",
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        _, self.activation = resolve_activation(activation)
        self.gate_proj = nn.Linear(dim, hidden, bias=bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim if out is None else out, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        up = self.up_proj(tokens)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(tokens)) * up
        return self.down_proj(hidden)
