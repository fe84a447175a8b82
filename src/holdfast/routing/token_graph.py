"""The token graph (Mutual-Inform SMoE): tokens of a sequence share their gates.

    G = (1 - strength) P + strength W P, with P the gates and W the token graph (N x N): each row is a distribution over
    the tokens of the sequence that may inform the token

    Similarity             W from the similarity of u_i and u_j (definition 1)
    AttentionPosterior     W from the attention before the layer: a token takes the gates of those that explain it (lemma 1)

`TokenGraph` has what both share: strength, which tokens inform a token, and the attention's mask. Neither ever stores the
N x N matrix (kernels/token_mixing). While decoding, both read the rows of earlier tokens from the cache. A row of padding
keeps its own gates.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from holdfast.errors import require_known
from holdfast.kernels.attention import attention_entropy, projected_norms, sampled, take_heads
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.operators import snapshot_for_backward
from holdfast.kernels.statistics import update_running_mean
from holdfast.kernels.token_mixing import Levels, SecondProduct, softmax_mix, softmax_mix_with_total
from holdfast.routing.bounds import DotProductChange, Norm
from holdfast.routing.declarations import FLOAT, INTEGER, Cost, LayerSizes, Mixing, NoCertificate
from holdfast.routing.parts import Informer, InformerDeclarations, Traits
from holdfast.routing.records import Attention, Context, VisibleTokens
from holdfast.routing.state import StatefulPart, flag, sum_over_ranks

Strength = float | Literal["learned"]
From = Literal["all", "confident"]
Of = Literal["tokens", "attention"]
Form = Literal["symmetric", "bilinear"]

FIRST_STRENGTH = 0.1  # a learned strength starts here
ENTROPY_ERROR = 1e-5  # nats: entropies that differ by rounding only count as equal, however their batch was rounded
FORBIDDEN = -1e8  # an additive mask below this (float16: half of the lowest number) excludes a token
ENTROPY_MEMORY = 0.9  # of the running mean of the entropies
SAMPLE = 512  # tokens of a sequence whose attention entropy is computed
IMPOSSIBLE = -1e30  # the logarithm of the probability of a head that sees no token; finite, for gradients


class TokenGraph(Informer):
    """A token-side informer that mixes gates by a distribution over tokens (abstract).

    strength    a number from 0 (no mixing) to 1. "learned": sigmoid(strength_logit), a parameter that starts at 0.1
    from_       the option `from`: which tokens inform token i. "all": all that i may see. "confident": of these, only
                J_i = {j : H_j <= H_i}, with H the entropy of softmax(logits) of a token; i itself is always one of them
    """

    side = "token"
    strength_logit: nn.Parameter | None

    def __init__(self, *, strength: Strength = 1.0, from_: From = "all") -> None:
        super().__init__()
        if isinstance(strength, str):
            if strength != "learned":
                raise ValueError(f"strength is {strength!r}; it must be a number between 0 (no mixing) and 1, or 'learned'.")
        elif not 0 <= strength <= 1:
            raise ValueError(f"strength is {strength}; it must be between 0 (no mixing) and 1.")
        require_known("value of from", from_, get_args(From))
        self.from_: From = from_
        self._fixed_strength = None if isinstance(strength, str) else float(strength)
        first = torch.full((1,), math.log(FIRST_STRENGTH / (1 - FIRST_STRENGTH)))
        self.strength_logit = nn.Parameter(first) if self._fixed_strength is None else None

    @property
    def strength(self) -> float:
        """The strength now, as a number. On a GPU, reading a learned one waits for the device."""
        if self.strength_logit is None:
            assert self._fixed_strength is not None
            return self._fixed_strength
        return float(self.strength_logit.detach().float().sigmoid())

    @property
    def inert(self) -> bool:
        return self._fixed_strength == 0

    @property
    def declares(self) -> InformerDeclarations:
        logit = self.strength_logit
        return InformerDeclarations(
            snapshot=lambda: {} if logit is None else {"strength": logit.detach().float().sigmoid()}, static_rows=True
        )

    def combine(self, own: Tensor, mixed: Tensor, context: Context) -> Tensor:
        """Return (1 - strength) own + strength mixed; rows of padding keep their own gates."""
        if self.strength_logit is not None:
            strength = self.strength_logit.float().sigmoid()
            mixed = (1 - strength) * own + strength * mixed
        elif self._fixed_strength != 1:
            mixed = (1 - self.strength) * own + self.strength * mixed
        return mixed if context.token_mask is None else mixed.where(context.token_mask.unsqueeze(-1), own)

    def entropy_limits(self, logits: Tensor, context: Context, name: str) -> Levels | None:
        """Return the entropies that limit which tokens inform each other; None with `from="all"`.

        The entropies of earlier tokens are in the cache, under `name`.
        """
        if self.from_ == "all":
            return None
        entropy = torch.special.entr(logits.detach().float().softmax(-1)).sum(-1)
        keys = entropy
        if context.cache is not None:
            keys = visible_rows(context.cache.extend(f"{name}.entropy", entropy), context.visible_tokens)
        return Levels(entropy + ENTROPY_ERROR, keys)

    @property
    def level_bytes(self) -> int:
        """The bytes per token of an entropy, for costs."""
        return 0 if self.from_ == "all" else FLOAT

    def require_certificate(self) -> None:
        """Raise NoCertificate if the tokens that inform a token depend on the gates."""
        if self.from_ == "confident":
            raise NoCertificate(
                f"no certificate is known for {type(self).__name__} with from=confident: a perturbation changes entropies, "
                "and with them which tokens inform a token"
            )


class Similarity(TokenGraph):
    """W_ij proportional to exp(u_i^T W_s u_j / tau) over the tokens j that may inform i.

    of          what is compared. "tokens": u is the router's own input, as in the paper. "attention": the attention output
                before the residual; without attention before the layer, the router's own input
    tau         a number, or "sqrt": the root of the width of the vectors that are compared, d or the rank. The paper has 1
    rank        W_s = R^T R with a trained R (rank, d); None is the identity
    form        "symmetric": W_s = R^T R. "bilinear": W_s = R^T Q with a second trained matrix Q (rank, d); it needs a rank
    causal      True: the tokens that the attention's mask allows, j <= i in a causal model. False, as in the paper: all
                tokens; then the routing of a token depends on later tokens, and the router is neither causal nor cacheable
    strength, from_     see `TokenGraph`
    """

    reduce: nn.Parameter | None
    reduce_keys: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        *,
        of: Of = "tokens",
        tau: float | Literal["sqrt"] = "sqrt",
        rank: int | None = None,
        form: Form = "symmetric",
        causal: bool = True,
        strength: Strength = 1.0,
        from_: From = "all",
    ) -> None:
        super().__init__(strength=strength, from_=from_)
        require_known("value of of", of, get_args(Of))
        require_known("form", form, get_args(Form))
        if isinstance(tau, str) and tau != "sqrt":
            raise ValueError(f"tau is {tau!r}; it must be a positive number or 'sqrt'.")
        if not isinstance(tau, str) and not tau > 0:
            raise ValueError(f"tau is {tau}; it divides the similarities and must be positive.")
        if rank is not None and not 1 <= rank <= dim:
            raise ValueError(f"rank is {rank}; it must be between 1 and the width of the tokens, {dim}.")
        if form == "bilinear" and rank is None:
            raise ValueError("form='bilinear' compares vectors of two matrices R and Q (rank, d); give a rank, such as 64.")
        self.of, self.causal = of, causal
        self.tau = math.sqrt(dim if rank is None else rank) if isinstance(tau, str) else tau
        self.traits = Traits(sequence_aware=True, causal=causal, cacheable=causal)
        self.reads = ("attention",) if of == "attention" else ("attention.mask",) if causal else ()
        # Rows of variance 1/d: tokens of unit variance give vectors of unit variance, for which tau is the root of the rank.
        self.reduce = None if rank is None else nn.Parameter(torch.randn(rank, dim) / math.sqrt(dim))
        self.reduce_keys = nn.Parameter(torch.randn(rank, dim) / math.sqrt(dim)) if form == "bilinear" and rank else None

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        attention = context.attention if self.of == "attention" else None
        u = tokens if attention is None else context.zero_unusable(attention.output)
        query = key = u  # one object twice where they are equal
        if self.reduce is not None:
            query = linear_float32(u, self.reduce)
            key = query if self.reduce_keys is None else linear_float32(u, self.reduce_keys)
        coarse = self.reduce is not None and u.dtype == self.reduce.dtype == torch.bfloat16
        own, real, visible = gates, context.token_mask, context.visible_tokens
        levels = self.entropy_limits(logits, context, "similarity")
        if context.cache is not None:
            gates, key = context.cache.extend("similarity.gates", gates), context.cache.extend("similarity.u", key)
            real = context.cache.extend("similarity.real", context.real_tokens(tokens))
            key, gates, real = (visible_rows(rows, visible) for rows in (key, gates, real))
        causal, mask = (context.excludes_later_tokens, allowed_pairs(visible)) if self.causal else (False, None)
        mixed = softmax_mix(
            query,
            key,
            gates,
            scale=1 / self.tau,
            causal=causal,
            real=real,
            mask=mask,
            levels=levels,
            coarse=coarse,
        )
        return self.combine(own, mixed, context)

    @property
    def declares(self) -> InformerDeclarations:
        return replace(super().declares, cost=self._cost, mixing=self._mixing)

    def _cost(self, sizes: LayerSizes) -> Cost:
        if self.inert:
            return Cost("similarity")
        matrices = (self.reduce is not None) + (self.reduce_keys is not None)
        width = sizes.dim if self.reduce is None else self.reduce.shape[0]
        vector = FLOAT * width if matrices else sizes.number * sizes.dim
        # The score keeps the router's own input for its backward too.
        vectors = FLOAT * width * matrices if matrices else 0 if self.of == "tokens" else vector
        return Cost(
            "similarity",
            kept=vectors + FLOAT * (2 * sizes.experts + 1) + 2 * self.level_bytes,
            cached=FLOAT * sizes.experts + vector + 1 + self.level_bytes,
        )

    def _mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """Return the mixing. W depends on the router's input unless it is computed from the attention's output."""
        self.require_certificate()
        if self.of == "attention" and context.attention is not None:
            return Mixing(self.strength)
        rows = tokens.reshape(-1, tokens.shape[-1]).double()
        reduce, reduce_keys = (
            None if matrix is None else matrix.detach().double() for matrix in (self.reduce, self.reduce_keys)
        )
        real = context.real_tokens(tokens)
        return Mixing(self.strength, DotProductChange.at(rows, real, reduce, self.tau, norm, reduce_keys))


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
    stats       "running": the mean entropy of a head is a running mean over training batches. "batch", as in the paper: the
                mean over the real tokens of the current batch; then other sequences and later tokens choose the head
    strength, from_     see `TokenGraph`

    Of sequences of 1024 tokens and more, the running mean reads about SAMPLE tokens, in blocks at equal distances: they are
    enough for the mean of a head, and all tokens would cost as much as the rest of the router; stats="batch" reads all. With
    heads="all" there is no mean entropy, and mixing costs more than H times as much.
    """

    reads = ("attention", "attention.projection")
    entropy: Tensor
    seen: Tensor

    def __init__(
        self,
        dim: int,
        *,
        heads: int | Literal["all"],
        sigma: float | None = None,
        stats: Literal["running", "batch"] = "running",
        strength: Strength = 1.0,
        from_: From = "all",
    ) -> None:
        super().__init__(strength=strength, from_=from_)
        require_known("kind of statistics", stats, ("running", "batch"))
        if isinstance(heads, str) and heads != "all":
            raise ValueError(f"heads is {heads!r}; it must be the number of heads of the attention, or 'all'.")
        if not isinstance(heads, str) and heads < 1:
            raise ValueError(f"heads is {heads}; it must be at least 1.")
        if sigma is not None and not sigma > 0:
            raise ValueError(f"sigma is {sigma}; it divides distances and must be positive.")
        if heads == "all" and stats == "batch":
            raise ValueError("heads='all' chooses no head, so stats='batch' would have no effect; remove one of the two.")
        self.heads, self.stats = heads, stats
        self.sigma = math.sqrt(dim) if sigma is None else sigma
        independent = stats == "running"
        self.traits = Traits(causal=independent, batch_invariant=independent, cacheable=independent, sequence_aware=True)
        self.learns_entropy = heads != "all" and independent
        if self.learns_entropy and not isinstance(heads, str):
            self.register_buffer("entropy", torch.zeros(heads))
            self.register_buffer("seen", flag())
            self.register_statistics(entropies=torch.zeros(heads), tokens=torch.zeros(()))

    def update_state_where(self, due: Tensor) -> None:
        if self.learns_entropy:
            batch = self.get_buffer("staged_entropies"), self.get_buffer("staged_tokens")
            update_running_mean(self.entropy, self.seen, *batch, due, memory=ENTROPY_MEMORY, is_sum=True)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        attention = self._attention(context)
        if self.training and self.learns_entropy:
            self.stage_in_background(lambda: self._entropies(attention, tokens, context))
        heads = self._heads(attention, tokens, context)
        norms = self._norms(heads, attention, context)
        own, real = gates, context.token_mask
        levels = self.entropy_limits(logits, context, "attention")
        if context.cache is not None:
            gates = context.cache.extend("attention.gates", gates)
            real = context.cache.extend("attention.real", context.real_tokens(tokens))
            gates, real = (visible_rows(rows, context.visible_tokens) for rows in (gates, real))
        output = context.zero_unusable(attention.output)
        count = attention.query.shape[1]
        limits: dict[str, Any] = {"scale": _scale(attention), "causal": context.excludes_later_tokens, "real": real}
        # The log-weights are q.k scale + u.o / sigma^2 - |o|^2 / (2 sigma^2), without terms that are equal for all j:
        # u_i . o_j = H (W^T u_i) . v_j, plus a term of the bias.
        explained: list[dict[str, Any]] = [
            {
                "second": SecondProduct(linear_float32(output, head.across), head.value, count / self.sigma**2),
                "bias": norm / (-2 * self.sigma**2),
                "levels": levels,
            }
            for head, norm in zip(heads, norms, strict=True)
        ]
        if self.heads != "all":
            mixed = softmax_mix(heads[0].query, heads[0].key, gates, mask=heads[0].mask, **limits, **explained[0])
            return self.combine(own, mixed, context)
        by_head, evidence = [], []
        for head, terms in zip(heads, explained, strict=True):
            mixed, total = softmax_mix_with_total(head.query, head.key, gates, mask=head.mask, **limits, **terms)
            by_head.append(mixed)
            # log sum_j A_ij exp(...) over the tokens j that may inform i; A_ij is normalised over all that i attends to.
            every = gates.new_ones(*gates.shape[:2], 1)
            _, attended = softmax_mix_with_total(head.query, head.key, every, mask=head.mask, **limits)
            sees = total > -torch.inf
            evidence.append((total.where(sees, 0.0) - attended.where(sees, 0.0)).where(sees, IMPOSSIBLE))
        # sum_h H'_ih (sum_j W_ijh p_j): the heads are equally likely before u is seen.
        shares = torch.stack(evidence, -1).softmax(-1)  # (B,N,H)
        return self.combine(own, (shares.unsqueeze(-1) * torch.stack(by_head, -2)).sum(-2), context)

    @property
    def declares(self) -> InformerDeclarations:
        shared = super().declares
        return replace(
            shared,
            cost=self._cost,
            snapshot=(lambda: {**shared.snapshot(), "entropy": self.entropy}) if self.learns_entropy else shared.snapshot,
            mixing=self._mixing,
        )

    def _cost(self, sizes: LayerSizes) -> Cost:
        if self.inert:
            return Cost("attention posterior")
        width = 2 * sizes.key_width + sizes.value_width
        kept = sizes.number * width + FLOAT * (2 * sizes.value_width + 2 * sizes.experts + 2)
        heads, summed = (sizes.heads, 0) if self.heads == "all" else (1, FLOAT * self.heads + INTEGER)
        return Cost(
            "attention posterior",
            kept=heads * (kept + (FLOAT * 5 if self.heads == "all" else 0)) + 2 * self.level_bytes,
            cached=FLOAT * (sizes.experts + heads) + 1 + self.level_bytes,
            summed=summed,
            summed_again=summed if self.stats == "batch" else 0,
        )

    def _mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """Return the mixing. A perturbation of the router's input does not change the attention before it, and so not W."""
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

    def _heads(self, attention: Attention, tokens: Tensor, context: Context) -> list[_Head]:
        """Return the head with the lowest mean entropy, or all heads.

        The index of that head stays on the device, so that the host does not have to wait for it.
        """
        assert attention.projection is not None
        count = attention.query.shape[1]
        across = attention.projection.weight.unflatten(1, (count, -1)).permute(1, 2, 0).unsqueeze(0)  # (1,H,D_v,d)
        rows = (attention.query, attention.key, attention.value, across)
        if self.heads == "all":
            indices: list[Tensor | int] = [*range(count)]
            taken = [tuple(each[:, head * each.shape[1] // count] for each in rows) for head in range(count)]
        else:
            if self.learns_entropy:
                entropy = snapshot_for_backward(self.entropy, self.training)
            else:  # sums over the same tokens have the order of the means
                with torch.no_grad():
                    entropy = self._entropies(attention, tokens, context)["entropies"]
            best = entropy.argmin().view(1)
            indices, taken = [best], [take_heads(rows, best, count)]
        return [
            _Head(context.zero_unusable(query), key, value, across.squeeze(0), mask_of_head(attention.mask, index))
            for (query, key, value, across), index in zip(taken, indices, strict=True)
        ]

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
        """Return the sum of each head's entropy over the sampled real tokens and their number, in training over ranks."""
        # Every so many blocks of tokens are sampled.
        step = max(1, tokens.shape[1] // SAMPLE) if self.learns_entropy else 1
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
        sums = {"entropies": entropies.sum((0, 2)), "tokens": count}
        return {name: sum_over_ranks(value) for name, value in sums.items()} if self.sees_batch else sums


def _scale(attention: Attention) -> float:
    return attention.query.shape[-1] ** -0.5 if attention.scale is None else attention.scale


def visible_rows(rows: Tensor, visible: VisibleTokens | None) -> Tensor:
    """Return the cached rows of tokens whose keys attention still has: a sliding window drops the earliest."""
    # The same object where all are visible: then keys that equal queries are still known to.
    return rows if visible is None or rows.shape[1] == visible.keys else rows[:, -visible.keys :]


def masks_of_heads(mask: Tensor | None) -> Tensor | None:
    """Return the mask of all heads, with position biases if there are any, as (B or 1, heads or 1, N or 1, M)."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"the attention mask has dtype {mask.dtype}; expected bool (True where allowed) or floats to add to scores."
        )
    return mask.view(*[1] * (4 - mask.dim()), *mask.shape)


def mask_of_head(mask: Tensor | None, head: Tensor | int) -> Tensor | None:
    """Return the mask of one head, as (B or 1, N or 1, M)."""
    masks = masks_of_heads(mask)
    if masks is None or masks.shape[1] == 1:
        return None if masks is None else masks[:, 0]
    return masks[:, head] if isinstance(head, int) else masks.index_select(1, head).squeeze(1)


def allowed_pairs(visible: VisibleTokens | None) -> Tensor | None:
    """Return which pairs of tokens the mask allows, as bool; an additive mask allows values above FORBIDDEN."""
    mask = None if visible is None else mask_of_head(visible.mask, 0)
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > max(FORBIDDEN, torch.finfo(mask.dtype).min / 2)
