"""The expert graph of SymphonySMoE (algorithm 1): experts that are selected together raise each other's gates.

g = p A^T, with A a running mean of normalised counts of how often two experts are selected together
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from holdfast.errors import require_known
from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.operators import snapshot_for_backward
from holdfast.kernels.select import count_pairs
from holdfast.routing.declarations import FLOAT, Cost
from holdfast.routing.parts import TINY, Informer, InformerDeclarations
from holdfast.routing.records import Context
from holdfast.routing.selection import check_k
from holdfast.routing.state import StatefulPart, sum_over_ranks

Normalize = Literal["row", "conditional", "sinkhorn"]
SINKHORN_ROUNDS = 200


class ExpertGraph(Informer, StatefulPart):
    """Gates g_i = sum_j a_ij p_j. C_ij counts the real tokens of a batch that have experts i and j among the k best logits.

    Experts are selected by g, but counted by the logits.

    beta            A <- beta A + (1 - beta) A', with A' the normalised C
    init            "zero" (the best in the paper: the layer outputs 0 until the first training batch), "identity",
                    "uniform", "kaiming" or "xavier"; the last two use absolute values, because gates are not negative. The
                    default is "identity" with trained weights (`reroute`, or `sparsify` with copies) and for a sinkhorn
                    graph, else "zero"
    normalize       "row"          a_ij = C_ij / sum_j C_ij (algorithm 1); g need not sum to 1
                    "conditional"  a_ij = C_ij / C_jj, the share of the tokens of j that also select i (eqn 7); g sums to k
                    "sinkhorn"     symmetric and doubly stochastic, starting at the identity, as proposition 1 assumes
    threshold       entries below it count as 0 (a sparse graph)
    weights         (option of the selector) raw gates by default, as in the paper; `weights="softmax"` renormalises them,
                    and is the default beside a token-side informer
    decay_unused    let rows of experts without tokens decay, as in the paper; by default they keep their values
    """

    side = "expert"
    pretrained_defaults: ClassVar[Mapping[str, Any]] = {"init": "identity"}  # with a zero graph the layer would output 0
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
            raise ValueError(f"beta is {beta}; it must be at least 0 and below 1, or the graph never changes.")
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold is {threshold}; entries of the graph lie between 0 and 1.")
        require_known("normalisation", normalize, NORMALISED)
        init = ("identity" if normalize == "sinkhorn" else "zero") if init is None else init
        require_known("initialisation", init, INITIAL)
        if normalize == "sinkhorn" and init != "identity":
            raise ValueError(f"init is {init!r}; a sinkhorn graph must start at 'identity', which is doubly stochastic.")
        self.k, self.beta, self.normalize, self.threshold, self.decay_unused = k, beta, normalize, threshold, decay_unused
        self.register_buffer("graph", INITIAL[init](experts))
        self.register_statistics(together=torch.zeros(experts, experts))

    def new_state(self) -> dict[str, Tensor]:
        together = self.get_buffer("staged_together")
        updated = self.beta * self.graph + (1 - self.beta) * NORMALISED[self.normalize](together)
        if self.decay_unused or self.normalize == "sinkhorn":  # rows of a doubly stochastic graph change together
            return {"graph": updated}
        chosen = together.diagonal() > 0
        return {"graph": updated.where(chosen.unsqueeze(1 if self.normalize == "row" else 0), self.graph)}

    def expert_graph(self) -> Tensor:
        """Return A (E,E), with 0 for entries below the threshold."""
        graph = snapshot_for_backward(self.graph, self.training)
        return graph if self.threshold == 0 else graph.where(graph >= self.threshold, 0.0)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        graph = self.expert_graph()
        if self.training:
            self.stage_in_background(
                lambda: {"together": sum_over_ranks(count_pairs(logits.detach(), context.checked_mask(tokens), self.k))}
            )
        return linear_float32(gates, graph)

    @property
    def declares(self) -> InformerDeclarations:
        return InformerDeclarations(
            cost=lambda sizes: Cost("expert graph", kept=FLOAT * sizes.experts, summed=FLOAT * sizes.experts**2),
            snapshot=lambda: {"graph": self.expert_graph()},
            graph=self.expert_graph,
        )


def _sinkhorn(together: Tensor) -> Tensor:
    """Return D C D with row and column sums of 1, by the symmetric iteration x <- sqrt(x / C x); C_jj = 1 if j is unused."""
    counts = together.double() + torch.diag((together.diagonal() == 0).double())
    counts = counts / counts.amax()
    scale = counts.sum(1).rsqrt()
    for _ in range(SINKHORN_ROUNDS):
        scale = (scale / (counts @ scale)).sqrt()
    return (scale.unsqueeze(1) * counts * scale).float()


NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda together: together / together.sum(1, keepdim=True).clamp_min(TINY),
    "conditional": lambda together: together / together.diagonal().clamp_min(TINY),
    "sinkhorn": _sinkhorn,
}

INITIAL: dict[str, Callable[[int], Tensor]] = {
    "zero": lambda experts: torch.zeros(experts, experts),
    "identity": lambda experts: torch.eye(experts),
    "uniform": lambda experts: torch.rand(experts, experts),
    "kaiming": lambda experts: nn.init.kaiming_uniform_(torch.empty(experts, experts)).abs(),
    "xavier": lambda experts: nn.init.xavier_uniform_(torch.empty(experts, experts)).abs(),
}
