"""A router of your own with certificate and cost: run it to check it, or give the file to a command to use its name.

    python examples/write_a_router.py                                                                # the conformance suite
    holdfast plan llama --experts 64 --routers smoe,low-rank --plugin examples/write_a_router.py     # its costs

docs/tutorials/write-a-router.md explains each method.
"""

import argparse

import torch
from torch import Tensor, nn

import holdfast
from holdfast.routing import (
    Context,
    Cost,
    Order,
    Router,
    Routing,
    Score,
    ScoreDeclarations,
    Values,
    gamma,
    linear_float32,
    unit,
)
from holdfast.testing import check_router


@holdfast.register("low-rank", stage="score", about="scores through a few dimensions", paper="examples/write_a_router.py")
class LowRank(Score):
    """logits = B A x, with A (rank, d) and B (E, rank)."""

    def __init__(self, dim: int, experts: int, *, rank: int = 4) -> None:
        super().__init__()
        if not 1 <= rank <= min(dim, experts):
            raise ValueError(f"rank is {rank}; it must be at least 1 and at most {min(dim, experts)}, the smaller size.")
        self.dim, self.experts, self.rank = dim, experts, rank
        self.down = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        self.up = nn.Parameter(torch.randn(experts, rank) / rank**0.5)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return linear_float32(linear_float32(tokens, self.down), self.up)

    @property
    def declares(self) -> ScoreDeclarations:
        return ScoreDeclarations(cost=lambda sizes: Cost("score", kept=4 * (self.rank + sizes.experts)), order=self.order)

    def order(self, tokens: Tensor, context: Context) -> Order:
        up, down = self.up.detach().double(), self.down.detach().double()
        size = (up.abs() @ down.abs()).norm(dim=-1)
        terms = gamma(self.dim + self.rank + 8, unit(torch.float32))
        return Order(matrix=up @ down, rounding=lambda lengths: terms * size * lengths, values=Values())


def reference(router: Router, tokens: Tensor, context: Context) -> Routing:
    """The formula, token by token; then the two best experts, with weights that sum to 1."""
    down, up = router.score.get_parameter("down"), router.score.get_parameter("up")
    logits = torch.stack([up @ (down @ token) for token in tokens.flatten(0, 1)])
    gates = logits.softmax(-1)
    weights, experts = gates.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :2], experts[:, :2]
    return Routing(logits, gates, experts, weights / weights.sum(-1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    report = check_router("low-rank", reference=reference)
    print(f"{len(report.passed)} checks passed, {len(report.skipped)} skipped")


if __name__ == "__main__":
    main()
