"""The pipeline: tokens -> scores -> distribution -> selection, and the `Routing` that says what happened."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from holdfast.kernels.finite import encode_name, require_finite
from holdfast.kernels.launching import wait_for_side_stream
from holdfast.routing.parts import Informer, Part, Score, Scores, Selection, Selector, Traits
from holdfast.routing.records import Context, Routing
from holdfast.routing.state import StatefulPart

LossTerms = Callable[[Routing, Tensor | None], Mapping[str, Tensor]]  # (routing, padding) -> weighted terms by name


def _becomes_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# `torch.onnx.export` tries again with Dynamo, which takes `is_in_onnx_export` for False. This has it call the function. The
# decorator `torch.compiler.assume_constant_result` does the same, but loads all of Dynamo when this module is imported.
_becomes_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _detach_unless(usable: Tensor | None, values: Tensor) -> Tensor:
    """Return `values (B,N,n)`, detached where not usable: native experts send NaN back from padding that holds NaN."""
    return values if usable is None else torch.where(usable.unsqueeze(-1), values, values.detach())


class Router(nn.Module):
    """score, then up to one informer a side, then select; in float32 whatever the model's dtype.

    losses          what to add to `Routing.losses` in training, for example `holdfast.Losses(balance=0.01)`
    layer           its place in the model, for error messages
    check_finite    in training, NaN or infinite scores are an error; False lets them through
    scale           what weights are multiplied with, where experts were trained so
    """

    def __init__(
        self,
        score: Score,
        select: Selector,
        inform: Sequence[Informer] = (),
        *,
        losses: LossTerms | None = None,
        layer: str = "router",
        check_finite: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        for part, kind in ((score, Score), (select, Selector), *((informer, Informer) for informer in inform)):
            if not isinstance(part, kind):
                raise ValueError(f"Router(score, select, inform): a {type(part).__name__} where a {kind.__name__} belongs.")
        for side in ("expert", "token"):
            count = sum(informer.side == side for informer in inform)
            if count > 1:
                raise ValueError(f"{count} informers on the {side} side; a Router takes at most one a side.")
        self.score, self.inform, self.select = score, nn.ModuleList(inform), select
        self.losses, self.check_finite, self.scale = losses, check_finite, scale
        self._layer, self._learning = layer, True
        self.register_buffer("_name", encode_name(layer), persistent=False)

    @property
    def layer(self) -> str:
        """Its place in the model, for error messages."""
        return self._layer

    @layer.setter
    def layer(self, name: str) -> None:
        self._layer = name
        self._name = encode_name(name).to(self.get_buffer("_name").device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As any module; the name is written anew, since a buffer that is not saved comes back from `meta` as garbage."""
        super()._apply(fn, recurse)
        if not self.get_buffer("_name").is_meta:
            self.layer = self._layer
        return self

    @property
    def learning(self) -> bool:
        """Does a training forward teach it, and make losses? Not while a model in training mode generates."""
        return self._learning

    @learning.setter
    def learning(self, learning: bool) -> None:
        self._learning = learning
        for part in self.parts:
            if isinstance(part, StatefulPart):
                part.learning = learning

    @property
    def dim(self) -> int:
        return self.score.dim

    @property
    def experts(self) -> int:
        return self.score.experts

    @property
    def parts(self) -> list[Part]:
        return [self.score, *self.informers, self.select]

    @property
    def informers(self) -> list[Informer]:
        return [informer for informer in self.inform if isinstance(informer, Informer)]

    @property
    def traits(self) -> Traits:
        """What holds for the whole pipeline: only what holds for each part."""
        combined = Traits()
        for part in self.parts:
            combined = combined & part.traits
        return combined

    @property
    def reads(self) -> set[str]:
        """The fields of a Context that its parts need beyond causal, padding and cache."""
        return {field for part in self.parts for field in part.reads}

    @property
    def informed(self) -> bool:
        """Does an informer change what the selector reads?"""
        return any(not informer.inert for informer in self.informers)

    def scores_of(self, routing: Routing) -> Scores:
        """Return what the selector read, (1,T,E), from the record of a forward in evaluation."""
        return Scores.recorded(routing, informed=self.informed)

    def held_weights(self, experts: Tensor, routing: Routing) -> Tensor:
        """(T,K): the weights of `experts (T,K)`, held fixed, under the scores of `routing`, of this router in evaluation.

        A token whose held set is the one it has in `routing` gets those weights, bit for bit.
        """
        live = Selection.recorded(routing, self.scale)
        return self.select.held_weights(experts.unsqueeze(0), self.scores_of(routing), live).squeeze(0)

    def snapshot(self) -> dict[str, Tensor]:
        """Return what is worth watching while training, of all parts."""
        return {name: value for part in self.parts for name, value in part.snapshot().items()}

    def progress(self, fraction: float) -> None:
        """Training has come this far, from 0 to 1: annealing and growing parts move along."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"progress is {fraction}; it must be between 0 and 1.")
        for part in self.parts:
            part.progress(fraction)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Routing:
        """`tokens (B,N,d)` to their `Routing`; `(T,d)` too, for a router that looks at one token at a time."""
        self._refuse_tracing()
        context = context or Context()
        tokens = self._sequences(tokens)
        real = context.real(tokens)
        usable = context.usable(tokens)
        tokens = tokens if usable is None else tokens.where(usable.unsqueeze(-1), 0.0)
        if self.training:
            for part in self.parts:
                if isinstance(part, StatefulPart):
                    part.begin_training_forward()
        with torch.autocast(tokens.device.type, enabled=False):
            logits = self.score(tokens, context)
            if self.training and self.check_finite:
                logits = require_finite(logits, tokens, self.get_buffer("_name"), real)
            gates = self.select.gate(logits)
            informers = [informer for informer in self.informers if not informer.inert]
            for informer in informers:
                gates = informer(gates, logits, tokens, context)
            if self.training and self.check_finite and any(informer.side == "token" for informer in informers):
                gates = require_finite(gates, tokens, self.get_buffer("_name"), real)  # products of tokens may overflow
            scores = Scores.from_gates(gates, logits) if informers else Scores(logits, gates, informed=False, raw=logits)
            selected = self.select(scores, tokens, context)
            weights = selected.weights if self.scale == 1 else selected.weights * self.scale
            routing = Routing(
                logits=_detach_unless(usable, logits).flatten(0, 1),
                gates=_detach_unless(usable, selected.gates).flatten(0, 1),
                experts=selected.experts.flatten(0, 1),
                weights=_detach_unless(usable, weights).flatten(0, 1),
                losses=dict(selected.losses),
            )
            if self.training and self.learning and self.losses is not None:
                routing = replace(routing, losses={**routing.losses, **self.losses(routing, real)})
        wait_for_side_stream(tokens)
        return routing

    def _refuse_tracing(self) -> None:
        """Raise an error where the forward is recorded by something that cannot hold a router."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise ValueError(
                f"{self.layer}: torch.jit.trace, and so torch.onnx.export(dynamo=False), cannot record a router; use "
                "torch.export.export, or torch.onnx.export(dynamo=True)."
            )
        if self.training and torch.compiler.is_exporting() and _becomes_onnx():
            raise ValueError(
                f"{self.layer}: this router is in training mode, and an ONNX model cannot learn; call model.eval() before "
                "torch.onnx.export."
            )

    def _sequences(self, tokens: Tensor) -> Tensor:
        if tokens.dim() == 2 and not self.traits.sequence_aware:
            tokens = tokens.unsqueeze(0)
        if tokens.dim() != 3:
            wanted = "(B, N, d)" if self.traits.sequence_aware else "(B, N, d) or (T, d)"
            why = ", because it looks at whole sequences" if self.traits.sequence_aware else ""
            raise ValueError(f"{self.layer}: tokens have shape {tuple(tokens.shape)}; this router takes {wanted}{why}.")
        if not tokens.is_floating_point():
            raise ValueError(f"{self.layer}: tokens are {tokens.dtype}; expected floating-point numbers.")
        if tokens.shape[-1] != self.dim:
            raise ValueError(f"{self.layer}: tokens have width {tokens.shape[-1]}; this router was built for {self.dim}.")
        return tokens

    def extra_repr(self) -> str:
        return f"layer={self.layer!r}, losses={self.losses}"
