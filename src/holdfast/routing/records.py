"""What earlier tokens left behind while decoding: rows, one a token, that travel with the model's own KV cache.

What happened (`Routing`) and what a router may look at beyond its token (`Context`).

B sequences of N tokens, T = B*N tokens in all, width d, E experts, K slots a token
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


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


LARGEST_IN_PADDING = 2.0**50  # products of two such numbers stay far within float32


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to, and what was read to decide it. Losses, metrics and certificates read this."""

    logits: Tensor  # (T,E) float32, as scored
    gates: Tensor  # (T,E) float32, what selection read; non-negative, need not sum to 1
    experts: Tensor  # (T,K) int64, sorted by weight, descending; the sentinel E marks an unused slot
    weights: Tensor  # (T,K) float32, 0 in unused slots
    losses: Mapping[str, Tensor] = field(default_factory=dict)  # as they enter the training loss; empty in evaluation

    @property
    def used(self) -> Tensor:
        """(T,K) bool: which slots hold an expert."""
        return self.experts < self.gates.shape[-1]

    @property
    def chosen(self) -> Tensor:
        """(T,E) bool: the selected set of each token, without order."""
        experts = self.gates.shape[-1]
        member = torch.zeros(self.experts.shape[0], experts + 1, dtype=torch.bool, device=self.experts.device)
        return member.scatter(1, self.experts, True)[:, :experts]

    @property
    def dense_weights(self) -> Tensor:
        """(T,E): each token's weight for each expert, 0 where it was not chosen."""
        tokens, experts = self.gates.shape
        dense = self.weights.new_zeros(tokens, experts + 1)
        return dense.scatter_add(1, self.experts, self.weights)[:, :experts]

    @property
    def loss(self) -> Tensor:
        """The sum of `losses`: what the caller adds to the training loss."""
        return torch.stack([*self.losses.values(), self.gates.new_zeros(())]).sum()


# So that `torch.export` takes a layer that returns one.
pytree.register_dataclass(Routing, serialized_type_name="holdfast.Routing")


@dataclass(frozen=True)
class Projection:
    """Weights of a linear map that is no `nn.Linear`, in the shape of one."""

    weight: Tensor  # (d, in)
    bias: Tensor | None = None


@dataclass(frozen=True)
class Attention:
    """The attention just before this layer."""

    query: Tensor  # (B,heads,N,D), of the tokens at hand
    key: Tensor  # (B,key heads,M,D), of all tokens so far: M is N unless decoding
    value: Tensor  # (B,key heads,M,D_v)
    projection: nn.Linear | Projection | None  # the output projection; None unless a part reads "attention.projection"
    output: Tensor  # (B,N,d), after the projection, before the residual
    mask: Tensor | None = None  # broadcasts to (B,heads,N,M): bool, True where allowed, or added to the scores
    scale: float | None = None  # what q.k is multiplied with; 1/sqrt(D) if None


@dataclass(frozen=True)
class Previous:
    """The previous MoE layer's router inputs and what it did with them."""

    tokens: Tensor  # (B,N,d)
    routing: Routing


@dataclass(frozen=True)
class Context:
    """What a router may look at beyond its token; passed, never global."""

    causal: bool = False
    token_mask: Tensor | None = None  # (B,N) bool, True where the token is real
    attention: Attention | None = None
    previous: Previous | None = None
    cache: RouterCache | None = None  # what earlier tokens left behind while decoding
    token_ids: Tensor | None = None  # (B,N), for hash and distilled routers

    def real_or_all(self, tokens: Tensor) -> Tensor:
        """(B,N) bool: which tokens are real."""
        real = self.real(tokens)
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if real is None else real

    def usable(self, rows: Tensor) -> Tensor | None:
        """(B,N) bool: which of `rows (B,N,...)` can be computed with, all but padding that holds NaN or huge numbers.

        None where there is no padding. A real token's NaN is not hidden: it is an error that the user must see.
        """
        if self.token_mask is None:
            return None
        return self.token_mask | (rows.detach().flatten(2).abs().amax(-1) <= LARGEST_IN_PADDING)

    def clean(self, rows: Tensor) -> Tensor:
        """`rows (B,N,...)` with 0 where they are not usable: 0 times NaN is NaN, also in the gradient of a weight.

        Other padding stays: a model may read it (SigLIP takes the last token of a text, padding or not).
        """
        usable = self.usable(rows)
        return rows if usable is None else rows.where(usable.view(*usable.shape, *[1] * (rows.dim() - 2)), 0.0)

    def real(self, tokens: Tensor) -> Tensor | None:
        """Return `token_mask`, checked against `tokens (B,N,d)`: its type, its shape, and that it holds a real token.

        The last is checked on a CPU only, and not while compiling: a GPU would have to be waited for.
        """
        if self.token_mask is None:
            return None
        if self.token_mask.dtype != torch.bool or self.token_mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"token_mask is {self.token_mask.dtype} of shape {tuple(self.token_mask.shape)}; expected bool of shape "
                f"{tuple(tokens.shape[:2])}, True where the token is real (for an attention mask of 0 and 1: mask.bool())."
            )
        at_once = self.token_mask.device.type == "cpu" and not torch.compiler.is_compiling()
        if at_once and self.token_mask.numel() and not self.token_mask.any():
            raise ValueError(
                f"token_mask marks all {self.token_mask.numel()} tokens of the batch as padding; it must be True where a "
                "token is real (a mask that is True for padding: ~mask)."
            )
        return self.token_mask
