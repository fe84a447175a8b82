"""Run by test_remoe.py and test_clustering.py on one process or two: both must learn the same from the same batches.

python learning_on_ranks.py RANKS WHAT   (WHAT is "remoe", or a spread of `ac`)
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import Context, Routing, create_router
from holdfast.routing import Previous, join_routers


def losses_and_coefficients(ranks: int, rank: int) -> tuple[list[list[str]], list[str]]:
    """Return the losses of each batch and the last coefficients of layers that share one."""
    layers = [
        create_router("remoe", dim=6, experts=5, penalty="load", coefficient="model", l1=0.1, l1_rate=1.5) for _ in range(3)
    ]
    join_routers(layers)
    losses = []
    for _ in range(4):
        tokens, mask = torch.randn(4, 7, 6), torch.rand(4, 7) < 0.7
        mine = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        step: list[Tensor] = [layer(tokens[mine], Context(token_mask=mask[mine])).losses["l1"].detach() for layer in layers]
        total = torch.stack(step)
        if ranks > 1:  # the mean over ranks, as every engine computes it
            dist.all_reduce(total)
            total /= ranks
        losses.append([f"{value:.5f}" for value in total.tolist()])
    return losses, [f"{float(layer.eval().snapshot()['l1']):.6f}" for layer in layers]


def spreads(ranks: int, rank: int, spread: str) -> list[list[str]]:
    """Return the spreads of each cluster; ranks have unequal numbers of tokens."""
    router = create_router("ac", dim=5, experts=3, spread=spread)
    mine = slice(0, 4) if ranks == 1 else slice(0, 3) if rank == 0 else slice(3, 4)
    for _ in range(3):
        tokens, inputs = torch.randn(4, 11, 5), torch.randn(4, 11, 5).round(decimals=1)
        mask, first = torch.rand(4, 11) < 0.8, torch.randint(0, 3, (4, 11))
        gates = torch.nn.functional.one_hot(first[mine].flatten(), 3).float()
        routing = Routing(gates, gates, first[mine].reshape(-1, 1), torch.ones(len(gates), 1))
        router(tokens[mine], Context(token_mask=mask[mine], previous=Previous(inputs[mine], routing)))
    return [[f"{value:.5f}" for value in row] for row in router.eval().snapshot()["spreads"].tolist()]


def main(ranks: int, what: str) -> None:
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    learned = losses_and_coefficients(ranks, rank) if what == "remoe" else spreads(ranks, rank, what)
    if rank == 0:
        print(learned)
    if ranks > 1:
        dist.destroy_process_group()


main(int(sys.argv[1]), sys.argv[2])
