"""The router under test: its inputs, and a comparison of routings that allows only rounding and numerical ties."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.layers.losses import Losses
from holdfast.routing import Attention, Context, Previous, Router, RouterCache, Routing, Selection

TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1.5e-5  # an ARM processor rounds one gradient of `xmoe+ac` 1.1e-5 away from the naive one
# How much weights may differ if sums were taken in another order: in a smooth strip of width eps they have slopes of 50/eps.
STEEP = 1e-2
HEADS = 2
WIDTH = 4  # of a head
VOCABULARY = 1000  # a router that reads token ids needs at least as many

Reference = Callable[[Router, Tensor, Context], Routing]


class NotApplicable(Exception):
    """The check does not apply to this router; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """What forwards and backwards gave: the last routing, the sum of the gradients of all batches, and the state."""

    routing: Routing
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]

    def require_equal(self, other: "Outcome", cause: str, *, exactly: bool = False) -> None:
        """Check that losses, gradients and state are equal but for rounding; with `exactly`, to the bit."""
        tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if exactly else {}
        losses = self.routing.losses, other.routing.losses
        pairs = {"loss": losses, "gradient of": (self.gradients, other.gradients), "state": (self.state, other.state)}
        for kind, (mine, theirs) in pairs.items():
            for name, value in mine.items():
                torch.testing.assert_close(value, theirs[name], msg=f"{cause} changes the {kind} {name}", **tolerance)


@dataclass(frozen=True)
class RouterUnderTest:
    """A router, its naive reference if there is one, and inputs for it."""

    prototype: Router
    reference: Reference | None = None

    def build(self) -> Router:
        """Return a copy of the router, in training mode."""
        return copy.deepcopy(self.prototype).train()

    def route(self, tokens: Tensor, context: Context, training: bool) -> Routing:
        """Return the routing by a new copy of the router, with the same random numbers in each call."""
        torch.manual_seed(1)
        return self.build().train(training)(tokens, context)

    def outcome(
        self,
        *batches: tuple[Tensor, Context],
        training: bool = True,
        losses: Losses | None = None,
        run: Callable[[Router], Callable[[Tensor, Context], Routing]] = lambda router: router,
        real: Tensor | None = None,
    ) -> Outcome:
        """Return what a forward and a backward of a new copy of the router give for each batch, always with the same seeds.

        losses   instead of the router's own
        run      returns what is called in the place of a router
        real     (B,N): the tokens whose weights the backward starts at; None: all
        """
        router, summed = self.build().train(training), dict[str, Tensor]()
        router.losses = router.losses if losses is None else losses
        called = run(router)
        for seed, (tokens, context) in enumerate(batches, 1):
            torch.manual_seed(seed)
            leaf = tokens if tokens.requires_grad else tokens.clone().requires_grad_()
            routing = called(leaf, context)
            for name, gradient in gradients(objective(routing, real), leaf, router).items():
                summed[name] = summed[name] + gradient if name in summed else gradient
        return Outcome(routing, summed, state_of(router.eval()))

    def batches(self, count: int) -> list[tuple[Tensor, Context]]:
        """Return so many batches of tokens, each with its context."""
        return [(tokens, self.context(tokens)) for tokens in (self.tokens(seed=seed) for seed in range(count))]

    def overflows(self, tokens: Tensor, context: Context) -> bool:
        """Return whether tokens of this training batch lose experts for which the layer has no rows."""
        torch.manual_seed(1)
        router = self.build()
        router(tokens, context)
        share = router.select.declares.overflow
        return share is not None and float(share) > 0

    def warm_up(self, batches: int = 3) -> "RouterUnderTest":
        """Return the same router after a few training forwards: with state at its start, mistakes could stay hidden."""
        router = self.build()
        hook = router.select.register_forward_hook(_require_selection)
        for seed in range(batches):
            tokens = self.tokens(seed=100 + seed)
            router(tokens, self.context(tokens))
        hook.remove()
        return replace(self, prototype=router.eval())

    def tokens(self, sequences: int = 3, length: int = 17, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sequences, length, self.prototype.dim, generator=generator)

    def crowded_tokens(self, seed: int = 0) -> Tensor:
        """Return tokens that are similar to each other, so that most of them choose the same experts."""
        return self.tokens(seed=seed) + 2 * self.tokens(1, 1, seed=50)

    def uneven_tokens(self, seed: int = 0) -> Tensor:
        """Return tokens whose features have other sizes in every sequence, so that statistics of sequences differ much."""
        tokens = self.tokens(seed=seed)
        return tokens * self.tokens(len(tokens), 1, seed=seed + 100).mul(2).exp()

    def context(self, tokens: Tensor, token_mask: Tensor | None = None, *, causal: bool = False) -> Context:
        """Return a context with all that a model passes (attention, previous MoE layer, ids, ...), made from the tokens."""
        return Context(
            causal=causal,
            token_mask=token_mask,
            attention=_attention(tokens, token_mask, causal),
            previous=_previous(tokens, self.prototype.experts),
            token_ids=(tokens.detach()[..., 0] * 1000).long().abs() % VOCABULARY,
            modality=(tokens.detach()[..., 1] > 0).long(),
        )


