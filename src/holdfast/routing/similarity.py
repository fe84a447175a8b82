"""Token similarity (Mutual-Inform SMoE, definition 1): similar tokens of a sequence share their gates."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.errors import unknown_name
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.token_mixing import softmax_mix
from holdfast.routing.bounds import DotProductChange, Norm
from holdfast.routing.declarations import FLOAT, Cost, LayerSizes, Mixing, mixing_flops, projection_flops
from holdfast.routing.parts import Traits
from holdfast.routing.records import Context
from holdfast.routing.token_graph import From, Strength, TokenGraph, allowed_pairs, visible_rows

Of = Literal["tokens", "attention"]
Form = Literal["symmetric", "bilinear"]


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

    definition = 2  # the first compared the attention's output, with tau=1
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
        if of not in get_args(Of):
            raise ValueError(unknown_name("value of of", of, get_args(Of)))
        if form not in get_args(Form):
            raise ValueError(unknown_name("form", form, get_args(Form)))
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
        query, key = self._compared(u)
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

    def _compared(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors R u and Q u whose products are the similarities; one object twice where they are equal."""
        if self.reduce is None:
            return u, u
        query = linear_float32(u, self.reduce)
        return query, query if self.reduce_keys is None else linear_float32(u, self.reduce_keys)

    def cost(self, sizes: LayerSizes) -> Cost:
        if self.inert:
            return Cost("similarity")
        matrices = [matrix for matrix in (self.reduce, self.reduce_keys) if matrix is not None]
        width = matrices[0].shape[0] if matrices else sizes.dim
        reducing = sum(map(projection_flops, matrices))
        vector = FLOAT * width if matrices else sizes.number * sizes.dim
        # The score keeps the router's own input for its backward too.
        vectors = FLOAT * width * len(matrices) if matrices else 0 if self.of == "tokens" else vector
        forward, backward = mixing_flops(width, sizes)
        return Cost(
            "similarity",
            forward=reducing + forward,
            backward=2 * reducing + backward,
            kept=vectors + FLOAT * (2 * sizes.experts + 1) + 2 * self.level_bytes,
            cached=FLOAT * sizes.experts + vector + 1 + self.level_bytes,
        )

    def mixing(self, tokens: Tensor, context: Context, norm: Norm) -> Mixing:
        """Declare the mixing. W depends on the router's input unless it is computed from the attention's output."""
        self.require_certificate()
        if self.of == "attention" and context.attention is not None:
            return Mixing(self.strength)
        rows = tokens.reshape(-1, tokens.shape[-1]).double()
        reduce, reduce_keys = (
            None if matrix is None else matrix.detach().double() for matrix in (self.reduce, self.reduce_keys)
        )
        real = context.real_tokens(tokens)
        return Mixing(self.strength, DotProductChange.at(rows, real, reduce, self.tau, norm, reduce_keys))
