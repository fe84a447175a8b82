"""The attention posterior (Mutual-Inform SMoE, lemma 1): a token takes the gates of those that explain its attention."""

import math
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention import attention_entropy, projected_norms, sampled, take_heads
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.operators import snapshot_for_backward
from holdfast.kernels.statistics import update_running_mean
from holdfast.kernels.token_mixing import Levels, SecondProduct, softmax_mix, softmax_mix_with_total
from holdfast.routing.bounds import Norm
from holdfast.routing.declarations import FLOAT, INTEGER, Cost, LayerSizes, Mixing, mixing_flops
from holdfast.routing.parts import Traits
from holdfast.routing.records import Attention, Context
from holdfast.routing.state import StatefulPart, flag, sum_over_ranks
from holdfast.routing.token_graph import From, Strength, TokenGraph, mask_of_head, masks_of_heads, visible_rows

ENTROPY_MEMORY = 0.9  # of the running mean of the entropies
SAMPLE = 512  # tokens of a sequence whose attention entropy is computed
IMPOSSIBLE = -1e30  # the logarithm of the probability of a head that sees no token; finite, for gradients


class _Head(NamedTuple):
    """One head of the attention."""

    query: Tensor  # (B,N,D)
    key: Tensor  # (B,M,D)
    value: Tensor  # (B,M,D_v)
    across: Tensor  # (D_v,d): W_O,h^T
    mask: Tensor | None  # (B or 1, N or 1, M)


