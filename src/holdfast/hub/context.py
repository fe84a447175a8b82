"""Context capture: what a router may read beyond its token, collected by hooks around its MoE layer.

A family's gate receives tokens (T,d) and nothing else. A `ContextCapture` per MoE layer collects the rest during a forward:

    hook on                            captures
    the attention before the block     the shape (B,N) of its input; mask, KV cache, or whether a recurrent layer has a state
    the attention function             mask, window, number of keys (`_attention_with_capture`, replacements.py); for routers
                                       that read attention itself, also queries, keys, values and scale
    the attention's output projection  the attention's output, for routers that read attention itself

Only what the router reads is captured: a router that reads one token at a time needs the mask in training alone, where
padding counts nowhere, and nothing in evaluation.

`prepare` makes the router's `Context` from what was captured. `record_routing` gets the router's result, attaches losses to
the expert weights (forwards.py), and keeps the routing for the next MoE layer if its router reads it (`ac`).

With activation checkpointing the hooks run again in the recomputation, so the router reads the same context as before. Only
the routing of the previous MoE layer cannot be captured again: it is kept until the next forward that may have a backward.
Routers that read it, and routers with state, raise an error at a second checkpointed forward before the backward.

In decoding, a sequence-aware router needs stored tensors of earlier tokens, one row per token (`RouterCache`). They are kept
on the layer's own KV cache: when `generate` reorders or crops keys and values, it reorders or crops these rows too. With a
static KV cache they have its full length from the start, and the positions of the current tokens are a tensor: the number
of tokens in the cache is never read from the device, and a compiled forward is not compiled again for the next token.

The functions at the end read the attention masks of models: padding, sliding windows, and rows that hold several sequences.

B sequences, N current tokens, M keys; a mask is bool, or numbers that are added to the attention's scores
"""

import copy
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.forwards import Forward, ForwardHooks, PerThread, modality_of
from holdfast.hub.replacements import ATTENTION, as_linear, override_config, restore_config
from holdfast.kernels.torch_internals import is_recomputing
from holdfast.layers.losses import Losses
from holdfast.routing import Attention, Context, Previous, Router, RouterCache, Routing, VisibleTokens
from holdfast.routing.cache import (
    ROUTER_NUMBERS,
    has_recurrent_state,
    has_static_length,
    prepare_static_rows,
    router_cache_of,
    static_router_cache_of,
)
from holdfast.routing.parts import Traits
from holdfast.routing.state import StatefulPart

NOTHING = Context()
NOT_CAUSAL = "in this causal model the router lets a token's routing depend on later tokens"
NOT_CAUSAL_IN_TRAINING = (
    f"{NOT_CAUSAL} in training: its perplexity in training cannot be compared with that of a causal model. In evaluation "
    "and generation it is causal."
)


@dataclass(frozen=True)
class LayerModules:
    """An MoE block and the modules around it."""

    block: nn.Module  # takes (B,N,d)
    attention: Any  # just before the block; calls the attention function. None: a connector
    layer: nn.Module  # contains both
    projection_path: str  # of the attention's output projection, in the layer
    windowed: bool = False  # no attention with queries and masks of (B,N): windows (Swin), packed images, or none at all
    recurrent: bool = False  # `attention` is a recurrent module, with a state instead of a KV cache
    declared_causal: bool | None = None  # None: the attention says it
    of_images: bool = False  # its tokens are parts of images, in a vision-language model
    packed: bool = False  # the images of a batch are one row of tokens (T,d)

    @property
    def projection(self) -> nn.Module:
        """Return the attention's output projection. An adapter may wrap or replace it, so it is looked up at every use."""
        return self.layer.get_submodule(self.projection_path)

    @property
    def causal(self) -> bool:
        """Whether no token attends to a later one."""
        if self.declared_causal is not None:
            return self.declared_causal
        return self.recurrent or bool(getattr(self.attention, "is_causal", False))