def _require_selection(select: nn.Module, inputs: Any, selection: Any) -> None:
    """Check what a selector returns, before the router reads it."""
    assert isinstance(selection, Selection), (
        f"the forward of {type(select).__name__} must return a Selection, but it returned a {type(selection).__name__}"
    )


def _fixed(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


def _attention(tokens: Tensor, token_mask: Tensor | None, causal: bool) -> Attention:
    sequences, length, dim = tokens.shape
    query, key, value = (
        (tokens @ _fixed(HEADS * WIDTH, dim, seed).t()).view(sequences, length, HEADS, WIDTH).transpose(1, 2)
        for seed in (1, 2, 3)
    )
    allowed = torch.ones(length, length, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    mask = allowed if token_mask is None else allowed & token_mask[:, None, None, :]
    mask = mask | torch.eye(length, dtype=torch.bool)  # a padded token attends to itself, so that no row is empty
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    projection = nn.Linear(HEADS * WIDTH, dim, bias=False).requires_grad_(False)
    projection.weight.copy_(_fixed(dim, HEADS * WIDTH, 4))
    output = projection(mixed.transpose(1, 2).reshape(sequences, length, HEADS * WIDTH))
    return Attention(query, key, value, projection, output, mask)


def _previous(tokens: Tensor, experts: int) -> Previous:
    earlier = tokens.detach() @ _fixed(tokens.shape[-1], tokens.shape[-1], 5).t()
    logits = (earlier @ _fixed(experts, tokens.shape[-1], 6).t()).flatten(0, 1)
    gates = logits.softmax(-1)
    weights, chosen = gates.topk(min(2, experts))
    return Previous(earlier, Routing(logits, gates, chosen, weights / weights.sum(-1, keepdim=True)))


def fill_padding(rows: Tensor, real: Tensor, value: float) -> Tensor:
    """Return `rows (B,N,...)`, detached, with `value` in rows that are not `real (B,N)`."""
    return rows.detach().where(real.view(*real.shape, *[1] * (rows.dim() - 2)), value)


def with_padding(context: Context, real: Tensor, value: float) -> Context:
    """Return the context, detached, with `value` in all rows of padding."""
    attention, previous = context.attention, context.previous
    assert attention is not None and previous is not None

    def heads(rows: Tensor) -> Tensor:
        return fill_padding(rows.transpose(1, 2), real, value).transpose(1, 2)

    def flat(rows: Tensor) -> Tensor:
        return fill_padding(rows.unflatten(0, real.shape), real, value).flatten(0, 1)

    filled: dict[str, Any] = {name: heads(getattr(attention, name)) for name in ("query", "key", "value")}
    attention = replace(attention, **filled, output=fill_padding(attention.output, real, value))
    routing = previous.routing
    routing = Routing(flat(routing.logits), flat(routing.gates), routing.experts, flat(routing.weights))
    return replace(context, attention=attention, previous=Previous(fill_padding(previous.tokens, real, value), routing))


def steps(context: Context, start: int, end: int, cache: RouterCache) -> Context:
    """Return the context of tokens `start` to `end` while decoding, with the rows of earlier tokens in `cache`."""
    attention, previous = context.attention, context.previous
    assert attention is not None and previous is not None
    assert attention.mask is not None and context.token_ids is not None and context.modality is not None
    sequences, length = previous.tokens.shape[:2]

    def cut(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (sequences, length))[:, start:end].flatten(0, 1)

    attention = replace(
        attention,
        query=attention.query[:, :, start:end],
        key=attention.key[:, :, :end],
        value=attention.value[:, :, :end],
        output=attention.output[:, start:end],
        mask=attention.mask[..., start:end, :end],
    )
    previous = Previous(previous.tokens[:, start:end], previous.routing.map_tokens(cut))
    ids: dict[str, Any] = {"token_ids": context.token_ids[:, start:end], "modality": context.modality[:, start:end]}
    return replace(context, cache=cache, previous=previous, attention=attention, **ids)


def differing(first: Routing, second: Routing, *, weights_within: float = TOLERANCE) -> Tensor:
    """Return (T,) bool: the tokens whose routing differs by more than rounding.

    Gates may differ by `TOLERANCE` and weights by `weights_within`. Sets may differ only in experts that are tied. If
    experts are limited, the number of a token's experts must be the same.
    """
    apart = (first.gates - second.gates).abs().amax(-1) > TOLERANCE
    if first.dropped is not None:
        apart = apart | (first.used.sum(-1) != second.used.sum(-1))
    for name in ("dispatch", "shares"):  # of a SoftMoE layer
        one, other = getattr(first, name), getattr(second, name)
        if one is not None:
            apart = apart | ((one - other).abs().flatten(1).amax(-1) > TOLERANCE)
    changed = first.chosen ^ second.chosen
    low = first.gates.masked_fill(~changed, torch.inf).amin(-1)
    high = first.gates.masked_fill(~changed, -torch.inf).amax(-1)
    undecided = changed.any(-1) & (high - low <= 2 * TOLERANCE)
    same_set = ~changed.any(-1)
    weights_apart = (first.dense_weights - second.dense_weights).abs().amax(-1) > weights_within
    return apart | ~(same_set | undecided) | (same_set & weights_apart)


def state_of(router: Router) -> dict[str, Tensor]:
    """Return a copy of all buffers, without committing staged statistics."""
    return {name: buffer.clone() for name, buffer in router.named_buffers()}


def objective(routing: Routing, real: Tensor | None = None) -> Tensor:
    """Return a scalar that depends on every loss and on every weight of `real` tokens, with a different factor for each."""

    def own(rows: Tensor) -> Tensor:
        return rows if real is None else rows.where(real.view(-1, *[1] * (rows.dim() - 1)), 0.0)

    generator = torch.Generator().manual_seed(7)
    experts = routing.gates.shape[-1]
    mix = torch.randn(experts, generator=generator).to(routing.gates.device)
    tilt = torch.randn(routing.gates.shape[0], 1, generator=generator).to(routing.gates.device)
    total = (own(routing.dense_weights) * mix * tilt).sum() + routing.loss
    for rows in (routing.dispatch, routing.shares):  # of a SoftMoE layer
        if rows is not None:
            by_slot = torch.linspace(-1, 2, rows.shape[-1], device=rows.device)
            total = total + (own(rows) * mix.unsqueeze(-1) * by_slot * tilt.unsqueeze(-1)).sum()
    return total


def gradients(total: Tensor, tokens: Tensor, router: Router, **how: Any) -> dict[str, Tensor]:
    """Return the gradients of `tokens` and of the trainable parameters by name; zeros where there is none."""
    wanted = {"tokens": tokens, **{name: each for name, each in router.named_parameters() if each.requires_grad}}
    # The routing of `hash` has no gradient: a leaf makes a backward possible, in which all gradients are 0.
    total = total if total.requires_grad else total.detach().requires_grad_()
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, materialize_grads=True, **how)
    return dict(zip(wanted, found, strict=True))
