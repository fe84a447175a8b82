"""The input and output records of a router: `Context` is what it may read besides its tokens, `Routing` what it returns.

B sequences of N tokens, T = B*N tokens in all, width d, E experts, K slots per token
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.kernels.torch_internals import register_dataclass
from holdfast.routing.cache import RouterCache
from holdfast.stored import late

TABLE = "holdfast.report.routing_table:routing_table"  # what `print` shows
LARGEST_IN_PADDING = 2.0**50  # the product of two such numbers is far below the largest float32


@dataclass(frozen=True)
class Routing:
    """The experts of each token, their weights, and the scores they were selected by.

    Losses, metrics and certificates read this.
    """

    logits: Tensor  # (T,E) float32, the scores before the gate function
    gates: Tensor  # (T,E) float32, what the selector read; non-negative, need not sum to 1
    experts: Tensor  # (T,K) int64, sorted by weight, descending, or as recorded if replayed; E marks an unused slot
    weights: Tensor  # (T,K) float32, 0 in unused slots
    losses: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # weighted, ready to be added to the training loss; empty in evaluation
    requested: Tensor | None = None  # (T,K) int64, the experts before a capacity limit; None: `experts`
    dropped: Tensor | None = None  # (T,) int64, how many experts a token lost to a limit; None: there is no limit
    # (T,G) bool, in training the groups of tokens whose load is balanced separately; a token may be in none. None: one group
    balance_groups: Tensor | None = None
    rows: Tensor | None = None  # (T,) float32, rows that experts compute for a token; None: one for each of its experts
    # Of a layer whose experts run on slots (SoftMoE), p slots for each expert; None in any other layer:
    dispatch: Tensor | None = None  # (T,E,p) float32, the share of a token in a slot; of a sequence's tokens they sum to 1
    shares: Tensor | None = None  # (T,E,p) float32, how an expert's weight is divided among its slots

    def __str__(self) -> str:
        return str(late(TABLE)(self))

    def _repr_html_(self) -> str:
        shown: str = late(TABLE)(self)._repr_html_()
        return shown

    @property
    def used(self) -> Tensor:
        """(T,K) bool: which slots have an expert."""
        return self.experts < self.gates.shape[-1]

    @property
    def chosen(self) -> Tensor:
        """(T,E) bool: the selected set of each token, without order."""
        return self._sets(self.experts)

    def sets_of_slots(self, k: int | None) -> Tensor:
        """Return (T,E) bool: the selected set of each token; with `k`, the experts of its first k slots."""
        return self._sets(self.experts if k is None else self.experts[:, :k])

    @property
    def requested_sets(self) -> Tensor:
        """(T,E) bool: the set of each token before a capacity limit."""
        return self._sets(self.experts if self.requested is None else self.requested)

    def _sets(self, slots: Tensor) -> Tensor:
        experts = self.gates.shape[-1]
        member = torch.zeros(slots.shape[0], experts + 1, dtype=torch.bool, device=slots.device)
        return member.scatter(1, slots, True)[:, :experts]

    @property
    def dense_weights(self) -> Tensor:
        """(T,E): the weight of each expert for each token, 0 if it was not selected."""
        tokens, experts = self.gates.shape
        dense = self.weights.new_zeros(tokens, experts + 1)
        return dense.scatter_add(1, self.experts, self.weights)[:, :experts]

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> "Routing":
        """Return this record without losses, after `change` of every field with one row for each token."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "losses"}
        changed: dict[str, Any] = {name: None if value is None else change(value) for name, value in values.items()}
        return Routing(**changed)

    @property
    def loss(self) -> Tensor:
        """The sum of `losses`, which the caller adds to the training loss."""
        values = list(self.losses.values())
        if len(values) == 1 and isinstance(values[0], Tensor) and values[0].dim() == 0 and values[0].dtype == torch.float32:
            return values[0] + 0.0  # the same, with less Python; not the term itself, which a caller may change in place
        return torch.stack([*values, self.gates.new_zeros(())]).sum()


register_dataclass(Routing, "holdfast.Routing")


@dataclass(frozen=True)
class Projection:
    """The weights of a linear map that is not an `nn.Linear`, in the same layout."""

    weight: Tensor  # (d, in)
    bias: Tensor | None = None


@dataclass(frozen=True)
class Attention:
    """The attention just before an MoE layer."""

    query: Tensor  # (B,heads,N,D), of the N tokens of this forward
    key: Tensor  # (B,key heads,M,D), of all tokens so far: M is N unless decoding
    value: Tensor  # (B,key heads,M,D_v)
    projection: nn.Linear | Projection | None  # the output projection; None unless a part reads "attention.projection"
    output: Tensor  # (B,N,d), after the projection, before the residual
    mask: Tensor | None = (
        None  # broadcasts to (B,heads,N,M): bool, True where allowed, or a float that is added to the scores
    )
    scale: float | None = None  # the factor of q.k; None is 1/sqrt(D)


@dataclass(frozen=True)
class VisibleTokens:
    """Which tokens may inform each other: what the attention just before an MoE layer allows, besides `Context.causal`."""

    keys: int  # M: the last M tokens so far. Fewer than all if attention keeps the keys of a sliding window only
    mask: Tensor | None = None  # as in `Attention`


@dataclass(frozen=True)
class Previous:
    """The inputs of the previous MoE layer's router, and the routing it returned."""

    tokens: Tensor  # (B,N,d)
    routing: Routing


class TokenReader(Protocol):
    """What `checked_tokens` asks of a router."""

    @property
    def dim(self) -> int: ...

    @property
    def layer(self) -> str: ...

    @property
    def traits(self) -> Any: ...


