"""What earlier tokens left behind while decoding: rows, one a token, that travel with the model's own KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor


class RouterCache:
    """One layer's per-token rows by name, each `(B, past, ...)`. Rows, not running sums: those cannot be cropped."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def extend(self, name: str, rows: Tensor) -> Tensor:
        """Add the new tokens' `rows (B, n, ...)` under `name`; returns the rows of all tokens so far."""
        past = self._rows.get(name)
        self._rows[name] = rows if past is None else torch.cat([past, rows], dim=1)
        return self._rows[name]

    def length(self, name: str) -> int:
        """How many tokens have left a row under `name`."""
        return self._rows[name].shape[1] if name in self._rows else 0

    @property
    def tokens(self) -> int:
        """How many tokens have left rows here."""
        lengths = [rows.shape[1] for rows in self._rows.values()]
        return max(lengths) if lengths else 0

    @property
    def bytes(self) -> int:
        """How much memory the rows take."""
        return sum(rows.numel() * rows.element_size() for rows in self._rows.values())

    def reorder(self, sequences: Tensor) -> None:
        """Beam search: sequence i continues what sequence `sequences[i]` was. Also selects a part of the batch."""
        self._map(lambda rows: rows.index_select(0, sequences.to(rows.device)))

    def repeat(self, times: int) -> None:
        """Each sequence becomes `times` sequences, next to each other."""
        self._map(lambda rows: rows.repeat_interleave(times, dim=0))

    def crop(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        self._map(lambda rows: rows[:, :length])

    def reset(self) -> None:
        self._rows.clear()

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._rows = {name: change(rows) for name, rows in self._rows.items()}
