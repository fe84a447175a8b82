"""Tokens that inform each other's routes (Mutual-Inform SMoE): G = W P, with W a distribution over the tokens of a sequence.

    u the attention output before the residual (the router's own input where there is none), P the gates

Neither informer ever holds an N x N matrix (kernels/token_mixing). Both take what earlier tokens left from the cache.
"""

import math

import torch
from torch import Tensor, nn

from holdfast.kernels.attention import attention_entropy, projected_norms, sampled, take_heads
from holdfast.kernels.backward import snapshot_for_backward
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.statistics import update_running_mean
from holdfast.kernels.token_mixing import SecondProduct, softmax_mix
from holdfast.routing.bounds import DotProductChange, Norm
from holdfast.routing.declarations import FLOAT, INTEGER, Cost, Mixing, Place, mixing_flops, projection_flops
from holdfast.routing.parts import Informer, Traits
from holdfast.routing.records import Attention, Context
from holdfast.routing.state import StatefulPart, flag, sum_over_ranks

ENTROPY_MEMORY = 0.9
SAMPLE = 512  # tokens of a sequence
FORBIDDEN = -1e8  # an additive mask that goes below this (float16: half of its least number) forbids


class Similarity(Informer):
    """W_ij proportional to exp(u_i W_s u_j / tau) over the tokens j that i may attend to (definition 1).

    causal      True: what the model's own mask allows, j <= i in a causal model. False: the paper's reading, in which a
                token's route depends on tokens after it; then the router is neither causal nor cacheable
    rank        W_s = R^T R with a learned R (rank, d); None is the identity
    strength    G = (1 - strength) P + strength W P
    """

    side = "token"
    reads = ("attention",)

    def __init__(
        self, dim: int, *, tau: float = 1.0, rank: int | None = None, causal: bool = True, strength: float = 1.0
    ) -> None:
        super().__init__()
        if not tau > 0:
            raise ValueError(f"tau is {tau}; it divides the similarities and must be positive.")
        if rank is not None and not 1 <= rank <= dim:
            raise ValueError(f"rank is {rank}; it must be between 1 and the width of the tokens, {dim}.")
        _check_strength(strength)
        self.tau, self.causal, self.strength = tau, causal, strength
        self.traits = Traits(sequence_aware=True, causal=causal, cacheable=causal)
        # Scaled so that |R u| is about |u|: tau then means what it means without a rank.
        self.reduce = None if rank is None else nn.Parameter(torch.randn(rank, dim) / math.sqrt(rank))

    @property
    def inert(self) -> bool:
        return self.strength == 0

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        u = tokens if context.attention is None else context.clean(context.attention.output)
        coarse = self.reduce is not None and u.dtype == self.reduce.dtype == torch.bfloat16
        u = u if self.reduce is None else linear_float32(u, self.reduce)
        own, keys, real, mask = gates, u, context.token_mask, _allowed(context.attention)
        if context.cache is not None:
            gates, keys = context.cache.extend("similarity.gates", gates), context.cache.extend("similarity.u", keys)
            real = context.cache.extend("similarity.real", context.real_or_all(tokens))
            if context.attention is not None:
                keys, gates, real = (_latest(rows, context.attention) for rows in (keys, gates, real))
        causal, mask = (context.causal, mask) if self.causal else (False, None)
        mixed = softmax_mix(u, keys, gates, scale=1 / self.tau, causal=causal, real=real, mask=mask, coarse=coarse)
        return _blend(own, mixed, self.strength)

    def cost(self, place: Place) -> Cost:
        if self.inert:
            return Cost("similarity")
        rank = place.dim if self.reduce is None else self.reduce.shape[0]
        reducing = 0.0 if self.reduce is None else projection_flops(self.reduce)
        vector = place.number * place.dim if self.reduce is None else FLOAT * rank
        forward, backward = mixing_flops(rank, place)
        return Cost(
            "similarity",
            forward=reducing + forward,
            backward=2 * reducing + backward,
            kept=vector + FLOAT * (2 * place.experts + 1),
            cached=FLOAT * place.experts + vector + 1,
        )

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """W depends on the router's input only where there is no attention output to take it from."""
        if context.attention is not None:
            return Mixing(self.strength)
        rows = tokens.reshape(-1, tokens.shape[-1]).double()
        reduce = None if self.reduce is None else self.reduce.detach().double()
        return Mixing(self.strength, DotProductChange.at(rows, context.real_or_all(tokens), reduce, self.tau, norm))