def checked_tokens(tokens: Tensor, reader: TokenReader) -> Tensor:
    """Return `tokens` as (B,N,d); raise ValueError if a router cannot read them."""
    if tokens.dim() == 2 and not reader.traits.sequence_aware:
        tokens = tokens.unsqueeze(0)
    if tokens.dim() != 3:
        whole = reader.traits.sequence_aware
        expected = "(B, N, d), because it reads whole sequences" if whole else "(B, N, d) or (T, d)"
        raise ValueError(f"{reader.layer}: tokens have shape {tuple(tokens.shape)}; this router takes {expected}.")
    if not tokens.is_floating_point():
        raise ValueError(f"{reader.layer}: tokens have dtype {tokens.dtype}; expected a floating-point dtype.")
    if tokens.shape[-1] != reader.dim:
        raise ValueError(f"{reader.layer}: tokens have width {tokens.shape[-1]}; this router was built for {reader.dim}.")
    return tokens


@dataclass(frozen=True)
class Context:
    """What a router may read besides its tokens. It is passed to `forward`, never stored globally."""

    causal: bool = False  # a token may use only tokens before it
    token_mask: Tensor | None = None  # (B,N) bool, True where the token is real
    attention: Attention | None = None
    previous: Previous | None = None
    cache: RouterCache | None = None  # the rows of earlier tokens while decoding
    token_ids: Tensor | None = None  # (B,N), for hash and distilled routers
    modality: Tensor | None = None  # (B,N) int64, the modality of each token, for routers with a score for each
    visible: VisibleTokens | None = None  # for parts that read "attention.mask"; None: `attention` has it, or all tokens
    # (B,N,K) integers, the experts of each token in an earlier run, to use again (holdfast.routing.replaying)
    replayed: Tensor | None = None

    @property
    def visible_tokens(self) -> VisibleTokens | None:
        """Which tokens may inform each other; None: all, or with `causal` all earlier ones."""
        if self.visible is not None or self.attention is None:
            return self.visible
        return VisibleTokens(self.attention.key.shape[2], self.attention.mask)

    @property
    def excludes_later_tokens(self) -> bool:
        """Whether a part must exclude the tokens after a token itself, by the order of their rows.

        With a static cache the mask of the visible tokens excludes them: rows without a token follow the current tokens.
        """
        return self.causal and (self.cache is None or self.cache.in_order)

    def real_tokens(self, tokens: Tensor) -> Tensor:
        """Return (B,N) bool: which of `tokens (B,N,d)` are real. Without a mask, all are."""
        real = self.checked_mask(tokens)
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if real is None else real

    def usable_rows(self, rows: Tensor) -> Tensor | None:
        """Return (B,N) bool: False for rows of padding in `rows (B,N,...)` that contain NaN or huge numbers.

        Return None if there is no mask. Rows of real tokens are always True: their NaN is an error that the user must see.
        """
        if self.token_mask is None:
            return None
        # In float32: the bound itself is infinite in float16.
        return self.token_mask | (rows.detach().flatten(2).abs().amax(-1).float() <= LARGEST_IN_PADDING)

    def zero_unusable(self, rows: Tensor) -> Tensor:
        """Return `rows (B,N,...)` with 0 in rows that are not usable: 0 times NaN is NaN, also in the gradient of a weight.

        Other padding is unchanged: a model may read it (SigLIP reads the last token of a text even if it is padding).
        """
        usable = self.usable_rows(rows)
        return rows if usable is None else rows.where(usable.view(*usable.shape, *[1] * (rows.dim() - 2)), 0.0)

    def checked_mask(self, tokens: Tensor) -> Tensor | None:
        """Return `token_mask`; raise ValueError if it does not fit `tokens (B,N,d)` or marks no token as real.

        The second condition is checked on a CPU only, and not while compiling: on a GPU it would synchronise with the host.
        """
        if self.token_mask is None:
            return None
        if self.token_mask.dtype != torch.bool or self.token_mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"token_mask is {self.token_mask.dtype} of shape {tuple(self.token_mask.shape)}; expected bool of shape "
                f"{tuple(tokens.shape[:2])}, True where the token is real (for an attention mask of 0 and 1: mask.bool())."
            )
        is_readable = self.token_mask.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_readable and self.token_mask.numel() and not self.token_mask.any():
            raise ValueError(
                f"token_mask marks all {self.token_mask.numel()} tokens of the batch as padding; it must be True where a "
                "token is real (a mask that is True for padding: ~mask)."
            )
        return self.token_mask

    def known_numbers(self, numbers: Tensor, name: str, count: int, tokens: Tensor) -> Tensor:
        """Return `numbers (B,N)`, from 0 to count - 1, of `tokens (B,N,d)`; an unknown number of padding becomes 0.

        Raise ValueError, which calls them `name`, for others; on a GPU or while compiling their values are not read.
        """
        if numbers.shape != tokens.shape[:2] or numbers.is_floating_point():
            raise ValueError(
                f"{name} has dtype {numbers.dtype} and shape {tuple(numbers.shape)}; expected whole numbers of shape "
                f"{tuple(tokens.shape[:2])}, one for each token."
            )
        numbers = numbers.to(tokens.device)  # a model on several devices has its ids on the first
        if self.token_mask is not None:
            numbers = numbers.where(self.token_mask | ((numbers >= 0) & (numbers < count)), 0)
        if numbers.device.type == "cpu" and not torch.compiler.is_compiling() and numbers.numel():
            low, high = int(numbers.min()), int(numbers.max())
            if low < 0 or high >= count:
                raise ValueError(f"{name} has values from {low} to {high}; this router was built for 0 to {count - 1}.")
        return numbers