@dataclass
class CapturedAttention:
    """The arguments and the output of the attention before an MoE block, until the router has read them."""

    mask: Any = None
    kv_cache: Any = None
    has_recurrent_state: bool = False  # a recurrent layer has a state of earlier tokens
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    keys: int | None = None  # number of keys
    scale: float | None = None
    window: int | None = None  # how many tokens a query attends to, itself included
    output: Tensor | None = None


@dataclass(frozen=True)
class _EarlierTokens:
    """The tokens before the current ones in the KV cache."""

    rows: RouterCache | None = None  # the router's rows of them
    past: int | None = None  # how many they are; None without a KV cache, and if `positions` are given
    positions: Tensor | None = None  # (N,), of the current tokens in a static cache; None for its first tokens


@dataclass
class _Captured:
    """What has been captured so far in the current forward."""

    shape: torch.Size | None = None  # (B,N) of the attention's input, until the gate has read it
    tokens: int | None = None  # how many the gate got
    factors: Tensor | None = None  # (E,), by which the gradients of the layer's experts are multiplied
    token_mask: Tensor | None = None  # (B,N) of the gate's tokens
    attention: CapturedAttention = field(default_factory=CapturedAttention)
    routed: Previous | None = None  # the layer's own tokens and routing, for the next MoE layer
    pending: "weakref.ref[_PendingBackward] | None" = None  # the forward that a backward with checkpointing will recompute


class _PendingBackward:
    """Marks a forward whose backward has not run yet."""

    done = False

    def finish(self, gradient: Tensor) -> None:
        self.done = True


