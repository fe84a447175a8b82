"""What earlier tokens stored for a sequence-aware router while decoding, one row for each token.

`RouterCache` holds the rows of one layer. In a Hugging Face model they are kept on the layer's own KV cache
(`router_cache_of`): when `generate` reorders, crops or repeats keys and values, a subclass of the cache layer's class does
the same to the rows.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class RouterCache:
    """The rows that earlier tokens stored in one layer while decoding, by name, each `(B, past, ...)`.

    There is one row for each token, as in the model's KV cache, and not a running sum: sums cannot be cropped.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def extend(self, name: str, rows: Tensor) -> Tensor:
        """Append the `rows (B, n, ...)` of new tokens under `name`; return the rows of all tokens so far."""
        past = self._rows.get(name)
        self._rows[name] = rows if past is None else torch.cat([past, rows], dim=1)
        return self._rows[name]

    def length(self, name: str) -> int:
        """Return the number of tokens with a row under `name`."""
        return self._rows[name].shape[1] if name in self._rows else 0

    @property
    def tokens(self) -> int:
        """The number of tokens with rows."""
        lengths = [rows.shape[1] for rows in self._rows.values()]
        return max(lengths) if lengths else 0

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


def router_cache_of(cache_layer: Any, past: int, router_number: int) -> RouterCache:
    """Return the router's rows that are stored on a layer of a KV cache; create the store on first use.

    Raise ValueError if this router has not written rows for all `past` tokens in the cache.
    """
    if "router_rows" not in cache_layer.__dict__:
        kind: Any = type(cache_layer)
        cache_layer.__class__ = _with_router_rows(kind)
        cache_layer.router_rows = RouterCache()
    if past == 0:
        cache_layer.rows_owner = router_number
    rows: RouterCache = cache_layer.router_rows
    # Rows that another router has written do not count.
    known = rows.tokens if cache_layer.__dict__.get("rows_owner") == router_number else 0
    if known != past:
        raise ValueError(
            f"the KV cache has {past} tokens, but this router has rows for {known} of them: a sequence-aware "
            "router needs a KV cache that this model has filled from the first token on."
        )
    return rows


@cache
def _with_router_rows(kind: Any) -> type:
    """Return a subclass of a cache layer's class that applies each operation on keys and values to router rows too."""

    class WithRouterRows(kind):  # type: ignore[misc]
        _layer_type = None  # otherwise transformers registers this class for all later caches

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