class AttentionPosterior(Informer, StatefulPart):
    """W_ij proportional to A_ij exp(-|u_i - o_j|^2 / (2 sigma^2)): which token j explains what attention put into i.

    A is the attention just before this layer, of its head with the lowest mean entropy; o_j = heads * W_O,h v_j + bias is
    what that head would contribute if it looked at j alone (lemma 1 and eqns 15-17).

    heads       how many the attention has
    sigma       None is sqrt(d). The paper's 1 makes all tokens copy one: |o_j|^2 / 2 differs by tens of nats between tokens
    strength    G = (1 - strength) P + strength W P

    The paper takes the mean entropy over the tokens at hand, so that later tokens choose the head; ours is a running mean.
    In sequences of 1024 and more it is that of about SAMPLE tokens, in blocks spread evenly: a head's mean needs no more,
    and all of them would cost as much as the rest of the router.
    """

    side = "token"
    reads = ("attention", "attention.projection")
    traits = Traits(sequence_aware=True)
    entropy: Tensor
    seen: Tensor

    def __init__(self, dim: int, *, heads: int, sigma: float | None = None, strength: float = 1.0) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads is {heads}; attention has at least one.")
        if sigma is not None and not sigma > 0:
            raise ValueError(f"sigma is {sigma}; it divides distances and must be positive.")
        _check_strength(strength)
        self.heads, self.strength = heads, strength
        self.sigma = math.sqrt(dim) if sigma is None else sigma
        self.register_buffer("entropy", torch.zeros(heads))
        self.register_buffer("seen", flag())
        self.register_statistics(entropies=torch.zeros(heads), tokens=torch.zeros(()))

    def absorb_where(self, due: Tensor) -> None:
        batch = self.get_buffer("staged_entropies"), self.get_buffer("staged_tokens")
        update_running_mean(self.entropy, self.seen, *batch, due, memory=ENTROPY_MEMORY, is_sum=True)

    @property
    def inert(self) -> bool:
        return self.strength == 0

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        attention = self._attention(context)
        if self.training:
            self.learn(lambda: self._entropies(attention, tokens, context))
        head = snapshot_for_backward(self.entropy, self.training).argmin().view(1)
        query, key, explained, bias = self._log_weights(attention, head, context)
        own, real, mask = gates, context.token_mask, _mask(attention, head)
        if context.cache is not None:
            gates = context.cache.extend("attention.gates", gates)
            real = context.cache.extend("attention.real", context.real_or_all(tokens))
            gates, real = _latest(gates, attention), _latest(real, attention)
        mixed = softmax_mix(
            query,
            key,
            gates,
            scale=_scale(attention),
            causal=context.causal,
            real=real,
            mask=mask,
            second=explained,
            bias=bias,
        )
        return _blend(own, mixed, self.strength)

    def cost(self, place: Place) -> Cost:
        """Two products a pair of tokens, D and D_v wide; in training also the entropies of all heads, of some tokens.

        W^T W of the head's projection (2 d D_v^2), computed once a forward for all tokens, is not counted.
        """
        if self.inert:
            return Cost("attention posterior")
        width = place.key_width + place.value_width
        projecting = 2.0 * place.dim * place.value_width + 2.0 * place.value_width**2  # W^T u, and the norms |o|^2
        forward, backward = mixing_flops(width, place)
        return Cost(
            "attention posterior",
            forward=projecting + forward,
            backward=2 * projecting + backward,
            learning=2.0 * place.heads * place.key_width * place.mixed / entropy_step(place.length),
            kept=place.number * (width + place.key_width) + FLOAT * (2 * place.value_width + 2 * place.experts + 2),
            cached=FLOAT * (place.experts + 1) + 1,
            summed=FLOAT * self.heads + INTEGER,
        )

    def snapshot(self) -> dict[str, Tensor]:
        return {"entropy": self.entropy}

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """W comes from the attention before the router, which a move of the router's input leaves as it is."""
        return Mixing(self.strength)

    def _attention(self, context: Context) -> Attention:
        attention = context.attention
        if attention is None or attention.projection is None:
            raise ValueError(
                "the attention router needs the attention just before it, with its output projection, in the context; "
                "a layer without one can use 'similarity'."
            )
        if attention.query.shape[1] != self.heads:
            raise ValueError(f"the attention has {attention.query.shape[1]} heads; this router was built for {self.heads}.")
        return attention

    def _log_weights(
        self, attention: Attention, head: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, SecondProduct, Tensor]:
        """q.k scale + u.o / sigma^2 - |o|^2 / (2 sigma^2), up to what is the same for every j: two products and a bias.

        The head is an index on the device, so that nobody waits to hear which it is.
        """
        assert attention.projection is not None
        heads = attention.projection.weight.unflatten(1, (self.heads, -1)).permute(1, 2, 0).unsqueeze(0)  # (1,H,D_v,d)
        rows = (attention.query, attention.key, attention.value, heads)
        query, key, value, across = take_heads(rows, head, self.heads)
        query, across = context.clean(query), across.squeeze(0)
        # u_i . o_j = heads (W^T u_i) . v_j, and what the bias adds is the same for every j
        explained = SecondProduct(linear_float32(context.clean(attention.output), across), value, self.heads / self.sigma**2)
        norms = self._norms(value, across, attention.projection.bias, query.shape[1], context)
        return query, key, explained, norms / (-2 * self.sigma**2)

    def _norms(self, value: Tensor, across: Tensor, bias: Tensor | None, tokens: int, context: Context) -> Tensor:
        """|o_j|^2 (B,M) of every token, the earlier ones from the cache."""
        new = context.clean(value if context.cache is None else value[:, value.shape[1] - tokens :])
        norms = projected_norms(new.flatten(0, 1), across, bias, self.heads).view(new.shape[:2])
        if context.cache is not None:
            norms = context.cache.extend("attention.norms", norms.unsqueeze(-1))[:, -value.shape[1] :].squeeze(-1)
        return norms

    def _entropies(self, attention: Attention, tokens: Tensor, context: Context) -> dict[str, Tensor]:
        """Of each head the sum over the real tokens that are looked at, and how many they are, over all ranks."""
        step = entropy_step(tokens.shape[1])
        entropies = attention_entropy(
            context.clean(attention.query.transpose(1, 2)).transpose(1, 2),
            attention.key,
            scale=_scale(attention),
            causal=context.causal,
            real=context.token_mask,
            mask=_masks(attention),
            step=step,
        )
        if context.token_mask is None:
            count = torch.full((), entropies[:, 0].numel(), device=tokens.device)
        else:
            real = torch.cat([context.token_mask[:, rows] for rows in sampled(tokens.shape[1], step)], 1)
            entropies, count = entropies.where(real.unsqueeze(1), 0.0), real.sum()
        return {"entropies": sum_over_ranks(entropies.sum((0, 2))), "tokens": sum_over_ranks(count)}


