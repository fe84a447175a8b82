"""The token graph (Mutual-Inform SMoE): tokens of a sequence share their gates.

    G = W P, with P the gates and W the token graph (N x N): each row is a distribution over the tokens of the sequence
    u   the attention output before the residual; without attention, the router's own input

    Similarity              W from the similarity of u_i and u_j
    AttentionPosterior      W from the attention before the layer

Neither ever stores the N x N matrix (kernels/token_mixing). While decoding, both read the rows of earlier tokens from
the cache.
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
from holdfast.routing.declarations import FLOAT, INTEGER, Cost, LayerSizes, Mixing, mixing_flops, projection_flops
from holdfast.routing.parts import Informer, Traits
from holdfast.routing.records import Attention, Context
from holdfast.routing.state import StatefulPart, flag, sum_over_ranks

ENTROPY_MEMORY = 0.9  # of the running mean of the entropies
SAMPLE = 512  # tokens of a sequence whose attention entropy is computed
FORBIDDEN = -1e8  # an additive mask below this (float16: half of the lowest number) excludes a token


class Similarity(Informer):
    """W_ij proportional to exp(u_i W_s u_j / tau) over the tokens j that i may attend to (definition 1).

    causal      True: the tokens that the model's mask allows, j <= i in a causal model. False, as in the paper: all tokens;
                then the routing of a token depends on later tokens, and the router is neither causal nor cacheable
    rank        W_s = R^T R with a trained R (rank, d); None is the identity
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
        # Scaled so that |R u| is about |u|: a given tau then has the same effect with and without a rank.
        self.reduce = None if rank is None else nn.Parameter(torch.randn(rank, dim) / math.sqrt(rank))

    @property
    def inert(self) -> bool:
        return self.strength == 0

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        u = tokens if context.attention is None else context.zero_unusable(context.attention.output)
        coarse = self.reduce is not None and u.dtype == self.reduce.dtype == torch.bfloat16
        u = u if self.reduce is None else linear_float32(u, self.reduce)
        own, keys, real, mask = gates, u, context.token_mask, _allowed_pairs(context.attention)
        if context.cache is not None:
            gates, keys = context.cache.extend("similarity.gates", gates), context.cache.extend("similarity.u", keys)
            real = context.cache.extend("similarity.real", context.real_tokens(tokens))
            if context.attention is not None:
                keys, gates, real = (_rows_in_window(rows, context.attention) for rows in (keys, gates, real))
        causal, mask = (context.causal, mask) if self.causal else (False, None)
        mixed = softmax_mix(u, keys, gates, scale=1 / self.tau, causal=causal, real=real, mask=mask, coarse=coarse)
        return _mix_with_own_gates(own, mixed, self.strength)

    def cost(self, sizes: LayerSizes) -> Cost:
        if self.inert:
            return Cost("similarity")
        rank = sizes.dim if self.reduce is None else self.reduce.shape[0]
        reducing = 0.0 if self.reduce is None else projection_flops(self.reduce)
        vector = sizes.number * sizes.dim if self.reduce is None else FLOAT * rank
        forward, backward = mixing_flops(rank, sizes)
        return Cost(
            "similarity",
            forward=reducing + forward,
            backward=2 * reducing + backward,
            kept=vector + FLOAT * (2 * sizes.experts + 1),
            cached=FLOAT * sizes.experts + vector + 1,
        )

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """Declare the mixing. W depends on the router's input only if the context has no attention."""
        if context.attention is not None:
            return Mixing(self.strength)
        rows = tokens.reshape(-1, tokens.shape[-1]).double()
        reduce = None if self.reduce is None else self.reduce.detach().double()
        return Mixing(self.strength, DotProductChange.at(rows, context.real_tokens(tokens), reduce, self.tau, norm))