class AttentionPosterior(TokenGraph, StatefulPart):
    """W_ij proportional to A_ij exp(-|u_i - o_j|^2 / (2 sigma^2)): the posterior of the token j that u_i comes from.

    A is the attention just before this layer, u its output before the residual, and o_j = H * W_O,h v_j + bias the output if
    head h of its H heads attended to token j only (lemma 1 and eqns 15-17).

    heads       a number, H: the head with the lowest mean entropy. "all": the posterior over heads too (eqn 14),
                W_ij = sum_h H'_ih W_ijh with H'_ih proportional to sum_j A_ijh exp(-|u_i - o_jh|^2 / (2 sigma^2))
    sigma       None is sqrt(d). With the paper's 1, all tokens copy one token: |o_j|^2 / 2 differs by tens of nats
    strength, from_     see `TokenGraph`

    The paper takes the mean entropy over the current tokens, so that later tokens choose the head. Here it is a running mean
    over training batches. Of sequences of 1024 tokens and more, it reads about SAMPLE tokens, in blocks at equal distances:
    they are enough for the mean of a head, and all tokens would cost as much as the rest of the router. With heads="all"
    there is no such state, and mixing costs more than H times as much.
    """

    reads = ("attention", "attention.projection")
    traits = Traits(sequence_aware=True)
    entropy: Tensor
    seen: Tensor

    def __init__(
        self,
        dim: int,
        *,
        heads: int | Literal["all"],
        sigma: float | None = None,
        strength: Strength = 1.0,
        from_: From = "all",
    ) -> None:
        super().__init__(strength=strength, from_=from_)
        if isinstance(heads, str) and heads != "all":
            raise ValueError(f"heads is {heads!r}; it must be the number of heads of the attention, or 'all'.")
        if not isinstance(heads, str) and heads < 1:
            raise ValueError(f"heads is {heads}; it must be at least 1.")
        if sigma is not None and not sigma > 0:
            raise ValueError(f"sigma is {sigma}; it divides distances and must be positive.")
        self.heads = heads
        self.sigma = math.sqrt(dim) if sigma is None else sigma
        if not isinstance(heads, str):
            self.register_buffer("entropy", torch.zeros(heads))
            self.register_buffer("seen", flag())
            self.register_statistics(entropies=torch.zeros(heads), tokens=torch.zeros(()))

    def update_state_where(self, due: Tensor) -> None:
        if self.heads != "all":
            batch = self.get_buffer("staged_entropies"), self.get_buffer("staged_tokens")
            update_running_mean(self.entropy, self.seen, *batch, due, memory=ENTROPY_MEMORY, is_sum=True)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        attention = self._attention(context)
        if self.training and self.heads != "all":
            self.stage_in_background(lambda: self._entropies(attention, tokens, context))
        heads = self._heads(attention, context)
        norms = self._norms(heads, attention, context)
        own, real = gates, context.token_mask
        levels = self.entropy_limits(logits, context, "attention")
        if context.cache is not None:
            gates = context.cache.extend("attention.gates", gates)
            real = context.cache.extend("attention.real", context.real_tokens(tokens))
            gates, real = (visible_rows(rows, context.visible_tokens) for rows in (gates, real))
        output = context.zero_unusable(attention.output)
        count = attention.query.shape[1]
        posteriors = [
            _HeadPosterior(
                head,
                # u_i . o_j = H (W^T u_i) . v_j, plus a term of the bias that is equal for all j
                SecondProduct(linear_float32(output, head.across), head.value, count / self.sigma**2),
                norm / (-2 * self.sigma**2),
                scale=_scale(attention),
                causal=context.excludes_later_tokens,
                real=real,
                levels=levels,
            )
            for head, norm in zip(heads, norms, strict=True)
        ]
        mixed = posteriors[0].mix(gates) if self.heads != "all" else _mix_heads(posteriors, gates)
        return self.combine(own, mixed, context)

    def cost(self, sizes: LayerSizes) -> Cost:
        """Count two products for each pair of tokens, and in training the entropies of all heads for some tokens.

        With heads="all" the two products are counted for every head, and one more for the normaliser of its attention.
        W^T W of a head's projection, which is computed once in a forward for all tokens, is not counted.
        """
        if self.inert:
            return Cost("attention posterior")
        width = sizes.key_width + sizes.value_width
        projecting = 2.0 * sizes.dim * sizes.value_width + 2.0 * sizes.value_width**2  # W^T u, and the norms |o|^2
        forward, backward = mixing_flops(width, sizes)
        kept = sizes.number * (width + sizes.key_width) + FLOAT * (2 * sizes.value_width + 2 * sizes.experts + 2)
        heads, update, summed = 1, 2.0 * sizes.heads * sizes.key_width * sizes.mixed / entropy_step(sizes.length), 0
        if self.heads == "all":
            heads, update = sizes.heads, 0.0
            forward += 2.0 * sizes.mixed * (sizes.key_width + 1)
            backward += 2.0 * sizes.mixed * (3 * sizes.key_width + 2)
            kept += FLOAT * 5
        else:
            summed = FLOAT * self.heads + INTEGER
        return Cost(
            "attention posterior",
            forward=heads * (projecting + forward),
            backward=heads * (2 * projecting + backward),
            state_update=update,
            kept=heads * kept + 2 * self.level_bytes,
            cached=FLOAT * (sizes.experts + heads) + 1 + self.level_bytes,
            summed=summed,
        )

    def snapshot(self) -> dict[str, Tensor]:
        found = super().snapshot()
        return found if self.heads == "all" else found | {"entropy": self.entropy}

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """Declare the mixing. A perturbation of the router's input does not change the attention before it, and so not W."""
        self.require_certificate()
        return Mixing(self.strength, roundings=2 * self._attention(context).query.shape[1] if self.heads == "all" else 0)

    def _attention(self, context: Context) -> Attention:
        attention = context.attention
        if attention is None or attention.projection is None:
            raise ValueError(
                "the router 'attention' needs Context.attention with its output projection; for a layer without attention "
                "before it, use 'similarity'."
            )
        if self.heads not in ("all", attention.query.shape[1]):
            raise ValueError(f"the attention has {attention.query.shape[1]} heads; this router was built for {self.heads}.")
        return attention

    def _heads(self, attention: Attention, context: Context) -> list[_Head]:
        """Return the head with the lowest mean entropy, or all heads.

        The index of that head stays on the device, so that the host does not have to wait for it.
        """
        assert attention.projection is not None
        count = attention.query.shape[1]
        across = attention.projection.weight.unflatten(1, (count, -1)).permute(1, 2, 0).unsqueeze(0)  # (1,H,D_v,d)
        rows = (attention.query, attention.key, attention.value, across)
        if self.heads != "all":
            best = snapshot_for_backward(self.entropy, self.training).argmin().view(1)
            query, key, value, across = take_heads(rows, best, count)
            mask = mask_of_head(attention.mask, best)
            return [_Head(context.zero_unusable(query), key, value, across.squeeze(0), mask)]
        found = []
        for head in range(count):
            query, key, value, across = (each[:, head * each.shape[1] // count] for each in rows)
            mask = mask_of_head(attention.mask, head)
            found.append(_Head(context.zero_unusable(query), key, value, across.squeeze(0), mask))
        return found

    def _norms(self, heads: list[_Head], attention: Attention, context: Context) -> list[Tensor]:
        """Return |o_j|^2 (B,M) of every token, for each head; those of earlier tokens are in the cache."""
        assert attention.projection is not None
        bias, count, tokens = attention.projection.bias, attention.query.shape[1], attention.query.shape[2]
        norms = []
        for head in heads:
            new = head.value if context.cache is None else context.cache.current(head.value, tokens)
            new = context.zero_unusable(new)
            norms.append(projected_norms(new.flatten(0, 1), head.across, bias, count).view(new.shape[:2]))
        if context.cache is None:
            return norms
        rows = norms[0].unsqueeze(-1) if len(norms) == 1 else torch.stack(norms, -1)
        rows = context.cache.extend("attention.norms", rows)[:, -attention.value.shape[2] :]
        return [rows[..., at] for at in range(len(norms))]

    def _entropies(self, attention: Attention, tokens: Tensor, context: Context) -> dict[str, Tensor]:
        """Return the sum of each head's entropy over the sampled real tokens, and their number, over all ranks."""
        step = entropy_step(tokens.shape[1])
        entropies = attention_entropy(
            context.zero_unusable(attention.query.transpose(1, 2)).transpose(1, 2),
            attention.key,
            scale=_scale(attention),
            causal=context.causal,
            real=context.token_mask,
            mask=masks_of_heads(attention.mask),
            step=step,
        )
        if context.token_mask is None:
            count = torch.full((), entropies[:, 0].numel(), device=tokens.device)
        else:
            real = torch.cat([context.token_mask[:, rows] for rows in sampled(tokens.shape[1], step)], 1)
            entropies, count = entropies.where(real.unsqueeze(1), 0.0), real.sum()
        return {"entropies": sum_over_ranks(entropies.sum((0, 2))), "tokens": sum_over_ranks(count)}


class _HeadPosterior:
    """The posterior of one head: its log-weights are q.k scale + u.o / sigma^2 - |o|^2 / (2 sigma^2).

    Terms that are equal for all j are left out.
    """

    def __init__(
        self,
        head: _Head,
        explained: SecondProduct,
        bias: Tensor,
        *,
        scale: float,
        causal: bool,
        real: Tensor | None,
        levels: Levels | None,
    ) -> None:
        self.head, self.explained, self.bias = head, explained, bias
        self.scale, self.causal, self.real, self.levels = scale, causal, real, levels

    def mix(self, gates: Tensor) -> Tensor:
        """Return (B,N,E): the gates of all tokens, mixed by this head alone."""
        return softmax_mix(
            self.head.query,
            self.head.key,
            gates,
            scale=self.scale,
            causal=self.causal,
            real=self.real,
            mask=self.head.mask,
            second=self.explained,
            bias=self.bias,
            levels=self.levels,
        )

    def mix_with_evidence(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed gates and log sum_j A_ij exp(...) (B,N), over the tokens j that may inform i.

        The attention A_ij is normalised over all tokens that i attends to.
        """
        mix = partial(
            softmax_mix_with_total,
            self.head.query,
            self.head.key,
            scale=self.scale,
            causal=self.causal,
            real=self.real,
            mask=self.head.mask,
        )
        mixed, total = mix(gates, second=self.explained, bias=self.bias, levels=self.levels)
        _, attended = mix(gates.new_ones(*gates.shape[:2], 1))
        sees = total > -torch.inf
        return mixed, (total.where(sees, 0.0) - attended.where(sees, 0.0)).where(sees, IMPOSSIBLE)


def _mix_heads(posteriors: list[_HeadPosterior], gates: Tensor) -> Tensor:
    """Return sum_h H'_ih (sum_j W_ijh p_j): the heads are equally likely before u is seen."""
    mixed, evidence = zip(*(posterior.mix_with_evidence(gates) for posterior in posteriors), strict=True)
    shares = torch.stack(evidence, -1).softmax(-1)  # (B,N,H)
    return (shares.unsqueeze(-1) * torch.stack(mixed, -2)).sum(-2)


def entropy_step(length: int) -> int:
    """Return n: every n-th block of tokens is sampled in a sequence of this length."""
    return max(1, length // SAMPLE)


def _scale(attention: Attention) -> float:
    return attention.query.shape[-1] ** -0.5 if attention.scale is None else attention.scale
