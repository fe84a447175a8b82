"""Routers that choose experts by token id: hash layers, and StableMoE, which learns the assignment and then freezes it.

    hash         experts = table[id], a fixed random table; weights 1/k               (Roller et al. 2021)
    stablemoe    stage 1: the k best sigmoid scores choose, and a distilled router, E W[id], learns to predict the choice;
                 stage 2: experts = table[id], the k best of the distilled router at the end of stage 1; the sigmoid scores
                 of the chosen experts stay trainable weights                         (Dai et al. 2022)

Their sets do not depend on the hidden states: no perturbation of a token changes them. An id is known if it is at least 0
and less than `vocabulary`; on a GPU, an unknown id stops the process with an error of the device.
"""

import heapq
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.select import top
from holdfast.routing.declarations import FLOAT, SIGMOID, ActiveExperts, Cost, Shares, selection_bytes
from holdfast.routing.parts import NOT_BY_GATES, Score, ScoreDeclarations, Selector, SelectorDeclarations
from holdfast.routing.records import Context
from holdfast.routing.rules import Scores, Selection, gather_slots
from holdfast.routing.selection import by_weight, check_k
from holdfast.routing.state import flag, is_set, mean_over_ranks, several_ranks

NOT_CHOSEN = -104.0  # the logit of an expert that is not in a token's row of the table: its softmax is 0 in float32
BY_TOKEN_ID = "chooses experts by token id, and none is next best"  # why these selectors refuse expert dropout
SEED_STEP = 1_000_003  # a prime: other layers and seeds give other tables