class AttentionPosterior(Informer, StatefulPart):
    """W_ij proportional to A_ij exp(-|u_i - o_j|^2 / (2 sigma^2)): the posterior of the token j that u_i comes from.

    A is the attention just before this layer, of the head with the lowest mean entropy; o_j = heads * W_O,h v_j + bias is
    the output of the attention if that head attended to token j only (lemma 1 and eqns 15-17).

    heads       the number of heads of the attention
    sigma       None is sqrt(d). With the paper's 1, all tokens copy one token: |o_j|^2 / 2 differs by tens of nats
    strength    G = (1 - strength) P + strength W P

    The paper takes the mean entropy over the current tokens, so that later tokens choose the head. Here it is a running mean
    over training batches. Of sequences of 1024 tokens and more, it reads about SAMPLE tokens, in blocks at equal distances:
    they are enough for the mean of a head, and all tokens would cost as much as the rest of the router.
    """

    side = "token"
    reads = ("attention", "attention.projection")
    traits = Traits(sequence_aware=True)
    entropy: Tensor
    seen: Tensor

    def __init__(self, dim: int, *, heads: int, sigma: float | None = None, strength: float = 1.0) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads is {heads}; it must be at least 1.")
        if sigma is not None and not sigma > 0:
            raise ValueError(f"sigma is {sigma}; it divides distances and must be positive.")
        _check_strength(strength)
        self.heads, self.strength = heads, strength
        self.sigma = math.sqrt(dim) if sigma is None else sigma
        self.register_buffer("entropy", torch.zeros(heads))
        self.register_buffer("seen", flag())
        self.register_statistics(entropies=torch.zeros(heads), tokens=torch.zeros(()))

    def update_state_where(self, due: Tensor) -> None:
        batch = self.get_buffer("staged_entropies"), self.get_buffer("staged_tokens")
        update_running_mean(self.entropy, self.seen, *batch, due, memory=ENTROPY_MEMORY, is_sum=True)

    @property
    def inert(self) -> bool:
        return self.strength == 0

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        attention = self._attention(context)
        if self.training:
            self.stage_in_background(lambda: self._entropies(attention, tokens, context))
        head = snapshot_for_backward(self.entropy, self.training).argmin().view(1)
        query, key, explained, bias = self._log_weights(attention, head, context)
        own, real, mask = gates, context.token_mask, _mask(attention, head)
        if context.cache is not None:
            gates = context.cache.extend("attention.gates", gates)
            real = context.cache.extend("attention.real", context.real_tokens(tokens))
            gates, real = _rows_in_window(gates, attention), _rows_in_window(real, attention)
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
        return _mix_with_own_gates(own, mixed, self.strength)

    def cost(self, sizes: LayerSizes) -> Cost:
        """Count two products for each pair of tokens, and in training the entropies of all heads for some tokens.

        W^T W of the head's projection, which is computed once in a forward for all tokens, is not counted.
        """
        if self.inert:
            return Cost("attention posterior")
        width = sizes.key_width + sizes.value_width
        projecting = 2.0 * sizes.dim * sizes.value_width + 2.0 * sizes.value_width**2  # W^T u, and the norms |o|^2
        forward, backward = mixing_flops(width, sizes)
        return Cost(
            "attention posterior",
            forward=projecting + forward,
            backward=2 * projecting + backward,
            state_update=2.0 * sizes.heads * sizes.key_width * sizes.mixed / entropy_step(sizes.length),
            kept=sizes.number * (width + sizes.key_width) + FLOAT * (2 * sizes.value_width + 2 * sizes.experts + 2),
            cached=FLOAT * (sizes.experts + 1) + 1,
            summed=FLOAT * self.heads + INTEGER,
        )

    def snapshot(self) -> dict[str, Tensor]:
        return {"entropy": self.entropy}

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """Declare the mixing. A perturbation of the router's input does not change the attention before it, and so not W."""
        return Mixing(self.strength)

    def _attention(self, context: Context) -> Attention:
        attention = context.attention
        if attention is None or attention.projection is None:
            raise ValueError(
                "the router 'attention' needs Context.attention with its output projection; for a layer without attention "
                "before it, use 'similarity'."
            )
        if attention.query.shape[1] != self.heads:
            raise ValueError(f"the attention has {attention.query.shape[1]} heads; this router was built for {self.heads}.")
        return attention

    def _log_weights(
        self, attention: Attention, head: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, SecondProduct, Tensor]:
        """Return the terms of q.k scale + u.o / sigma^2 - |o|^2 / (2 sigma^2), without those that are equal for all j.

        `head` is an index on the device, so that the host does not have to wait for it.
        """
        assert attention.projection is not None
        heads = attention.projection.weight.unflatten(1, (self.heads, -1)).permute(1, 2, 0).unsqueeze(0)  # (1,H,D_v,d)
        rows = (attention.query, attention.key, attention.value, heads)
        query, key, value, across = take_heads(rows, head, self.heads)
        query, across = context.zero_unusable(query), across.squeeze(0)
        # u_i . o_j = heads (W^T u_i) . v_j, plus a term of the bias that is equal for all j
        explained = SecondProduct(
            linear_float32(context.zero_unusable(attention.output), across), value, self.heads / self.sigma**2
        )
        norms = self._norms(value, across, attention.projection.bias, query.shape[1], context)
        return query, key, explained, norms / (-2 * self.sigma**2)

    def _norms(self, value: Tensor, across: Tensor, bias: Tensor | None, tokens: int, context: Context) -> Tensor:
        """Return |o_j|^2 (B,M) of every token; those of earlier tokens are in the cache."""
        new = context.zero_unusable(value if context.cache is None else value[:, value.shape[1] - tokens :])
        norms = projected_norms(new.flatten(0, 1), across, bias, self.heads).view(new.shape[:2])
        if context.cache is not None:
            norms = context.cache.extend("attention.norms", norms.unsqueeze(-1))[:, -value.shape[1] :].squeeze(-1)
        return norms

    def _entropies(self, attention: Attention, tokens: Tensor, context: Context) -> dict[str, Tensor]:
        """Return the sum of each head's entropy over the sampled real tokens, and their number, over all ranks."""
        step = entropy_step(tokens.shape[1])
        entropies = attention_entropy(
            context.zero_unusable(attention.query.transpose(1, 2)).transpose(1, 2),
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
    """Return n: every n-th block of tokens is sampled in a sequence of this length."""
    return max(1, length // SAMPLE)


def _mix_with_own_gates(own: Tensor, mixed: Tensor, strength: float) -> Tensor:
    return mixed if strength == 1 else (1 - strength) * own + strength * mixed


def _check_strength(strength: float) -> None:
    if not 0 <= strength <= 1:
        raise ValueError(f"strength is {strength}; it must be between 0 (no mixing) and 1.")


def _rows_in_window(rows: Tensor, attention: Attention) -> Tensor:
    """Return the cached rows whose keys attention still has: a sliding window drops the earliest."""
    return rows[:, -attention.key.shape[2] :]


def _scale(attention: Attention) -> float:
    return attention.query.shape[-1] ** -0.5 if attention.scale is None else attention.scale


def _masks(attention: Attention) -> Tensor | None:
    """Return the mask of all heads, with position biases if there are any, as (B or 1, heads or 1, N or 1, M)."""
    mask = attention.mask
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"the attention mask has dtype {mask.dtype}; expected bool (True where allowed) or floats to add to scores."
        )
    return mask.view(*[1] * (4 - mask.dim()), *mask.shape)


def _mask(attention: Attention, head: Tensor | int) -> Tensor | None:
    """Return the mask of one head, as (B or 1, N or 1, M)."""
    mask = _masks(attention)
    if mask is None or mask.shape[1] == 1:
        return None if mask is None else mask[:, 0]
    return mask[:, head] if isinstance(head, int) else mask.index_select(1, head).squeeze(1)


def _allowed_pairs(attention: Attention | None) -> Tensor | None:
    """Return which pairs of tokens the mask allows, as bool; an additive mask allows values above FORBIDDEN."""
    mask = None if attention is None else _mask(attention, 0)
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > max(FORBIDDEN, torch.finfo(mask.dtype).min / 2)
