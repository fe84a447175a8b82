"""Run by test_clustering.py on one process or two: both must learn the same spreads from the same batches."""

import sys

import torch
import torch.distributed as dist

from holdfast import Context, Routing, create_router
from holdfast.routing import Previous


def main() -> None:
    ranks, spread = int(sys.argv[1]), sys.argv[2]
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    router = create_router("ac", dim=5, experts=3, spread=spread)
    for _ in range(3):
        tokens, inputs = torch.randn(4, 11, 5), torch.randn(4, 11, 5).round(decimals=1)
        mask, first = torch.rand(4, 11) < 0.8, torch.randint(0, 3, (4, 11))
        mine = slice(0, 3) if rank == 0 else slice(3, 4)  # unequal numbers of tokens
        mine = slice(0, 4) if ranks == 1 else mine
        gates = torch.nn.functional.one_hot(first[mine].flatten(), 3).float()
        routing = Routing(gates, gates, first[mine].reshape(-1, 1), torch.ones(len(gates), 1))
        router(tokens[mine], Context(token_mask=mask[mine], previous=Previous(inputs[mine], routing)))
    spreads = router.eval().snapshot()["spreads"]
    if rank == 0:
        print([[f"{value:.5f}" for value in row] for row in spreads.tolist()])
    if ranks > 1:
        dist.destroy_process_group()


main()
