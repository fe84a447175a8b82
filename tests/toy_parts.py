"""Two small informers, one on each side, that are causal, cacheable and ignore padding."""

import torch
from torch import Tensor

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.routing import Context, Informer, Linear, Router, Routing, TopK, Traits


class FixedGraph(Informer):
    """gates A^T with a fixed row-stochastic A: the expert side."""

    side = "expert"
    graph: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        graph = torch.eye(experts) + 0.3 * torch.rand(experts, experts, generator=torch.Generator().manual_seed(3))
        self.register_buffer("graph", graph / graph.sum(1, keepdim=True))

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        return linear_float32(gates, self.graph)


class RunningMean(Informer):
    """The mean of the gates of all real tokens so far, or of the whole sequence where the context is not causal."""

    side = "token"
    traits = Traits(sequence_aware=True)

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        new = gates.shape[1]
        real = gates.new_ones(gates.shape[:2]) if context.token_mask is None else context.token_mask.to(gates.dtype)
        if context.cache is not None:
            gates, real = context.cache.extend("gates", gates), context.cache.extend("real", real)
        total, count = gates * real.unsqueeze(-1), real.unsqueeze(-1)
        if context.causal:
            mean = total.cumsum(1) / count.cumsum(1).clamp_min(1)
        else:
            mean = (total.sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp_min(1)).expand_as(gates)
        return (0.5 * gates + 0.5 * mean)[:, gates.shape[1] - new :]


def token_graph(tokens: int, real: Tensor, causal: bool) -> Tensor:
    """`RunningMean` as the explicit N x N matrix it is, for one sequence."""
    graph = torch.zeros(tokens, tokens)
    for i in range(tokens):
        allowed = [j for j in range(tokens) if real[j] and (j <= i or not causal)]
        for j in allowed:
            graph[i, j] = 0.5 / len(allowed)
        graph[i, i] += 0.5
    return graph


def build(*informers: Informer, dim: int = 24, experts: int = 7, k: int = 2) -> Router:
    torch.manual_seed(0)
    return Router(Linear(dim, experts), TopK(experts, k), informers)


def reference(router: Router, tokens: Tensor, context: Context) -> Routing:
    """G = TokenGraph P ExpertGraph^T with explicit matrices, one sequence at a time; then top-k, renormalised."""
    score, select = router.score, router.select
    assert isinstance(score, Linear) and isinstance(select, TopK)
    logits = tokens @ score.weight.t()
    graph = torch.eye(router.experts)
    for informer in router.informers:
        graph = informer.graph if isinstance(informer, FixedGraph) else graph
    mixed = []
    for sequence, gates in enumerate(logits.softmax(-1)):
        real = torch.ones(len(gates)).bool() if context.token_mask is None else context.token_mask[sequence]
        if any(isinstance(informer, RunningMean) for informer in router.informers):
            gates = token_graph(len(gates), real, context.causal) @ gates
        mixed.append(gates @ graph.t())
    gates = torch.cat(mixed)
    weights, experts = gates.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, : select.k], experts[:, : select.k]
    return Routing(logits.flatten(0, 1), gates, experts, weights / weights.sum(-1, keepdim=True))
