"""What sequence-aware routers keep while decoding, on the layers of the model's own KV cache.

Rows live on the cache layer itself, so whatever `generate` does to the keys and values (beams, crops), it does to them.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdfast.routing import RouterCache


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
