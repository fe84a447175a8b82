"""What earlier tokens stored for a sequence-aware router while decoding, one row for each token.

`RouterCache` holds the rows of one layer. In a Hugging Face model they are kept on the layer's own KV cache
(`router_cache_of`): when `generate` reorders, crops or repeats keys and values, a subclass of the cache layer's class does
the same to the rows.

The rows of a static KV cache (`StaticRouterCache`) are tensors of the cache's full length, allocated once and written at the
positions of the current tokens. These positions are a tensor: nothing is read from the device, and a compiled forward has
the same shapes at every token. A mask excludes the rows that are not written yet.
"""

import secrets
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.torch_internals import keep_address


class RouterCache:
    """The rows that earlier tokens stored in one layer while decoding, by name, each `(B, past, ...)`.

    There is one row for each token, as in the model's KV cache, and not a running sum: sums cannot be cropped.
    """

    in_order = True  # whether the rows of the current tokens are the last rows

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def extend(self, name: str, rows: Tensor) -> Tensor:
        """Append the `rows (B, n, ...)` of new tokens under `name`; return the rows of all tokens so far."""
        past = self._rows.get(name)
        self._rows[name] = rows if past is None else torch.cat([past, rows], dim=1)
        return self._rows[name]

    def current(self, rows: Tensor, count: int) -> Tensor:
        """Return the rows of the `count` current tokens, of `rows (B, M, ...)` of all tokens."""
        return rows[:, rows.shape[1] - count :]

    @property
    def tokens(self) -> int:
        """The number of tokens with rows."""
        return max((rows.shape[1] for rows in self._rows.values()), default=0)

    @property
    def bytes(self) -> int:
        """The memory of all rows, in bytes."""
        return sum(rows.numel() * rows.element_size() for rows in self._rows.values())

    def reorder(self, sequences: Tensor) -> None:
        """Replace sequence i by sequence `sequences[i]`, for beam search. This can also select a part of the batch."""
        self._map(lambda rows: rows.index_select(0, sequences.to(rows.device)))

    def repeat(self, times: int) -> None:
        """Repeat each sequence `times` times, in adjacent rows of the batch."""
        self._map(lambda rows: rows.repeat_interleave(times, dim=0))

    def crop(self, length: int) -> None:
        """Remove the rows of all tokens after the first `length`."""
        self._map(lambda rows: rows[:, :length])

    def reset(self) -> None:
        self._rows.clear()

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._rows = {name: change(rows) for name, rows in self._rows.items()}


class StaticRouterCache:
    """The rows of one layer of a static KV cache, by name, each `(B, length, ...)`: row i belongs to position i.

    `RowsAtPositions` is the `RouterCache` of one forward.
    """

    def __init__(self, length: int) -> None:
        self.length, self.is_empty = length, True
        self._rows: dict[str, Tensor] = {}

    def write(self, name: str, rows: Tensor, positions: Tensor | None) -> Tensor:
        """Write the `rows (B, n, ...)` of the current tokens; return the rows of all tokens.

        The first tokens are all tokens so far, so their `rows` are returned. Later, all `length` rows are returned, also
        those that are not written yet.
        """
        if positions is None:
            shape, stored = (rows.shape[0], self.length, *rows.shape[2:]), self._rows.get(name)
            if stored is None or stored.shape != shape or stored.dtype != rows.dtype or stored.device != rows.device:
                stored = self._rows[name] = rows.new_zeros(shape)
                if not torch.compiler.is_compiling():  # as transformers does for keys and values, for CUDA graphs
                    keep_address(stored)
            stored[:, : rows.shape[1]] = rows
            return rows
        return self._rows[name].index_copy_(1, positions, rows)

    def reorder(self, sequences: Tensor) -> None:
        """Replace sequence i by sequence `sequences[i]`, for beam search. This can also select a part of the batch."""
        for name, rows in self._rows.items():
            selected = rows.index_select(0, sequences.to(rows.device))
            self._rows[name] = rows.copy_(selected) if selected.shape == rows.shape else selected

    def repeat(self, times: int) -> None:
        """Repeat each sequence `times` times, in adjacent rows of the batch."""
        self._rows = {name: rows.repeat_interleave(times, dim=0) for name, rows in self._rows.items()}

    def crop(self, length: int) -> None:
        """Forget the rows of all tokens after the first `length`. Only masks exclude them, until they are written again."""
        if length == 0:
            self.reset()

    def reset(self) -> None:
        """Forget all rows. The tensors stay where they are, for a CUDA graph that writes them."""
        self.is_empty = True
        for rows in self._rows.values():
            rows.zero_()

    def clear(self) -> None:
        """Delete all rows, which belong to another router."""
        self._rows = {}


class RowsAtPositions(RouterCache):
    """The rows of a static cache in a forward of the tokens at `positions (n,)`; None: the first tokens."""

    def __init__(self, store: StaticRouterCache, positions: Tensor | None) -> None:
        super().__init__()
        self._store, self._positions = store, positions
        self.in_order = positions is None

    def extend(self, name: str, rows: Tensor) -> Tensor:
        return self._store.write(name, rows, self._positions)

    def current(self, rows: Tensor, count: int) -> Tensor:
        return super().current(rows, count) if self._positions is None else rows.index_select(1, self._positions)


# Numbers for routers in models: a KV cache stores them with the rows that a router has written. They start anywhere: a
# pickled KV cache must not be taken for one of another process's routers.
ROUTER_NUMBERS = count(secrets.randbits(40) << 20)


