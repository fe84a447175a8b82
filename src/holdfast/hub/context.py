"""Which tokens are real, from whatever a model was given as its attention mask.

What sequence-aware routers keep while decoding, on the layers of the model's own KV cache.

Rows live on the cache layer itself, so whatever `generate` does to the keys and values (beams, crops), it does to them.

What happens around an MoE layer, gathered into the `Context` of its router.

A family's gate sees (T,d) only. Shape, padding, the attention before it, its place in the KV cache and the previous MoE
layer come from the modules around it, by hooks. They run again when a checkpointed layer is recomputed, so a router then
sees what it saw at first. One thing does not come by again: what the previous MoE layer did, which is therefore kept until
the next forward that has a backward. Two checkpointed forwards before one backward are refused for routers that read it
(`ac`), and for those with state.
"""

import copy
import weakref
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.families import detached
from holdfast.hub.losses import Ledger
from holdfast.hub.replacements import ATTENTION, PerThread, as_linear, point, unpoint
from holdfast.kernels.backward import recomputing
from holdfast.routing import Attention, Context, Previous, Router, RouterCache, Routing
from holdfast.routing.state import StatefulPart


def token_mask_of(mask: object, sequences: int, length: int, past: int | None = None) -> Tensor | None:
    """(B,N) bool, True where a token is real; None if all are.

    A 2-D mask may be longer than the tokens at hand: the earlier ones are in the cache. Of a 4-D mask the diagonal tells: a
    real token may always look at itself. `past` is how many tokens came before; what a static cache has not written yet
    comes after those at hand. A dict holds a mask for each kind of attention.
    """
    if isinstance(mask, dict):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    columns = mask.shape[-1]
    start = columns - length if past is None else min(past, columns - length)
    if mask.dim() == 2:
        return (mask[:, start : start + length] != 0).expand(sequences, length)
    if mask.dim() == 4:
        own = mask[:, 0, :, start : start + length]
        own = own.diagonal(dim1=-2, dim2=-1) if own.shape[-2] == length else own[:, -1]
        allowed = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
        return allowed.expand(sequences, length)
    raise ValueError(f"the attention mask has {mask.dim()} dimensions; expected (B, N) or (B, 1, N, M).")


