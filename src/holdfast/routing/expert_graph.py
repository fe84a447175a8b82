"""The expert graph of SymphonySMoE (algorithm 1): experts that are chosen together vouch for each other.

g = p A^T, with A a running, normalised count of which experts the tokens choose together
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from holdfast.errors import unknown
from holdfast.kernels.backward import snapshot_for_backward
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.select import count_pairs
from holdfast.routing.declarations import FLOAT, Cost, Place
from holdfast.routing.parts import TINY, Informer
from holdfast.routing.records import Context
from holdfast.routing.selection import check_k
from holdfast.routing.state import StatefulPart, sum_over_ranks

Normalize = Literal["row", "conditional", "sinkhorn"]
SINKHORN_ROUNDS = 200


class ExpertGraph(Informer, StatefulPart):
    """g_j = sum_k a_jk p_k. Each batch stages C = Z^T Z, Z the 0/1 matrix of the top k raw logits of its real tokens.

    beta            A <- beta A + (1 - beta) A', A' the normalised C
    init            "zero" (the paper's best: the layer is silent until the first batch is committed), "identity",
                    "uniform", "kaiming" or "xavier", the last two by absolute value since gates are not negative
    normalize       "row"          a_jk = C_jk / sum_k C_jk (algorithm 1); g need not sum to 1
                    "conditional"  a_jk = C_jk / C_kk, the chance of j where k is chosen (eqn 7); g sums to k
                    "sinkhorn"     symmetric and doubly stochastic, from the identity: what proposition 1 assumes
    threshold       smaller entries count as 0 (a sparse graph)
    weights         (of the selector) are raw gates, as in the paper; `weights="softmax"` renormalises them, and is the
                    rule beside a token-side informer
    decay_unused    the paper's reading, where a row nobody chose fades; by default it keeps its value
    """

    side = "expert"
    entering: ClassVar[Mapping[str, Any]] = {"init": "identity"}  # a zero graph would silence a layer that works
    graph: Tensor

    def __init__(
        self,
        experts: int,
        k: int,
        *,
        beta: float = 0.9,
        init: Literal["zero", "identity", "uniform", "kaiming", "xavier"] | None = None,
        normalize: Normalize = "row",
        threshold: float = 0.0,
        decay_unused: bool = False,
    ) -> None:
        super().__init__()
        check_k(k, experts)
        if not 0 <= beta < 1:
            raise ValueError(f"beta is {beta}; it must be at least 0 and below 1, or the graph never learns.")
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold is {threshold}; entries of the graph lie between 0 and 1.")
        if normalize not in NORMALISED:
            raise ValueError(unknown("normalisation", normalize, NORMALISED))
        init = ("identity" if normalize == "sinkhorn" else "zero") if init is None else init
        if init not in INITIAL:
            raise ValueError(unknown("initialisation", init, INITIAL))
        if normalize == "sinkhorn" and init != "identity":
            raise ValueError(f"a sinkhorn graph starts at the identity, not at {init!r}, or it is not doubly stochastic.")
        self.k, self.beta, self.normalize, self.threshold, self.decay_unused = k, beta, normalize, threshold, decay_unused
        self.register_buffer("graph", INITIAL[init](experts))
        self.register_statistics(together=torch.zeros(experts, experts))

    def absorb(self) -> dict[str, Tensor]:
        together = self.get_buffer("staged_together")
        updated = self.beta * self.graph + (1 - self.beta) * NORMALISED[self.normalize](together)
        if self.decay_unused or self.normalize == "sinkhorn":  # a part of a doubly stochastic graph cannot stand still
            return {"graph": updated}
        chosen = together.diagonal() > 0
        return {"graph": updated.where(chosen.unsqueeze(1 if self.normalize == "row" else 0), self.graph)}

    def expert_graph(self) -> Tensor:
        """(E,E): the graph as it acts, without what is below the threshold."""
        graph = snapshot_for_backward(self.graph, self.training)
        return graph if self.threshold == 0 else graph.where(graph >= self.threshold, 0.0)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        graph = self.expert_graph()
        if self.training:
            self.learn(lambda: {"together": sum_over_ranks(count_pairs(logits.detach(), context.real(tokens), self.k))})
        return linear_float32(gates, graph)

    def cost(self, place: Place) -> Cost:
        """Gates times the graph, which has no gradient: 2 E^2 each way. Co-selections are one more such product."""
        mix = 2.0 * place.experts**2
        graph = FLOAT * place.experts * place.experts
        return Cost("expert graph", mix, mix, learning=mix, kept=FLOAT * place.experts, summed=graph)

    def snapshot(self) -> dict[str, Tensor]:
        return {"graph": self.expert_graph()}

    def spectral_gap(self) -> float:
        """|lambda_1| - |lambda_2|: how fast a disagreement between experts dies out."""
        sizes = torch.linalg.eigvals(self.expert_graph().double()).abs().sort(descending=True).values
        return float(sizes[0] - sizes[1]) if len(sizes) > 1 else float(sizes[0])

    def rho(self) -> float:
        """|A (I - 11^T/E)|_2: how much of a perturbation of p gets through (proposition 1)."""
        graph = self.expert_graph().double()
        return float(torch.linalg.matrix_norm(graph - graph.mean(1, keepdim=True), ord=2))

    def extra_repr(self) -> str:
        return f"experts={self.graph.shape[0]}, k={self.k}, beta={self.beta}, normalize={self.normalize}"


def _row(together: Tensor) -> Tensor:
    return together / together.sum(1, keepdim=True).clamp_min(TINY)


def _conditional(together: Tensor) -> Tensor:
    return together / together.diagonal().clamp_min(TINY)


def _sinkhorn(together: Tensor) -> Tensor:
    """D C D with unit row and column sums, by the symmetric iteration x <- sqrt(x / C x); 1 on an unused diagonal."""
    counts = together.double() + torch.diag((together.diagonal() == 0).double())
    counts = counts / counts.amax()
    scale = counts.sum(1).rsqrt()
    for _ in range(SINKHORN_ROUNDS):
        scale = (scale / (counts @ scale)).sqrt()
    return (scale.unsqueeze(1) * counts * scale).float()


NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {"row": _row, "conditional": _conditional, "sinkhorn": _sinkhorn}

INITIAL: dict[str, Callable[[int], Tensor]] = {
    "zero": lambda experts: torch.zeros(experts, experts),
    "identity": lambda experts: torch.eye(experts),
    "uniform": lambda experts: torch.rand(experts, experts),
    "kaiming": lambda experts: nn.init.kaiming_uniform_(torch.empty(experts, experts)).abs(),
    "xavier": lambda experts: nn.init.xavier_uniform_(torch.empty(experts, experts)).abs(),
}