class ContextCapture:
    """The hooks around one MoE layer, and what they captured in the current forward."""

    def __init__(
        self,
        router: Router | None,
        layer_modules: LayerModules,
        forwards: ForwardHooks,
        previous: "ContextCapture | None",
        k: int,
        replay_layer: int,
        idle: bool = False,
    ) -> None:
        """Put the hooks on the layer. With `idle` there are none, until the next MoE layer's router reads this layer.

        replay_layer   the index of the layer in recorded routes; none are for an index after their last
        """
        self.router, self.layer_modules, self.forwards = router, layer_modules, forwards
        self.previous, self.k, self.replay_layer = previous, k, replay_layer
        parts = router.all_parts if router is not None else []
        reads = {name for part in parts for name in part.reads}
        traits, training_traits = (Traits(), Traits()) if router is None else (router.traits, router.training_traits)
        self.sequence_aware, is_causal = traits.sequence_aware, layer_modules.causal
        # SoftMoE and SMEAR mix all tokens of a row, whichever of them the attention lets see each other.
        aware = [part for part in parts if part.traits.sequence_aware]
        self.mixes_row = any(not {"attention", "attention.mask"} & {*part.reads} for part in aware)
        self._mask_was_read = False
        self.static_rows = self.sequence_aware and all(part.declares.static_rows for part in aware)
        self.reads_attention = "attention" in reads and not layer_modules.windowed
        self.reads_mask = self.reads_attention or ("attention.mask" in reads and not layer_modules.windowed)
        self.reads_projection = "attention.projection" in reads
        self.reads_previous, self.is_read_by_next = "previous" in reads, False
        self.reads_ids, self.reads_modality = "token_ids" in reads, "modality" in reads
        self.breaks_causality = is_causal and not (traits.causal and traits.cacheable)
        # Some routers look at later tokens in training only. Such a model may generate. `ModelHooks` lets one layer warn.
        self.breaks_causality_in_training = is_causal and traits.causal and not training_traits.causal
        self.warns_in_training = False
        self.reads_padding = self.sequence_aware or not traits.batch_invariant  # also in evaluation
        self.reads_sequence = self.reads_padding or self.breaks_causality  # more than one token at a time
        self.reads_more = self.reads_previous or self.reads_ids or self.reads_modality
        # A KV cache stores this number with its router rows. After a change to the model the number differs, so that rows of
        # the earlier router are not used.
        self.router_number = next(ROUTER_NUMBERS)
        self._thread = PerThread(_Captured)
        self._latest_routed: Previous | None = None  # of any thread: on a GPU, the backward runs in another thread
        self._recomputation_reads_state = self.reads_more or any(isinstance(part, StatefulPart) for part in parts)
        if self.reads_previous and previous is not None:
            previous.is_read_by_next = True
            previous._add_hook()
            forwards.on_forward_end.append(previous.clear)
        self._handles: list[Any] = []
        if not idle:
            self._add_hook()
        if self.reads_attention:
            self._hook_projection()
        if self.reads_mask:
            layer_modules.attention.context_capture = self
            override_config(layer_modules.attention, ATTENTION)

    def _add_hook(self) -> None:
        attention = self.layer_modules.attention
        if self.is_idle and attention is not None:
            self._handles.append(attention.register_forward_pre_hook(self._capture_arguments, with_kwargs=True))
            if self.sequence_aware:  # its block may be called without the attention before it
                self._handles.append(self.layer_modules.block.register_forward_pre_hook(self._capture_shape))

    @property
    def is_idle(self) -> bool:
        """Whether the family's own gate selects here, and its routing is never read."""
        return not self._handles

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContextCapture":
        """Copy this capture if its layer is copied. If only a module inside it is copied (PEFT), return this one."""
        if id(self.forwards) not in memo and id(self.layer_modules.layer) not in memo:
            return self
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        if self.reads_attention:
            self._projection_hook.remove()
        if self.reads_mask:
            restore_config(self.layer_modules.attention)
            del self.layer_modules.attention.context_capture

    def clear(self) -> None:
        """Delete the layer's last routing."""
        self._thread.current.routed = self._latest_routed = None

    @property
    def routed(self) -> Previous | None:
        """Return the layer's tokens and routing in the current forward, or in the one that a backward recomputes."""
        if not torch.compiler.is_compiling() and is_recomputing():
            return self._latest_routed
        return self._thread.current.routed

    @property
    def token_mask(self) -> Tensor | None:
        """Return the mask (B,N) of the tokens that the gate has routed last, in training."""
        return self._thread.current.token_mask

    @property
    def is_training(self) -> bool:
        """Whether the router is in training mode; the rest of the model may be in another mode."""
        return (self.layer_modules.block if self.router is None else self.router).training

    def keeps_native_gate(self) -> bool:
        """Whether the family's own gate selects, and no caller and no later layer reads its routing in this forward."""
        forward = self.forwards.forward
        return self.is_idle and (forward.is_plain or (forward.routes is None and not self._is_pending))

    @property
    def learning(self) -> bool:
        """Whether layers compute losses in this forward, in training mode."""
        return self.forwards.forward.learning

    def needs_native_routing(self) -> bool:
        """Whether the routing of the family's own gate is read in this forward, or replaced by a recorded one."""
        forward = self.forwards.forward
        is_requested = forward.wants_router_logits or forward.routes is not None
        return self.is_read_by_next or is_requested or self._is_pending or forward.view is not None

    def most_rows(self, tokens: int) -> int | None:
        """Return how many slots of the layer's tokens have an expert at most; None if all may, or these are other tokens."""
        if self.router is None or self._replayed(self.forwards.forward) is not None:
            return None
        return self.router.select.most_rows(tokens) if self._thread.current.tokens in (None, tokens) else None

    @property
    def gradient_factors(self) -> Tensor | None:
        """The factors (E,) of the gradients of the layer's experts in this forward; None: they stay."""
        return self._thread.current.factors

    @gradient_factors.setter
    def gradient_factors(self, factors: Tensor | None) -> None:
        self._thread.current.factors = factors

    def prepare(self, hidden: Tensor, router: Router | None) -> tuple[Tensor, Context]:
        """Return a layer's input as (B,N,d), and what its router may read. What was captured is forgotten, to free memory.

        router   the one that runs: not the installed one if PEFT has copied that (`modules_to_save`)
        """
        captured = self._thread.current
        if self.router is not router:
            self.router = router
        shape, captured.shape = captured.shape, None
        if hidden.dim() == 2:
            captured.tokens = hidden.shape[0]
            hidden = hidden if shape is None else hidden.view(*shape, hidden.shape[1])
            hidden = hidden.unsqueeze(0) if self.layer_modules.packed else hidden
        if self._reads_tokens_alone:
            return hidden, Context(**self._read_beside_tokens(hidden, self.forwards.forward)) if self.reads_more else NOTHING
        forward = self.forwards.forward
        if router is not None and router.learning != forward.learning:
            router.learning = forward.learning
        return hidden, self._build_context(hidden, forward)

    @property
    def _reads_tokens_alone(self) -> bool:
        """Whether the router reads one token at a time in this forward, and no caller reads its routing."""
        # The usual case of a decoding step: this is fast, and `ForwardHooks.forward` is not.
        is_plain = self.forwards.thread.current.is_plain and not self.reads_sequence
        return is_plain and not (self.layer_modules.block if self.router is None else self.router).training

    def _read_beside_tokens(self, tokens: Tensor, forward: Forward) -> dict[str, Any]:
        """Return the fields of a `Context` that also a router reads that reads one token of `tokens (B,N,d)` at a time."""
        return {
            "previous": self.previous.routed if self.reads_previous and self.previous is not None else None,
            "token_ids": forward.token_ids if self.reads_ids else None,
            "modality": self._modality(tokens, forward) if self.reads_modality else None,
            "replayed": self._replayed(forward),
        }

    def _modality(self, tokens: Tensor, forward: Forward) -> Tensor | None:
        """Return the modality (B,N) of each token, 1 for a part of an image; None if it is not known."""
        if self.layer_modules.of_images:
            return torch.ones(tokens.shape[:-1], dtype=torch.long, device=tokens.device)
        return modality_of(forward.token_ids, self.forwards.image_tokens)

    def _replayed(self, forward: Forward) -> Tensor | None:
        """Return the recorded routes (B,N,K) of this layer; None if it is live. Routes are of the tokens of `input_ids`."""
        routes = forward.routes
        if routes is None or self.layer_modules.of_images or self.replay_layer >= routes.shape[2]:
            return None
        return routes[:, :, self.replay_layer]

    def _build_context(self, tokens: Tensor, forward: Forward) -> Context:
        """Return what the router may read of `tokens (B,N,d)`."""
        if self._will_be_recomputed(forward) and self._is_pending:
            # The recomputation of the first forward would read state, previous routing, ids and routes of the second.
            raise ValueError(
                "gradient checkpointing with this router allows one forward before each backward, and this is the second: "
                "switch gradient checkpointing off, put the batches into one forward, or use a router that reads its token "
                "alone and no recorded routes."
            )
        captured, self._thread.current.attention = self._thread.current.attention, CapturedAttention()
        fields, length = self._read_beside_tokens(tokens, forward), tokens.shape[1]
        kv_cache = captured.kv_cache if self.breaks_causality else None
        cached = 0 if kv_cache is None else int(self._cache_layer(kv_cache).get_seq_length()) - length
        if self.breaks_causality and (captured.has_recurrent_state or cached):
            raise ValueError(f"{NOT_CAUSAL}; it cannot decode token by token with a KV cache.")
        if self.warns_in_training and self.is_training and forward.learning:
            self.warns_in_training = False
            warnings.warn(NOT_CAUSAL_IN_TRAINING, stacklevel=2)
        if self.layer_modules.windowed or not self._needs_padding(forward):
            return Context(**fields)
        if captured.mask is not None and not isinstance(captured.mask, Tensor):
            raise ValueError(
                f"attention uses a {type(captured.mask).__name__} as its mask, from which a router cannot read padding; "
                'set the model\'s attention to "sdpa" or "eager".'
            )
        earlier = self._earlier_tokens(captured, length)
        token_mask = token_mask_of(captured.mask, tokens.shape[0], length, earlier.past, earlier.positions)
        if self.mixes_row and captured.mask is not None and token_mask is not None:
            self._require_one_sequence_in_a_row(captured.mask, token_mask)
        visible = self._visible_tokens(captured, earlier, tokens)
        attention, causal = self._attention_context(captured, visible), self.layer_modules.causal
        return Context(causal, token_mask, attention, cache=earlier.rows, visible=visible, **fields)

    def _needs_padding(self, forward: Forward) -> bool:
        """Whether the router or its losses must know which tokens are padding."""
        return self.reads_padding or self.is_training or forward.wants_router_logits

    def record_routing(
        self, tokens: Tensor, routing: Routing, context: Context, losses: Any, weights: Tensor | None = None
    ) -> Tensor:
        """Collect the router's losses and keep its routing for the next MoE layer, if that layer's router reads it.

        Return the expert weights (`weights`, by default those of the routing) with the layer's loss attached to them.
        """
        weights = routing.weights if weights is None else weights
        if not (self.is_read_by_next or routing.losses) and self.forwards.thread.current.is_plain:
            return weights
        forward, captured = self.forwards.forward, self._thread.current
        if isinstance(losses, Losses) and losses.reads_experts:
            captured.token_mask = context.token_mask
        if self.is_read_by_next:
            captured.routed = Previous(tokens.detach(), routing.map_tokens(Tensor.detach))
            if forward.may_have_backward:
                self._latest_routed = captured.routed
        weights = self.forwards.collector.collect(routing, weights, losses, context.token_mask, self.k, forward)
        trained = weights if weights.requires_grad else tokens  # the weights of `hash` have no gradient
        if trained.requires_grad and self._will_be_recomputed(forward):
            pending = _PendingBackward()
            self._thread.current.pending = weakref.ref(pending)  # the graph keeps it alive, through its hook
            trained.register_hook(pending.finish)
        return weights

    def _will_be_recomputed(self, forward: Forward) -> bool:
        """Whether a backward will run this layer again, and the result depends on more than the layer's tokens."""
        return (
            self.is_training
            and (self._recomputation_reads_state or forward.routes is not None or self._is_pending)
            and forward.may_have_backward
            and not torch.compiler.is_compiling()
            and bool(getattr(self.layer_modules.layer, "gradient_checkpointing", False))
            and not is_recomputing()
        )

    @property
    def _is_pending(self) -> bool:
        """Whether an earlier forward waits for a backward that will run this layer again."""
        last = self._thread.current.pending
        pending = None if last is None else last()
        return pending is not None and not pending.done

    def _require_one_sequence_in_a_row(self, mask: Tensor, real: Tensor) -> None:
        """Raise ValueError if a mask `(B,1,N,N)` separates a real token from the real token before it: rows are packed.

        On a GPU only the first such mask of a layer is read, because reading one synchronises with the host.
        """
        is_square = mask.dim() == 4 and mask.shape[-2] == mask.shape[-1] == real.shape[1] > 1
        if not is_square or torch.compiler.is_compiling() or (mask.device.type != "cpu" and self._mask_was_read):
            return
        self._mask_was_read = True
        if bool(separates_neighbours(mask, real)):
            raise ValueError(
                "the attention mask packs several sequences into one row, and a SoftMoE or SMEAR layer would mix them; put "
                "each sequence into a row of its own."
            )

    def _capture_shape(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and inputs[0].dim() == 3 and not self.layer_modules.windowed:
            self._thread.current.shape = inputs[0].shape[:-1]

    def _capture_arguments(self, attention: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Capture shape, mask and KV cache of the attention. Raise ValueError if the router cannot separate sequences."""
        captured, hidden = self._thread.current, inputs[0] if inputs else options.get("hidden_states")
        # Some layers flatten tokens to (T,d) after the attention.
        captured.shape = None
        if isinstance(hidden, Tensor) and hidden.dim() == 3 and not self.layer_modules.windowed:
            captured.shape = hidden.shape[:-1]
        if self._reads_tokens_alone:
            return
        if self.breaks_causality or self._needs_padding(self.forwards.forward):
            named = options.get("attention_mask", options.get("mask"))  # T5's name
            mask = inputs[1] if named is None and len(inputs) > 1 else named
            if self.sequence_aware:
                require_separate_sequences(mask, options)
            kv_cache = options.get("past_key_values", options.get("layer_past"))
            kv_cache = getattr(kv_cache, "self_attention_cache", kv_cache)
            states = options.get("cache_params", kv_cache)
            has_state = self.layer_modules.recurrent and has_recurrent_state(attention, states)
            kv_cache = None if self.layer_modules.recurrent else kv_cache
            captured.attention = CapturedAttention(mask, kv_cache, has_state)
            # A cache that was made without a config has no layers before their first tokens.
            is_made = self.static_rows and kv_cache is not None and attention.layer_idx < len(kv_cache.layers)
            if is_made and has_static_length(self._cache_layer(kv_cache)):
                prepare_static_rows(self._cache_layer(kv_cache))
        if self.reads_attention and self._projection is not self.layer_modules.projection:
            self._projection_hook.remove()
            self._hook_projection()

    def _hook_projection(self) -> None:
        self._projection = self.layer_modules.projection
        self._projection_hook = self._projection.register_forward_hook(self._capture_output)

    def capture_attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]) -> None:
        """Capture the arguments of the attention function. `_attention_with_capture` calls this."""
        captured = self._thread.current.attention
        captured.keys, captured.mask = key.shape[2], mask
        if self.reads_attention:
            captured.query, captured.key, captured.value = query, key, value
        captured.scale, captured.window = options.get("scaling"), options.get("sliding_window")

    def _capture_output(self, projection: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._thread.current.attention.output = output

    def _earlier_tokens(self, captured: CapturedAttention, length: int) -> _EarlierTokens:
        """Return the tokens before the current `length` tokens, with the router's rows of them."""
        if not self.sequence_aware or captured.kv_cache is None:
            return _EarlierTokens()
        if self.breaks_causality:
            return _EarlierTokens(past=0)  # `build_context` has refused earlier tokens
        cache_layer = self._cache_layer(captured.kv_cache)
        if self.static_rows and has_static_length(cache_layer):
            rows, positions = static_router_cache_of(cache_layer, length, self.router_number)
            return _EarlierTokens(rows, 0 if positions is None else None, positions)
        past = int(cache_layer.get_seq_length()) - length
        return _EarlierTokens(router_cache_of(cache_layer, past, self.router_number), past)

    def _cache_layer(self, kv_cache: Any) -> Any:
        return kv_cache.layers[self.layer_modules.attention.layer_idx]

    def _visible_tokens(self, captured: CapturedAttention, earlier: _EarlierTokens, tokens: Tensor) -> VisibleTokens | None:
        """Return which tokens the attention allows to see each other; None if the router does not read it."""
        if not self.reads_mask or captured.keys is None:
            return None
        keys, length = captured.keys, tokens.shape[1]
        keys = keys if earlier.past is None else min(keys, earlier.past + length)  # a static cache has unwritten rows
        mask = captured.mask if isinstance(captured.mask, Tensor) else None
        if mask is not None:
            mask = mask[..., :keys] if mask.dim() == 4 else None  # a 2-D mask is padding only
        # Attention kernels get the window as a number, not as a mask.
        window = captured.window if captured.window is not None and keys > captured.window else None
        if mask is None and (window is not None or earlier.positions is not None):
            mask = window_mask(length, keys, window, tokens.device, earlier.positions)
        return VisibleTokens(keys, mask)

    def _attention_context(self, captured: CapturedAttention, visible: VisibleTokens | None) -> Attention | None:
        query, key, value, output = captured.query, captured.key, captured.value, captured.output
        if visible is None or query is None or key is None or value is None or output is None:
            return None
        if key.shape[2] > visible.keys:
            key, value = key[:, :, : visible.keys], value[:, :, : visible.keys]
        projection = as_linear(self._projection) if self.reads_projection else None
        return Attention(query, key, value, projection, output, visible.mask, captured.scale)


def window_mask(
    queries: int, keys: int, window: int | None, device: torch.device, positions: Tensor | None = None
) -> Tensor:
    """Return (1,1,N,M) bool: True for keys less than `window` tokens before the query, and for later keys.

    `Context.causal` masks the later keys. With the `positions (N,)` of the queries in a static cache they are False here.
    """
    places = torch.arange(keys, device=device)
    distance = (places[-queries:] if positions is None else positions).unsqueeze(1) - places
    allowed = torch.ones_like(distance, dtype=torch.bool) if window is None else distance < window
    return (allowed if positions is None else allowed & (distance >= 0)).view(1, 1, queries, -1)


def token_mask_of(
    mask: object, sequences: int, length: int, past: int | None = None, positions: Tensor | None = None
) -> Tensor | None:
    """Return (B,N) bool, True where a token is real, from a model's attention mask; None if all tokens are real.

    mask        (B,M): the last N columns are the current tokens. (B,1,N,M): the diagonal is read, since a real token always
                attends to itself. A dict with a mask for each kind of attention: the first one is read
    past        number of tokens before the current ones. With a static cache, the mask also has columns after the current
                tokens
    positions   (N,), the columns of the current tokens, instead of `past`
    """
    if isinstance(mask, dict):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() not in (2, 4):
        raise ValueError(f"the attention mask has {mask.dim()} dimensions; expected (B, N) or (B, 1, N, M).")
    columns = mask.shape[-1]
    if positions is not None:
        shift = (positions[-1:] - columns + 1).clamp_min(0)
        current = (mask if mask.dim() == 2 else mask[:, 0]).index_select(-1, positions - shift)
    else:
        start = columns - length if past is None else min(past, columns - length)
        current = (mask if mask.dim() == 2 else mask[:, 0])[..., start : start + length]
    if mask.dim() == 2:
        return (current != 0).expand(sequences, length)
    current = current.diagonal(dim1=-2, dim2=-1) if current.shape[-2] == length else current[:, -1]
    return allowed_by(current).expand(sequences, length)


def allowed_by(mask: Tensor) -> Tensor:
    """Return a mask as bool, True where attention is allowed. Other masks are added to the attention's scores."""
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def separates_neighbours(mask: Tensor, real: Tensor) -> Tensor:
    """Return a bool: whether a mask `(B,1,N,N)` hides from a real token the real token before it, as in packed rows."""
    places = torch.arange(real.shape[1], device=real.device)
    # (B,N-1): the last real token before each token; token 0 where there is none.
    before = places.where(real, 0).cummax(1).values[:, :-1]
    seen = allowed_by(mask[:, 0]).expand(len(real), -1, -1)[:, 1:].gather(2, before.unsqueeze(-1)).squeeze(-1)
    return (real[:, 1:] & real.gather(1, before) & ~seen).any()


def require_separate_sequences(mask: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if a row has several sequences and no mask from which a router can separate them."""
    if options.get("cache") is not None:
        raise ValueError(
            "continuous batching (generate_batch) puts sequences into one row and their tokens into pages, where a "
            "sequence-aware router cannot separate the sequences; use generate."
        )
    if options.get("cu_seq_lens_q") is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        raise ValueError(
            "sequences are packed into one row without a mask between them, where a sequence-aware router cannot "
            'separate the sequences; set the model\'s attention to "sdpa" or "eager".'
        )