@cache
def _with_rows(kind: Any) -> type:
    """A subclass of a cache layer's class in which whatever happens to the keys and values happens to the rows too."""

    class WithRows(kind):  # type: ignore[misc]
        _layer_type = None  # or transformers would use it for every cache to come

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self.router_rows.reorder(beam_idx)

        def crop(self, *arguments: Any, **options: Any) -> None:
            super().crop(*arguments, **options)
            # What the argument means differs between versions; how many tokens are left does not.
            self.router_rows.crop(int(self.get_seq_length()))

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self.router_rows.repeat(repeats)

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self.router_rows.reorder(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

        def reset(self) -> None:
            super().reset()
            self.router_rows.reset()

    WithRows.__name__, WithRows.__module__ = kind.__name__, kind.__module__
    return WithRows


def rows_of(layer: Any, past: int, reader: int) -> RouterCache:
    """The rows of router number `reader` on a layer of a KV cache, made on first use; `past` tokens must have left some."""
    if "router_rows" not in layer.__dict__:
        kind: Any = type(layer)
        layer.__class__ = _with_rows(kind)
        layer.router_rows = RouterCache()
    if past == 0:
        layer.rows_reader = reader
    rows: RouterCache = layer.router_rows
    seen = rows.tokens if layer.__dict__.get("rows_reader") == reader else 0  # another router's rows are not these
    if seen != past:
        raise ValueError(
            f"the KV cache holds {past} tokens, but this router has seen {seen} of them: a sequence-aware "
            "router needs a cache that was filled by this model from the start."
        )
    return rows


_numbers = count(1)
LOOKS_AHEAD = "this router lets a token's route depend on tokens after it, in a model that predicts them"


@dataclass(frozen=True)
class Neighbours:
    """The modules around an MoE layer."""

    block: nn.Module  # takes (B,N,d)
    attention: Any  # just before; calls the attention function
    layer: nn.Module  # around them all
    projection_path: str  # of the attention's output, in the layer
    windowed: bool = False  # it attends within windows: its queries and masks are no sequence's
    recurrent: bool = False  # it is no attention but mixes tokens one after the other, with a state instead of a KV cache

    @property
    def projection(self) -> nn.Module:
        """Looked up when used: an adapter may have wrapped it since, or been merged into it."""
        return self.layer.get_submodule(self.projection_path)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return self.recurrent or bool(getattr(self.attention, "is_causal", False))


@dataclass
class _Heard:
    """What attention was called with, until the router has read it."""

    mask: Any = None
    past: Any = None
    continues: bool = False  # a recurrent layer had a state of earlier tokens
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    scale: float | None = None
    window: int | None = None  # how far back a token looks, itself included
    output: Tensor | None = None


@dataclass
class _Notes:
    """What the forward under way has come by so far."""

    shape: torch.Size | None = None  # (B,N)
    heard: _Heard = field(default_factory=_Heard)
    record: Previous | None = None


class _Waiting:
    """A forward whose backward has yet to come."""

    done = False

    def finish(self, gradient: Tensor) -> None:
        self.done = True


class _UnderWay(PerThread):
    def __init__(self) -> None:  # by every thread
        self.notes = _Notes()
        self.waiting: weakref.ref[_Waiting] | None = None  # the last forward of a checkpointed layer


class Surroundings:
    """The hooks around one MoE layer and what they saw in the forward under way."""

    def __init__(
        self, router: Router | None, neighbours: Neighbours, ledger: Ledger, before: "Surroundings | None", k: int
    ) -> None:
        self.router, self.neighbours, self.ledger, self.before, self.k = router, neighbours, ledger, before, k
        reads = router.reads if router is not None else set()
        self.sequence_aware = router is not None and router.traits.sequence_aware
        self.listens = "attention" in reads and not neighbours.windowed
        self.reads_projection = "attention.projection" in reads
        self.reads_previous, self.is_read = "previous" in reads, False
        self.reads_ids = "token_ids" in reads
        self.looks_ahead = (
            neighbours.causal and router is not None and not (router.traits.causal and router.traits.cacheable)
        )
        self.number = next(_numbers)  # whose rows a KV cache holds; any change to the model makes its caches stale
        self._under_way = _UnderWay()
        self._latest: Previous | None = None  # of any thread: a GPU's backward has one of its own
        parts = router.parts if router is not None else []
        self._remembers = self.reads_previous or any(isinstance(part, StatefulPart) for part in parts)
        if self.reads_previous and before is not None:
            before.is_read = True
            ledger.when_done.append(before.forget)
        self._handles = [neighbours.block.register_forward_pre_hook(self._note_shape)]
        self._handles.append(neighbours.attention.register_forward_pre_hook(self._note_arguments, with_kwargs=True))
        if self.listens:
            self._projection = neighbours.projection
            self._projection_hook = self._projection.register_forward_hook(self._note_output)
            neighbours.attention.listener = self
            point(neighbours.attention, ATTENTION)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Surroundings":
        """Copy these with their layer; a copy of a module inside it (PEFT's `modules_to_save`) shares them."""
        if id(self.ledger) not in memo and id(self.neighbours.layer) not in memo:
            return self
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def follow(self, router: Router) -> None:
        """Treat `router` as the layer's: PEFT runs a copy of one that is among its `modules_to_save`."""
        if self.router is not router:
            self.router = router
        if router.learning != self.ledger.learning:
            router.learning = self.ledger.learning

    def forget(self) -> None:
        """What the layer did is not needed any more."""
        self._under_way.notes.record = self._latest = None

    @property
    def record(self) -> Previous | None:
        """What the layer did in the forward under way, or in the one that a backward recomputes."""
        if not torch.compiler.is_compiling() and recomputing():
            return self._latest
        return self._under_way.notes.record

    @property
    def learning(self) -> bool:
        """Is the router in training? The model around it need not be."""
        return (self.neighbours.block if self.router is None else self.router).training

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        if self.listens:
            self._projection_hook.remove()
            unpoint(self.neighbours.attention)
            del self.neighbours.attention.listener

    def hear(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]) -> None:
        """Called by the attention function, with what it was given."""
        heard = self._under_way.notes.heard
        heard.query, heard.key, heard.value, heard.mask = query, key, value, mask
        heard.scale, heard.window = options.get("scaling"), options.get("sliding_window")

    def tokens(self, hidden: Tensor) -> Tensor:
        """The router's input (B,N,d), from what the gate was given."""
        shape = self._under_way.notes.shape
        return hidden if shape is None else hidden.reshape(*shape, hidden.shape[-1])

    def context(self, tokens: Tensor) -> Context:
        """What the router may look at; clears what was heard, so that nothing outlives the forward."""
        if self._will_be_recomputed:
            self._require_one_forward()
        heard, self._under_way.notes.heard = self._under_way.notes.heard, _Heard()
        previous = self.before.record if self.reads_previous and self.before is not None else None
        ids = self.ledger.token_ids if self.reads_ids else None
        if self.looks_ahead and (heard.continues or self._past(heard, tokens.shape[1])):
            raise ValueError(f"{LOOKS_AHEAD}; it cannot take tokens one after the other from a KV cache.")
        if self.neighbours.windowed or not (self.learning or self.sequence_aware or self.ledger.asked):
            return Context(previous=previous, token_ids=ids)
        if heard.mask is not None and not isinstance(heard.mask, Tensor):
            raise ValueError(
                f"attention hands a {type(heard.mask).__name__} on as its mask, which a router cannot read padding from; "
                'set the model\'s attention to "sdpa" or "eager".'
            )
        length = tokens.shape[1]
        cache, past = self._cache(heard, length)
        token_mask = token_mask_of(heard.mask, tokens.shape[0], length, past)
        attention = self._attention(heard, past, length)
        return Context(self.neighbours.causal, token_mask, attention, previous, cache, ids)

    def leave(
        self, tokens: Tensor, routing: Routing, context: Context, losses: Any, weights: Tensor | None = None
    ) -> Tensor:
        """Hand on what the router did: its losses to the model, its choice to the next MoE layer.

        Return the weights for the experts: `weights`, or else the routing's own, with the layer's loss on them.
        """
        if self.is_read:
            self._under_way.notes.record = Previous(tokens.detach(), detached(routing))
            if self.ledger.has_backward:
                self._latest = self._under_way.notes.record
        given = routing.weights if weights is None else weights
        given = self.ledger.collect(routing, given, losses, context.token_mask, self.k)
        if self._will_be_recomputed and given.requires_grad:
            waiting = _Waiting()
            self._under_way.waiting = weakref.ref(waiting)  # it lives as long as the graph that its hook is in
            given.register_hook(waiting.finish)
        return given

    @property
    def _will_be_recomputed(self) -> bool:
        """Will a backward run this layer again, with a router that remembers something?"""
        return (
            self._remembers
            and self.learning
            and self.ledger.has_backward
            and not torch.compiler.is_compiling()
            and bool(getattr(self.neighbours.layer, "gradient_checkpointing", False))
            and not recomputing()
        )

    def _require_one_forward(self) -> None:
        """Refuse a second forward before the backward of the first.

        The recomputation would see what the router has learned since, or what the layer before did in the second forward.
        """
        last = self._under_way.waiting
        waiting = None if last is None else last()
        if waiting is not None and not waiting.done:
            raise ValueError(
                "gradient checkpointing with this router takes one forward for each backward, and this is a second one: "
                "switch gradient checkpointing off, put the batches into one forward, or choose a router without state."
            )

    def _note_shape(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._under_way.notes.shape = inputs[0].shape[:-1] if inputs[0].dim() == 3 else None

    def _note_arguments(self, attention: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self.sequence_aware or self.learning or self.looks_ahead or self.ledger.asked:
            if self.sequence_aware and options.get("cache") is not None:
                raise ValueError(
                    "continuous batching (generate_batch) mixes sequences and keeps their tokens in pages, where a "
                    "sequence-aware router cannot tell them apart; use generate."
                )
            mask = options.get("attention_mask", inputs[1] if len(inputs) > 1 else None)
            packed = options.get("cu_seq_lens_q") is not None
            if self.sequence_aware and packed and not (isinstance(mask, Tensor) and mask.dim() == 4):
                raise ValueError(
                    "sequences are packed into one row without a mask between them, where a sequence-aware router cannot "
                    'tell them apart; set the model\'s attention to "sdpa" or "eager".'
                )
            past = options.get("past_key_values")
            self._under_way.notes.heard = _Heard(mask=mask, past=getattr(past, "self_attention_cache", past))
            if self.neighbours.recurrent:
                self._under_way.notes.heard.continues = _has_state(attention, options.get("cache_params"))
        if self.listens and self._projection is not self.neighbours.projection:
            self._projection_hook.remove()
            self._projection = self.neighbours.projection
            self._projection_hook = self._projection.register_forward_hook(self._note_output)

    def _note_output(self, projection: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._under_way.notes.heard.output = output

    def _cache(self, heard: _Heard, length: int) -> tuple[RouterCache | None, int | None]:
        """The router's rows, and how many tokens came before those at hand; the KV cache has these already."""
        if not self.sequence_aware or heard.past is None:
            return None, None
        past = self._past(heard, length)
        return rows_of(heard.past.layers[self.neighbours.attention.layer_idx], past, self.number), past

    def _past(self, heard: _Heard, length: int) -> int:
        """How many tokens the KV cache had before those at hand."""
        if heard.past is None:
            return 0
        return int(heard.past.layers[self.neighbours.attention.layer_idx].get_seq_length()) - length

    def _attention(self, heard: _Heard, past: int | None, length: int) -> Attention | None:
        if not self.listens or heard.query is None or heard.key is None or heard.value is None or heard.output is None:
            return None
        key, value, mask = heard.key, heard.value, heard.mask if isinstance(heard.mask, Tensor) else None
        if past is not None and key.shape[2] > past + length:  # a static cache: what is not written yet is no token
            key, value = key[:, :, : past + length], value[:, :, : past + length]
        if mask is not None:
            mask = mask[..., : key.shape[2]] if mask.dim() == 4 else None  # a 2-D mask is padding only
        if mask is None and heard.window is not None and key.shape[2] > heard.window:
            mask = _looking_back(length, key, heard.window)  # a kernel that is told of its window has no mask for it
        projection = as_linear(self.neighbours.projection) if self.reads_projection else None
        return Attention(heard.query, key, value, projection, heard.output, mask, heard.scale)


def _has_state(mixer: Any, cache: Any) -> bool:
    """Whether a recurrent layer has a state of earlier tokens; transformers 5.22 keeps one flag for each of its states."""
    if cache is None:
        return False
    flags = cache.layers[mixer.layer_idx].has_previous_state
    return any(flags.values()) if isinstance(flags, dict) else bool(flags)


def _looking_back(queries: int, key: Tensor, window: int) -> Tensor:
    """(1,1,N,M) bool: the last `window` tokens up to each query; those after it are left to `causal`."""
    places = torch.arange(key.shape[2], device=key.device)
    return (places[-queries:].unsqueeze(1) - places < window).view(1, 1, queries, -1)
