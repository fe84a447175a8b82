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

from holdfast.kernels.finite import encode_name, require_finite
from holdfast.kernels.operators import wait_for_side_stream
from holdfast.kernels.torch_internals import is_exporting
from holdfast.routing.declarations import Order
from holdfast.routing.dropout import ExpertDropout
from holdfast.routing.parts import Informer, Noise, Part, Score, Selector, Traits
from holdfast.routing.records import Context, Routing, checked_tokens
from holdfast.routing.replaying import replay_record
from holdfast.routing.router_checks import check_gradient_scaling, check_parts, refuse_tracing, require_usable
from holdfast.routing.rules import Scores, Selection
from holdfast.routing.state import StatefulPart

# (routing, token_mask, router=, tokens=, context=) -> weighted terms by name
LossTerms = Callable[..., Mapping[str, Tensor]]


class Router(nn.Module):
    """A pipeline of parts: `score`, then the informers in `inform`, at most one on each side, then `select`.

    A clustered score (`Clustered`) does the two stages score and cluster. Pass it as `score`.

    losses          loss terms to add to `Routing.losses` in training, for example `holdfast.Losses(balance=0.01)`
    layer           the router's module path in the model, for error messages
    noise           noise on the scores in training, before selection; it becomes the part `select.noise`. Its temperature
                    divides the logits in evaluation, too
    dropout         experts that a training forward drops before selection
    gradient_scaling
                    in training, the layer multiplies the gradients of an expert's weights by mean load / own load, by at
                    most this number and at least its inverse; None: they stay
    check_finite    in training, raise an error if scores are NaN or infinite; False disables the check
    scale           a factor that multiplies all weights, if the experts were trained with such a factor
    """

    disabled: Tensor | None = None  # (E,) bool, the experts that evaluation does without (`holdfast.disable`)

    def __init__(
        self,
        score: Score,
        select: Selector,
        inform: Sequence[Informer] = (),
        *,
        noise: Noise | None = None,
        dropout: ExpertDropout | None = None,
        gradient_scaling: float | None = None,
        losses: LossTerms | None = None,
        layer: str = "router",
        check_finite: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if noise is not None:
            if select.noise is not None:
                raise ValueError(
                    f"{type(select).__name__} has noise already; pass noise once, to the selector or the Router."
                )
            select.noise = noise
        check_parts(score, select, inform, drops=dropout is not None)
        check_gradient_scaling(gradient_scaling, select)
        self.score, self.inform, self.select = score, nn.ModuleList(inform), select
        self.dropout, self.losses, self.check_finite, self.scale = dropout, losses, check_finite, scale
        self.gradient_scaling = gradient_scaling
        self._dropped: Tensor | None = None  # the experts that the last training forward dropped
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
        in_training = [part for part in (self.select.noise, self.dropout) if part is not None]
        return [self.score, *self.informers, *in_training, self.select]

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
    def temperature(self) -> float:
        """The number that divides the logits of the score."""
        return 1.0 if self.select.noise is None else self.select.noise.temperature

    def order(self, tokens: Tensor, context: Context) -> Order | None:
        """Return what the score declares about the logits of `tokens (B,N,d)`, after the temperature; None: nothing."""
        declared = self.score.declares.order
        order = None if declared is None else declared(tokens, context)
        return None if order is None else order.divided_by(self.temperature)

    @property
    def informed(self) -> bool:
        """Whether an informer changes the gates that the selector reads."""
        return any(not informer.inert for informer in self.informers)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Routing:
        """Return the `Routing` of `tokens (B,N,d)`. A router that is not sequence-aware also takes `tokens (T,d)`."""
        if torch.jit.is_tracing() or is_exporting():  # type: ignore[attr-defined]
            refuse_tracing(self.layer, self.select, self.training)
        context = context or Context()
        if context.cache is not None:
            self._refuse_cache(context)
        tokens = checked_tokens(tokens, self)
        real = usable = None
        if context.token_mask is not None:
            real, usable = context.checked_mask(tokens), context.usable_rows(tokens)
            assert usable is not None
            tokens = tokens.where(usable.unsqueeze(-1), 0.0)
        with _without_autocast(tokens.device.type):
            routing = self._route(tokens, context, real, usable)
        wait_for_side_stream(tokens)
        return routing

    def _refuse_cache(self, context: Context) -> None:
        if not self.traits.cacheable:
            raise ValueError(
                "this router declares cacheable=False: with a RouterCache its routing is not that of one forward; pass "
                "all tokens in one forward, without a cache."
            )

    def _route(self, tokens: Tensor, context: Context, real: Tensor | None, usable: Tensor | None) -> Routing:
        """Return the routing, stage by stage, and in training its losses."""
        score, select = self.score, self.select
        groups = None
        if self.training:
            parts = self.all_parts
            for part in parts:  # update state with the statistics that parts collected in the previous training batch
                if isinstance(part, StatefulPart):
                    part.begin_training_forward()
            groups = _balance_groups(parts, tokens, context)
        logits = self._require_finite(score(tokens, context), tokens, real)  # score, and cluster if there is one
        if self.temperature != 1:
            logits = logits / self.temperature
        slots = None
        if score.slots is not None:  # the softmax of these logits is the sum over an expert's slots
            slots = logits.unflatten(-1, (self.experts, score.slots))
            logits = slots.logsumexp(-1)
        scores = self._inform(logits, tokens, context, real, slots)
        logits = logits if scores.informed else scores.logits  # the selector may have changed them
        if self.training and self.learning and select.noise is not None:
            scores = select.with_noise(select.noise, scores, tokens)
        lost = self._lost_experts(tokens, context)
        scores = scores if lost is None else scores.without(lost, select.gate)
        selection = select(scores, tokens, context)
        if context.replayed is not None:
            every = scores if scores.whole is None else scores.whole  # a recorded expert may be one that is dropped
            selection = replay_record(select, selection, every, context.replayed, self.layer)
        weights = selection.weights if self.scale == 1 else selection.weights * self.scale
        gates, shares, losses = selection.gates, selection.shares, dict(selection.losses)
        if usable is not None:
            logits, gates, weights = (_detach_unusable(values, usable) for values in (logits, gates, weights))
            shares = None if shares is None else _detach_unusable(shares, usable)
        routing = Routing(
            logits=logits.flatten(0, 1),
            gates=gates.flatten(0, 1),
            experts=selection.experts.flatten(0, 1),
            weights=weights.flatten(0, 1),
            losses=losses,
            requested=None if selection.requested is None else selection.requested.flatten(0, 1),
            dropped=None if selection.dropped is None else selection.dropped.flatten(),
            balance_groups=groups,
            rows=None if selection.rows is None else selection.rows.flatten(),
            dispatch=None if selection.dispatch is None else selection.dispatch.flatten(0, 1),
            shares=None if shares is None else shares.flatten(0, 1),
        )
        if self.training and self.learning and self.losses is not None:
            losses |= self.losses(routing, real, router=self, tokens=tokens, context=context)
        return routing

    def _inform(self, logits: Tensor, tokens: Tensor, context: Context, real: Tensor | None, slots: Tensor | None) -> Scores:
        """Return the `Scores` that the selector reads: the gates of `logits (B,N,E)`, mixed by the informers."""
        informers = [informer for informer in self.informers if not informer.inert] if len(self.inform) else []
        read = self.select.adjusted(logits, tokens, context, len(informers) > 0)  # torch 2.11 cannot compile bool(list)
        gates = self.select.gate(read)
        if not informers:
            return Scores(read, gates, informed=False, raw=logits, slots=slots)
        for informer in informers:
            gates = informer(gates, read, tokens, context)
        if any(informer.side == "token" for informer in informers):
            gates = self._require_finite(gates, tokens, real)  # products of two tokens may overflow
        return Scores.from_gates(gates, logits, slots)

    def _lost_experts(self, tokens: Tensor, context: Context) -> Tensor | None:
        """Return bool, (E,) or (B,N,E): the experts that this forward does without; None if it has all."""
        if self.disabled is not None:
            require_usable(self.layer, self.training, context)
            return self.disabled.to(tokens.device)
        if self.dropout is None or not self.training:
            return None
        if not self.learning:  # a further view of the last forward drops what that dropped; generated text drops nothing
            last = self._dropped if torch.is_grad_enabled() else None
            return last if last is None or last.dim() == 1 or last.shape[:2] == tokens.shape[:2] else None
        dropped: Tensor = self.dropout(tokens, context)
        if not torch.compiler.is_compiling():  # which has no further views
            self._dropped = dropped
        return dropped

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


def _balance_groups(parts: Sequence[Part], tokens: Tensor, context: Context) -> Tensor | None:
    """Return (T,G) bool: the groups of tokens whose load is balanced separately; None if no part declares groups."""
    groups = None
    for part in parts:
        of_part = part.balance_groups(tokens, context)
        if of_part is not None:
            groups = of_part if groups is None else (groups.unsqueeze(-1) & of_part.unsqueeze(-2)).flatten(-2)
    return None if groups is None else groups.flatten(0, 1)


def _detach_unusable(values: Tensor, usable: Tensor) -> Tensor:
    """Return `values (B,N,...)`, detached in rows that are not `usable (B,N)`.

    Rows of padding that contain NaN are not usable. A model's native experts return NaN as the gradient of such rows, and
    that gradient must not reach the router.
    """
    return torch.where(usable.view(*usable.shape, *[1] * (values.dim() - 2)), values, values.detach())
