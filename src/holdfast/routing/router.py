"""The router: one pipeline of stages from tokens to a `Routing`.

    score     tokens (B,N,d)  -> logits (B,N,E)           how well each expert fits a token
    cluster   (optional)                                  scales a token's features by the statistics of its cluster
    inform    logits -> gates (B,N,E)                     gate function, then up to one informer on each side (optional)
    select    gates  -> experts, weights (B,N,K)          which experts run, and the weight of each; in training, noise may
                                                          be added to the scores first

Each stage is done by a part (`holdfast.routing.parts`); one part does both score and cluster. `Router.forward` runs the
parts and returns the `Routing` with one row for each of the T = B*N tokens. It computes in float32, whatever the model's
dtype is.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor, nn

from holdfast.kernels.backward import has_hooks_on_saved_tensors
from holdfast.kernels.finite import encode_name, require_finite
from holdfast.kernels.launching import is_exporting, is_intercepted, wait_for_side_stream
from holdfast.kernels.plain_top_k import plain_top_k
from holdfast.routing.parts import Informer, Noise, Part, Score, Selector, Traits
from holdfast.routing.records import Context, Routing
from holdfast.routing.replaying import checked_slots, replay_selection
from holdfast.routing.rules import Scores, Selection
from holdfast.routing.state import StatefulPart, several_ranks

LossTerms = Callable[[Routing, Tensor | None], Mapping[str, Tensor]]  # (routing, token_mask) -> weighted terms by name


class Router(nn.Module):
    """A pipeline of parts: `score`, then the informers in `inform`, at most one on each side, then `select`.

    A clustered score (`Clustered`) does the two stages score and cluster. Pass it as `score`.

    losses          loss terms to add to `Routing.losses` in training, for example `holdfast.Losses(balance=0.01)`
    layer           the router's module path in the model, for error messages
    noise           noise on the scores in training, before selection; it becomes the part `select.noise`
    check_finite    in training, raise an error if scores are NaN or infinite; False disables the check
    scale           a factor that multiplies all weights, if the experts were trained with such a factor
    """

    def __init__(
        self,
        score: Score,
        select: Selector,
        inform: Sequence[Informer] = (),
        *,
        noise: Noise | None = None,
        losses: LossTerms | None = None,
        layer: str = "router",
        check_finite: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        for part, kind in ((score, Score), (select, Selector), *((informer, Informer) for informer in inform)):
            if not isinstance(part, kind):
                raise ValueError(
                    f"Router(score, select, inform) expected a {kind.__name__}, but got a {type(part).__name__}."
                )
        for side in ("expert", "token"):
            count = sum(informer.side == side for informer in inform)
            if count > 1:
                raise ValueError(f"there are {count} informers on the {side} side; a Router takes at most one on each side.")
        declared = select.declares
        if inform and not declared.takes_informers:
            raise ValueError(
                f"{type(select).__name__} does not select by gates, so {type(inform[0]).__name__} would change nothing; "
                "remove one of them."
            )
        for informer in inform:
            if informer.side == "token" and score.declares.scores_sequence:
                raise ValueError(
                    f"{type(score).__name__} gives all tokens of a sequence the same scores, so {type(informer).__name__} "
                    "would change nothing; remove one of them."
                )
        if declared.asks_others and not score.declares.scores_all:
            raise ValueError(
                f"{type(score).__name__} gives a token scores for its own experts only, so a token without a place has no "
                'other expert to ask; limit it with policy="drop".'
            )
        if noise is not None:
            if select.noise is not None:
                raise ValueError(
                    f"{type(select).__name__} has noise already; pass noise once, to the selector or the Router."
                )
            select.noise = noise
        if select.noise is not None and not declared.takes_noise:
            raise ValueError(
                f"{type(select).__name__} does not select by scores in training, so {type(select.noise).__name__} would "
                "change nothing; remove the noise."
            )
        self.score, self.inform, self.select = score, nn.ModuleList(inform), select
        self.losses, self.check_finite, self.scale = losses, check_finite, scale
        self._layer, self._learning = layer, True
        self.register_buffer("_name", encode_name(layer), persistent=False)

    @property
    def layer(self) -> str:
        """The router's module path in the model, for error messages."""
        return self._layer

    @layer.setter
    def layer(self, name: str) -> None:
        self._layer = name
        self._name = encode_name(name).to(self.get_buffer("_name").device)

    @property
    def learning(self) -> bool:
        """Whether a forward in training mode updates state and returns losses; False while the model generates text."""
        return self._learning

    @learning.setter
    def learning(self, learning: bool) -> None:
        self._learning = learning
        for part in self.all_parts:
            part.learning = learning

    @property
    def dim(self) -> int:
        return self.score.dim

    @property
    def experts(self) -> int:
        return self.score.experts

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of the pipeline."""
        return [self.score, *self.informers, *([] if self.select.noise is None else [self.select.noise]), self.select]

    @property
    def all_parts(self) -> list[Part]:
        """All parts, in the order of the pipeline; the parts that a part wraps come before it."""
        return [each for part in self.parts for each in (*part.wrapped, part)]

    @property
    def informers(self) -> list[Informer]:
        return [informer for informer in self.inform if isinstance(informer, Informer)]

    @property
    def traits(self) -> Traits:
        """The traits of the whole pipeline: sequence-aware if any part is, and each other trait if all parts have it."""
        combined = Traits()
        for part in self.parts:
            combined = combined & part.traits
        return combined

    @property
    def training_traits(self) -> Traits:
        """The traits in training: some parts read the whole batch in training and not in evaluation."""
        combined = Traits()
        for part in self.parts:
            combined = combined & part.training_traits
        return combined

    @property
    def reads(self) -> set[str]:
        """The fields of a Context that the parts need besides `causal`, `token_mask` and `cache`."""
        return {field for part in self.all_parts for field in part.reads}

    @property
    def fixed_sets(self) -> bool:
        """Whether no change of the tokens changes the experts of a token in evaluation."""
        return self.select.declares.fixed_sets or not (self.score.declares.reads_tokens or self.informers)

    @property
    def informed(self) -> bool:
        """Whether an informer changes the gates that the selector reads."""
        return any(not informer.inert for informer in self.informers)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Routing:
        """Return the `Routing` of `tokens (B,N,d)`. A router that is not sequence-aware also takes `tokens (T,d)`."""
        self._refuse_tracing()
        context = context or Context()
        self._refuse_cache(context)
        tokens = self._as_sequences(tokens)
        real, usable = context.checked_mask(tokens), context.usable_rows(tokens)
        tokens = tokens if usable is None else tokens.where(usable.unsqueeze(-1), 0.0)
        losses: dict[str, Tensor] = {}
        plain = self._plain_options(context, usable)
        with _without_autocast(tokens.device.type):
            if plain is not None:
                routing = self._route_in_one_function(tokens, losses, *plain)
            else:
                routing = self._route(tokens, context, real, usable, losses)
                losses |= self._own_losses(routing, real)
        wait_for_side_stream(tokens)
        return routing

    def _refuse_cache(self, context: Context) -> None:
        if context.cache is not None and not self.traits.cacheable:
            raise ValueError(
                "this router declares cacheable=False: with a RouterCache its routing is not that of one forward; pass "
                "all tokens in one forward, without a cache."
            )

    def _own_losses(self, routing: Routing, real: Tensor | None) -> Mapping[str, Tensor]:
        """Return the terms of `losses`, in training only."""
        return self.losses(routing, real) if self.training and self.learning and self.losses is not None else {}

    def _plain_options(self, context: Context, usable: Tensor | None) -> tuple[Tensor, int] | None:
        """Return the score's matrix and k if this forward may run as one function (`plain_top_k`); else None.

        A mask of real tokens needs the stages: what padding contains gets no gradient. A compiler and an exporter need no
        shortcut. Hooks on parts, modules that wrap them, and modes of PyTorch must see them. A forward that checkpointing
        runs again must save the same tensors, also if hooks have changed since.
        """
        score, select = self.score, self.select
        if not isinstance(score, Score) or not isinstance(select, Selector):
            return None  # a module that wraps a part, and may pass on its attributes
        matrix, k = score.plain_matrix, select.plain_k
        if matrix is None or k is None or len(self.inform) > 0 or type(matrix) is not nn.Parameter:
            return None
        if context.replayed is not None or usable is not None or torch.compiler.is_compiling() or is_exporting():
            return None
        is_seen = score.is_watched or select.is_watched or is_intercepted() or has_hooks_on_saved_tensors()
        return None if is_seen else (matrix, k)

    def _route_in_one_function(self, tokens: Tensor, losses: dict[str, Tensor], matrix: Tensor, k: int) -> Routing:
        """Return what `_route` returns, in one function. Its losses are `losses`: those of this router are added to them."""
        layer = self.get_buffer("_name") if self.training and self.check_finite else None
        balance = None
        # Looked up on the class: an object that passes attributes on to its `Losses` may compute something else.
        if self.training and self.learning and hasattr(type(self.losses), "balance_alone") and not several_ranks():
            balance = self.losses.balance_alone  # type: ignore[union-attr]
        logits, gates, experts, weights, loss = plain_top_k(tokens, matrix, k, layer=layer, balance=balance)
        routing = Routing(logits, gates, experts, weights if self.scale == 1 else weights * self.scale, losses)
        losses |= self._own_losses(routing, None) if loss is None else {"balance": loss}
        return routing

    def _route(
        self,
        tokens: Tensor,
        context: Context,
        real: Tensor | None,
        usable: Tensor | None,
        losses: dict[str, Tensor],
    ) -> Routing:
        """Return the routing, stage by stage. Its losses are `losses`: those of the selector are added to them."""
        parts = self.all_parts
        if self.training:
            self._commit_state(parts)
        logits = self._require_finite(self.score(tokens, context), tokens, real)  # score, and cluster if there is one
        slots = None
        if self.score.slots is not None:  # the softmax of these logits is the sum over an expert's slots
            slots = logits.unflatten(-1, (self.experts, self.score.slots))
            logits = slots.logsumexp(-1)
        scores = self._inform(logits, tokens, context, real, slots)
        if self.training and self.learning and self.select.noise is not None:
            scores = self.select.with_noise(self.select.noise, scores, tokens)
        selection = self.select(scores, tokens, context)
        if context.replayed is not None:
            selection = self._replay(context.replayed, selection, scores)
        losses |= selection.losses
        weights = selection.weights if self.scale == 1 else selection.weights * self.scale
        return Routing(
            logits=_detach_unusable(logits, usable).flatten(0, 1),
            gates=_detach_unusable(selection.gates, usable).flatten(0, 1),
            experts=selection.experts.flatten(0, 1),
            weights=_detach_unusable(weights, usable).flatten(0, 1),
            losses=losses,
            requested=None if selection.requested is None else selection.requested.flatten(0, 1),
            dropped=None if selection.dropped is None else selection.dropped.flatten(),
            balance_groups=self._balance_groups(parts, tokens, context),
            rows=None if selection.rows is None else selection.rows.flatten(),
            dispatch=None if selection.dispatch is None else selection.dispatch.flatten(0, 1),
            shares=None if selection.shares is None else _detach_unusable(selection.shares, usable).flatten(0, 1),
        )

    def _replay(self, replayed: Tensor, live: Selection, scores: Scores) -> Selection:
        """Return `live` with the recorded experts `replayed (B,N,K)`. Raise ValueError if this router cannot replay them."""
        if self.select.layer_kind != "moe":
            raise ValueError(
                f"{self.layer}: every token of a SoftMoE or SMEAR layer uses all experts; it cannot replay routes."
            )
        k = None if self.select.ragged else live.experts.shape[-1]
        slots = checked_slots(replayed.to(live.gates.device), live.gates.shape[:2], self.experts, k, self.layer)
        return replay_selection(self.select, live, scores, slots)

    def _inform(self, logits: Tensor, tokens: Tensor, context: Context, real: Tensor | None, slots: Tensor | None) -> Scores:
        """Return the `Scores` that the selector reads: the gates of `logits (B,N,E)`, mixed by the informers."""
        gates = self.select.gate(logits)
        informers = [informer for informer in self.informers if not informer.inert]
        if not informers:
            return Scores(logits, gates, informed=False, raw=logits, slots=slots)
        for informer in informers:
            gates = informer(gates, logits, tokens, context)
        if any(informer.side == "token" for informer in informers):
            gates = self._require_finite(gates, tokens, real)  # products of two tokens may overflow
        return Scores.from_gates(gates, logits, slots)

    def _balance_groups(self, parts: Sequence[Part], tokens: Tensor, context: Context) -> Tensor | None:
        """Return (T,G) bool: the groups of tokens whose load is balanced separately; None if no part declares groups."""
        groups = None
        for part in parts:
            own = part.balance_groups(tokens, context)
            if own is not None:
                groups = own if groups is None else (groups.unsqueeze(-1) & own.unsqueeze(-2)).flatten(-2)
        return None if groups is None else groups.flatten(0, 1)

    def _commit_state(self, parts: Sequence[Part]) -> None:
        """Update the state of the parts with the statistics that they collected in the previous training batch."""
        for part in parts:
            if isinstance(part, StatefulPart):
                part.begin_training_forward()

    def _require_finite(self, values: Tensor, tokens: Tensor, real: Tensor | None) -> Tensor:
        """Return `values (B,N,E)`; in training, raise ValueError if a value of a real token is NaN or infinite."""
        if not (self.training and self.check_finite):
            return values
        return require_finite(values, tokens, self.get_buffer("_name"), real)

    def scores_from(self, routing: Routing) -> Scores:
        """Return the `Scores` (1,T,E) that the selector read in the evaluation forward that returned `routing`."""
        return Scores.from_routing(routing, informed=self.informed)

    def held_weights(self, experts: Tensor, routing: Routing) -> Tensor:
        """Return (T,K): the weights that the held set `experts (T,K)` has under the scores of `routing`.

        `routing` is what this router returned in evaluation. If the held set of a token equals its selected set in
        `routing`, the token gets exactly the weights in `routing`.
        """
        live = Selection.from_routing(routing, self.scale)
        return self.select.held_weights(experts.unsqueeze(0), self.scores_from(routing), live).squeeze(0)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the tensors of all parts to watch during training, by name."""
        return {name: value for part in self.all_parts for name, value in part.declares.snapshot().items()}

    def progress(self, fraction: float) -> None:
        """Set the training progress, from 0 to 1, for parts that change a budget or k during training."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"progress is {fraction}; it must be between 0 and 1.")
        for part in self.all_parts:
            part.progress(fraction)

    def use_token_counts(self, counts: Tensor) -> None:
        """Tell the parts how often each token id occurs in the training data, `counts (vocabulary,)`, for `hash`."""
        for part in self.all_parts:
            part.use_token_counts(counts)

    def _refuse_tracing(self) -> None:
        """Raise ValueError if this forward is traced or exported by a tool that does not support routers."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise ValueError(
                f"{self.layer}: torch.jit.trace and torch.onnx.export(dynamo=False) cannot record a router; use "
                "torch.export.export or torch.onnx.export(dynamo=True)."
            )
        if not is_exporting() or not _is_exporting_to_onnx():
            return
        if not self.select.declares.in_onnx:
            raise ValueError(
                f"{self.layer}: ONNX lacks operators that {type(self.select).__name__} needs; use torch.export.export, or "
                "choose another router."
            )
        if self.training:
            raise ValueError(
                f"{self.layer}: this router is in training mode, and an ONNX model cannot update router state; call "
                "model.eval() before torch.onnx.export."
            )

    def _as_sequences(self, tokens: Tensor) -> Tensor:
        """Return `tokens` as (B,N,d); raise ValueError if this router cannot read them."""
        if tokens.dim() == 2 and not self.traits.sequence_aware:
            tokens = tokens.unsqueeze(0)
        if tokens.dim() != 3:
            expected = "(B, N, d), because it reads whole sequences" if self.traits.sequence_aware else "(B, N, d) or (T, d)"
            raise ValueError(f"{self.layer}: tokens have shape {tuple(tokens.shape)}; this router takes {expected}.")
        if not tokens.is_floating_point():
            raise ValueError(f"{self.layer}: tokens have dtype {tokens.dtype}; expected a floating-point dtype.")
        if tokens.shape[-1] != self.dim:
            raise ValueError(f"{self.layer}: tokens have width {tokens.shape[-1]}; this router was built for {self.dim}.")
        return tokens

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` as `nn.Module` does, then set `_name` again: after a move from the meta device it has no values."""
        super()._apply(fn, recurse)
        if not self.get_buffer("_name").is_meta:
            self.layer = self._layer
        return self

    def extra_repr(self) -> str:
        return f"layer={self.layer!r}, losses={self.losses}"


def join_routers(routers: Sequence[Router]) -> None:
    """Connect the routers of one model, in the order of its layers, for parts that share state (`remoe[coefficient=model]`).

    `reroute`, `sparsify` and loading do this for Hugging Face models.
    """
    parts = [part for router in routers for part in router.all_parts]
    for part in parts:
        part.join_model(parts)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Disable autocast. Where it is not enabled, which is usual in decoding, do nothing: this saves 20 microseconds."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _detach_unusable(values: Tensor, usable: Tensor | None) -> Tensor:
    """Return `values (B,N,...)`, detached in rows that are not `usable (B,N)`.

    Rows of padding that contain NaN are not usable. A model's native experts return NaN as the gradient of such rows, and
    that gradient must not reach the router.
    """
    if usable is None:
        return values
    return torch.where(usable.view(*usable.shape, *[1] * (values.dim() - 2)), values, values.detach())


def _is_exporting_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# `torch.onnx.export` may run Dynamo, which replaces `is_in_onnx_export()` by False. This attribute makes Dynamo call the
# function instead. The decorator `torch.compiler.assume_constant_result` sets it too, but imports all of Dynamo.
_is_exporting_to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]