def entropy_step(length: int) -> int:
    """Of so many blocks of tokens one is looked at."""
    return max(1, length // SAMPLE)


def _blend(own: Tensor, mixed: Tensor, strength: float) -> Tensor:
    return mixed if strength == 1 else (1 - strength) * own + strength * mixed


def _check_strength(strength: float) -> None:
    if not 0 <= strength <= 1:
        raise ValueError(f"strength is {strength}; it must be between 0 (a plain router) and 1.")


def _latest(rows: Tensor, attention: Attention) -> Tensor:
    """Those of the cached rows whose keys attention still has: a sliding window drops the earliest."""
    return rows[:, -attention.key.shape[2] :]


def _scale(attention: Attention) -> float:
    return attention.query.shape[-1] ** -0.5 if attention.scale is None else attention.scale


def _masks(attention: Attention) -> Tensor | None:
    """All heads' masks, with their position biases if they have them, as (B or 1, heads or 1, N or 1, M)."""
    mask = attention.mask
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"the attention mask is {mask.dtype}; expected bool (True where allowed) or a float that is added.")
    return mask.view(*[1] * (4 - mask.dim()), *mask.shape)


def _mask(attention: Attention, head: Tensor | int) -> Tensor | None:
    """A head's own mask, as (B or 1, N or 1, M)."""
    mask = _masks(attention)
    if mask is None or mask.shape[1] == 1:
        return None if mask is None else mask[:, 0]
    return mask[:, head] if isinstance(head, int) else mask.index_select(1, head).squeeze(1)


def _allowed(attention: Attention | None) -> Tensor | None:
    """What any token may look at, as bool: of an added mask, what it does not push below FORBIDDEN."""
    mask = None if attention is None else _mask(attention, 0)
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > max(FORBIDDEN, torch.finfo(mask.dtype).min / 2)