class HashedIds(Score):
    """logits = 0 for the k experts in the token id's row of a fixed table, and -104 for all others: gates are 1/k and 0.

    vocabulary   number of token ids; in a Hugging Face model, that of its config
    seed         of the table
    depth        the layer's number, so that layers have different tables; a model supplies it
    balanced     fill the table so that every expert gets the same share of the text, as far as whole ids allow: ids in order
                 of frequency, each to the k experts with the least load so far. Without `frequencies`, all ids count alike
    frequencies  how often each id occurs, one number for each; or call `use_token_counts` later, as training of recipes does
    """

    reads = ("token_ids",)
    table: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        vocabulary: int,
        seed: int = 0,
        depth: int = 0,
        balanced: bool = False,
        frequencies: list[float] | None = None,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        check_vocabulary(vocabulary)
        if frequencies is not None and not balanced:
            raise ValueError("frequencies are given, but balanced is false; add balanced=True.")
        self.dim, self.experts, self.k, self.vocabulary, self.balanced = dim, experts, k, vocabulary, balanced
        self.seed, self.has_frequencies = seed * SEED_STEP + depth, frequencies is not None
        self.register_buffer("table", torch.zeros(vocabulary, k, dtype=torch.int32))
        if not balanced and not self.table.is_meta:
            self.table.copy_(self._random_table())
        self.use_token_counts(torch.ones(vocabulary) if frequencies is None else torch.as_tensor(frequencies))

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        experts = rows_of(self.table, known_ids(tokens, context, self.vocabulary))
        logits = torch.full((*experts.shape[:2], self.experts), NOT_CHOSEN, device=experts.device)
        return logits.scatter(-1, experts, 0.0)

    def use_token_counts(self, counts: Tensor) -> None:
        """Fill the table again by how often each id occurs, if it is `balanced`."""
        if not self.balanced or self.table.is_meta:
            return
        if counts.shape != (self.vocabulary,) or not bool((counts >= 0).all()):
            raise ValueError(
                f"frequencies have shape {tuple(counts.shape)}; expected one number that is not negative for each of the "
                f"{self.vocabulary} token ids."
            )
        self.table.copy_(self._balanced_table(counts.double().cpu()))

    @property
    def declares(self) -> ScoreDeclarations:
        return ScoreDeclarations(
            cost=lambda sizes: Cost("score"),
            reads_tokens=False,
            scores_all=False,
            wants_token_counts=self.balanced and not self.has_frequencies,
        )

    def _generator(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(self.seed)

    def _random_table(self) -> Tensor:
        """Return (vocabulary,k): k distinct experts for each id, ascending, all sets equally likely."""
        generator = self._generator()
        table = torch.empty(self.vocabulary, 0, dtype=torch.int64, device="cpu")
        for chosen in range(self.k):
            drawn = torch.randint(self.experts - chosen, (self.vocabulary,), generator=generator, device="cpu")
            for earlier in table.unbind(1):  # ascending: skip those that are taken
                drawn = drawn + (drawn >= earlier)
            table = torch.cat([table, drawn.unsqueeze(1)], dim=1).sort(1).values
        return table.int()

    def _balanced_table(self, counts: Tensor) -> Tensor:
        """Return (vocabulary,k): each id, from the most frequent on, goes to the k experts with the least load so far.

        Ids of equal frequency come in random order, and experts of equal load by their index in a random order.
        """
        generator = self._generator()
        shuffled = torch.randperm(self.vocabulary, generator=generator, device="cpu")
        order = shuffled[counts[shuffled].argsort(descending=True, stable=True)]
        names = torch.randperm(self.experts, generator=generator, device="cpu").tolist()
        load = [(0.0, expert) for expert in range(self.experts)]
        table = [[0] * self.k] * self.vocabulary
        # A heap has the expert with the least load first.
        for token, count in zip(order.tolist(), counts[order].tolist(), strict=True):
            taken = [heapq.heappop(load) for _ in range(self.k)]
            table[token] = sorted(names[expert] for _, expert in taken)
            for total, expert in taken:
                heapq.heappush(load, (total + count, expert))
        return torch.tensor(table, dtype=torch.int32, device="cpu")


class EqualWeights(Selector):
    """Select the k experts with the largest logits, each with the weight 1/k; the selector of `hash`."""

    ragged = False

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        check_k(k, experts)
        self.experts, self.k = experts, k

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        experts = top(scores.key, self.k)
        return Selection(experts, torch.full_like(experts, 1, dtype=torch.float32) / self.k, scores.gates)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        in_use = experts < self.experts
        share = 1 / in_use.sum(-1, keepdim=True).clamp_min(1)
        return live.weights_if_same_set(experts, share.where(in_use, 0.0))

    @property
    def declares(self) -> SelectorDeclarations:
        return SelectorDeclarations(
            cost=lambda sizes: Cost("selection", kept=selection_bytes(self.k, sizes)),
            shares=lambda: Shares(None, equal=True),
            active=lambda sizes: ActiveExperts(self.k, self.k, self.k),
            refuses_informers=NOT_BY_GATES,
            takes_noise=False,
            refuses_dropout=BY_TOKEN_ID,
        )


class Distilled(Selector):
    """StableMoE: learn in stage 1 which experts a token id goes to, then keep this assignment in stage 2.

    vocabulary   number of token ids; in a Hugging Face model, that of its config
    stage        the training progress, from 0 to 1, at which stage 2 begins; it never goes back
    width        of the distilled router's embedding of an id
    distill      coefficient of its loss in stage 1: the cross-entropy of its prediction, the mean over the k chosen experts

    Weights are the sigmoids of the chosen experts' logits. In evaluation the distilled router chooses in both stages. The
    assignment of stage 2 is a table, a buffer, so no weight decay, rounding or training changes it. In stage 2 the embedding
    and the matrix of the distilled router are not used and not trained: they get no gradient, or on several ranks a gradient
    of 0, because DDP stops at a parameter without one. There is no balance loss in stage 2.
    """

    reads = ("token_ids",)
    coefficients = ("distill",)
    gate = SIGMOID
    ragged = False
    table: Tensor
    frozen: Tensor

    def __init__(
        self, experts: int, k: int, *, vocabulary: int, stage: float = 0.1, width: int = 50, distill: float = 1.0
    ) -> None:
        super().__init__()
        check_k(k, experts)
        check_vocabulary(vocabulary)
        if not 0 <= stage <= 1:
            raise ValueError(f"stage is {stage}; it is a training progress, from 0 to 1.")
        if width < 1:
            raise ValueError(f"width is {width}; the embedding of a token id is at least 1 wide.")
        if not distill >= 0:
            raise ValueError(f"distill is {distill}; the coefficient of a loss must not be negative.")
        self.experts, self.k, self.vocabulary, self.stage, self.distill = experts, k, vocabulary, stage, distill
        self.embedding = nn.Parameter(torch.randn(vocabulary, width))
        self.predictor = nn.Parameter(torch.empty(experts, width).uniform_(-(width**-0.5), width**-0.5))
        self.register_buffer("table", torch.zeros(vocabulary, k, dtype=torch.int32))
        self.register_buffer("frozen", flag())  # 1 in stage 2
        self._uses_table_only = False  # whether it is known without reading the buffer that this is stage 2

    @torch.no_grad()
    def progress(self, fraction: float) -> None:
        if fraction >= self.stage and not self._uses_table_only and not bool(self.frozen):
            embedding, predictor = (_whole(parameter) for parameter in (self.embedding, self.predictor))
            self.table.copy_(top(linear_float32(embedding, predictor), self.k))
            self.frozen.fill_(1)
            self._stop_training()

    def train(self, mode: bool = True) -> Self:
        """Set the mode. A router that was loaded in stage 2 stops training its distilled router here."""
        if mode and not self._uses_table_only and not self.frozen.is_meta and bool(self.frozen):
            self._stop_training()
        return super().train(mode)

    def _stop_training(self) -> None:
        if not several_ranks():
            self._uses_table_only = True
            for parameter in (self.embedding, self.predictor):
                parameter.requires_grad_(False)
                parameter.grad = None

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        ids = known_ids(tokens, context, self.vocabulary)
        experts, losses = rows_of(self.table, ids), {}
        if not self._uses_table_only:
            predicted = linear_float32(F.embedding(ids, self.embedding), self.predictor)
            choice = top(scores.key if self.sees_batch else predicted, self.k)
            if self.training and self.learning:
                losses["distill"] = self._loss(predicted, choice, tokens, context)
            experts = torch.where(is_set(self.frozen), experts, choice)
        experts, weights = by_weight(experts, scores.gates.gather(-1, experts))
        return Selection(experts, weights, scores.gates, losses)

    def _loss(self, predicted: Tensor, choice: Tensor, tokens: Tensor, context: Context) -> Tensor:
        """Return the weighted cross-entropy of the prediction, the mean over the real tokens of all ranks; 0 in stage 2."""
        real = context.real_tokens(tokens)
        each = -predicted.log_softmax(-1).gather(-1, choice).mean(-1)
        total = each.where(real, 0.0).sum()
        whole, count = mean_over_ranks(torch.stack([total.detach(), real.sum().to(total.dtype)]))
        mean = (whole + (total - total.detach())) / count.where(count > 0, 1.0)
        return self.distill * mean * (~is_set(self.frozen)).to(mean.dtype)

    def balance_groups(self, tokens: Tensor, context: Context) -> Tensor:
        """Return one group with all tokens in stage 1, and with none in stage 2."""
        return (~is_set(self.frozen)).expand(*tokens.shape[:2], 1)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return live.weights_if_same_set(experts, gather_slots(scores.gates, experts))

    @property
    def declares(self) -> SelectorDeclarations:
        sums = 2 * FLOAT  # in stage 1
        return SelectorDeclarations(
            cost=lambda sizes: Cost(
                "selection",
                kept=selection_bytes(self.k, sizes) + FLOAT * self.experts,
                summed=sums,
                summed_again=sums,
            ),
            active=lambda sizes: ActiveExperts(self.k, self.k, self.k),
            snapshot=lambda: {"frozen": self.frozen},
            fixed_sets=True,
            refuses_informers=NOT_BY_GATES,
            refuses_dropout=BY_TOKEN_ID,
        )


def check_vocabulary(vocabulary: int) -> None:
    """Raise ValueError if there are no token ids."""
    if vocabulary < 1:
        raise ValueError(f"vocabulary is {vocabulary}; there must be at least 1 token id.")


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """Return (B,N,k) int64: the row of each of `ids (B,N)` in `table (vocabulary,k)`."""
    return table.index_select(0, ids.flatten()).view(*ids.shape, table.shape[1]).long()


def known_ids(tokens: Tensor, context: Context, vocabulary: int) -> Tensor:
    """Return (B,N): the ids of `tokens (B,N,d)`; raise ValueError if they are missing or unknown."""
    ids = context.token_ids
    if ids is None:
        raise ValueError(
            "this router chooses experts by token id, and there are none: call the whole model with input_ids, not with "
            "inputs_embeds, or pass Context(token_ids=...)."
        )
    return context.known_numbers(ids, "token_ids", vocabulary, tokens)


def _whole(parameter: Tensor) -> Tensor:
    """Return a parameter as one tensor; FSDP2 has sharded it outside of a forward."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter if gather is None else gather()