def router_cache_of(cache_layer: Any, past: int, router_number: int) -> RouterCache:
    """Return the router's rows that are stored on a layer of a KV cache; create the store on first use.

    Raise ValueError if this router has not written rows for all `past` tokens in the cache.
    """
    if not isinstance(cache_layer.__dict__.get("router_rows"), RouterCache):
        kind: Any = type(cache_layer)
        cache_layer.__class__ = _with_router_rows(kind)
        cache_layer.router_rows, cache_layer.rows_owner = RouterCache(), None
    if past == 0:
        cache_layer.rows_owner = router_number
    rows: RouterCache = cache_layer.router_rows
    # Rows that another router has written do not count.
    known = rows.tokens if cache_layer.__dict__.get("rows_owner") == router_number else 0
    if known != past:
        raise _unknown_tokens(past, known)
    return rows


def has_static_length(cache_layer: Any) -> bool:
    """Whether a layer of a KV cache stores the token at position i in row i of tensors of a fixed length."""
    length = getattr(cache_layer, "cumulative_length", None)
    return isinstance(length, Tensor) and not getattr(cache_layer, "is_sliding", False)


def prepare_static_rows(cache_layer: Any) -> None:
    """Make a layer of a static KV cache store router rows, before attention adds the first tokens to it."""
    if isinstance(cache_layer.__dict__.get("router_rows"), StaticRouterCache):
        return
    # This is 0, without reading from the device, unless tokens or memory were given to the cache elsewhere.
    cache_layer.tokens_without_rows = int(cache_layer.get_seq_length())
    kind: Any = type(cache_layer)
    cache_layer.__class__ = _with_static_rows(kind)
    cache_layer.router_rows, cache_layer.rows_owner = StaticRouterCache(cache_layer.max_cache_len), None


def static_router_cache_of(cache_layer: Any, length: int, router_number: int) -> tuple[RouterCache, Tensor | None]:
    """Return the rows on a layer of a static KV cache, and the positions (length,) of the current tokens.

    The positions are None for the first tokens in the cache. Raise ValueError if this router has not written rows for all
    earlier tokens. This compares numbers of tokens that `update` has counted, and reads nothing from the device.
    """
    rows: StaticRouterCache = cache_layer.router_rows
    is_own = rows.is_empty or cache_layer.rows_owner == router_number
    if not is_own or cache_layer.tokens_without_rows != length:
        tokens = int(cache_layer.get_seq_length())
        raise _unknown_tokens(tokens - length, tokens - cache_layer.tokens_without_rows if is_own else 0)
    cache_layer.tokens_without_rows = 0
    if not rows.is_empty:
        positions = torch.arange(length, device=cache_layer.cumulative_length.device) - length
        positions = positions + cache_layer.cumulative_length
        return RowsAtPositions(rows, positions), positions
    if cache_layer.rows_owner != router_number:
        rows.clear()
    cache_layer.rows_owner, rows.is_empty = router_number, False
    return RowsAtPositions(rows, None), None


def _unknown_tokens(past: int, known: int) -> ValueError:
    return ValueError(
        f"the KV cache has {past} tokens, but this router has rows for {known} of them: a sequence-aware "
        "router needs a KV cache that this model has filled from the first token on."
    )


@cache
def _with_router_rows(kind: Any) -> type:
    """Return a subclass of a cache layer's class that applies each operation on keys and values to router rows too."""
    if getattr(kind, "has_router_rows", False):
        return kind  # type: ignore[no-any-return]

    class WithRouterRows(kind):  # type: ignore[misc]
        _layer_type = None  # otherwise transformers registers this class for all later caches
        has_router_rows, has_static_rows = True, False
        extended = kind

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            # For pickles: this class has the name of the class that it extends, so it is not found by its name.
            _, _, *state = super().__reduce_ex__(max(protocol, 2))
            return _new_cache_layer, (self.extended, self.has_static_rows), *state

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self.router_rows.reorder(beam_idx)

        def crop(self, *arguments: Any, **options: Any) -> None:
            super().crop(*arguments, **options)
            # The meaning of the argument differs between versions; the number of tokens that are left does not.
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

    WithRouterRows.__name__, WithRouterRows.__module__ = kind.__name__, kind.__module__
    return WithRouterRows


@cache
def _with_static_rows(kind: Any) -> type:
    """Return a subclass of a static cache layer's class that also counts the tokens for which there are no rows yet."""
    if getattr(kind, "has_static_rows", False):
        return kind  # type: ignore[no-any-return]
    base: Any = _with_router_rows(kind)

    class WithStaticRows(base):  # type: ignore[misc]
        _layer_type = None
        has_static_rows = True

        def update(self, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any) -> Any:
            self.tokens_without_rows += key_states.shape[-2]
            return super().update(key_states, value_states, *arguments, **options)

        def reset(self) -> None:
            super().reset()
            self.tokens_without_rows = 0

    WithStaticRows.__name__, WithStaticRows.__module__ = kind.__name__, kind.__module__
    return WithStaticRows


def _new_cache_layer(kind: Any, has_static_rows: bool) -> Any:
    """Return an object for the state of a copied or pickled cache layer with router rows."""
    made: Any = _with_static_rows(kind) if has_static_rows else _with_router_rows(kind)
    return made.__new__(made)


def has_recurrent_state(mixer: Any, cache: Any) -> bool:
    """Whether a recurrent layer has a state of earlier tokens. In transformers 5.22 each of its states has a flag."""
    if cache is None:
        return False
    flags = cache.layers[mixer.layer_idx].has_previous_state
    return any(flags.values()) if isinstance(flags, dict) else bool(flags)
