"""Run by test_remoe.py on one process or two: both must print the same losses and coefficients for the same batches."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import Context, create_router
from holdfast.routing import join_routers


def main() -> None:
    ranks = int(sys.argv[1])
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    layers = [
        create_router("remoe", dim=6, experts=5, penalty="load", coefficient="model", l1=0.1, l1_rate=1.5) for _ in range(3)
    ]
    join_routers(layers)
    losses = []
    for _ in range(4):
        tokens = torch.randn(4, 7, 6)
        mask = torch.rand(4, 7) < 0.7
        mine = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        step: list[Tensor] = [layer(tokens[mine], Context(token_mask=mask[mine])).losses["l1"].detach() for layer in layers]
        total = torch.stack(step)
        if ranks > 1:  # the mean over ranks, as every engine computes it
            dist.all_reduce(total)
            total /= ranks
        losses.append(total)
    coefficients = [float(layer.eval().snapshot()["l1"]) for layer in layers]
    if rank == 0:
        print([[f"{value:.5f}" for value in step.tolist()] for step in losses], [f"{value:.6f}" for value in coefficients])
    if ranks > 1:
        dist.destroy_process_group()


main()
