"""Run by test_gradient_scaling.py on one process or two: the scaled gradients of experts are those of the whole batch.

python scaling_on_ranks.py RANKS
"""

import sys

import torch
import torch.distributed as dist

from holdfast import Context, Experts, MoE, create_router


def main(ranks: int) -> None:
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    router = create_router("smoe[gradient_scaling=3,drop=0.4]", dim=8, experts=6)
    layer = MoE(router, Experts(8, 12, 6))
    for _ in range(2):  # the second forward drops other experts
        layer.zero_grad()
        tokens, mask = torch.randn(4, 11, 8) + 0.5, torch.rand(4, 11) < 0.8
        mine = slice(0, 4) if ranks == 1 else slice(0, 3) if rank == 0 else slice(3, 4)  # unequal numbers of tokens
        out, _ = layer(tokens[mine], Context(token_mask=mask[mine]))
        loss = (out * torch.linspace(-1, 1, 8)).sum(-1)[mask[mine]].square().sum() / mask.sum()
        loss.backward()
    gradients = [parameter.grad for parameter in layer.experts.parameters() if parameter.grad is not None]
    if ranks > 1:
        for gradient in gradients:
            dist.all_reduce(gradient)
    if rank == 0:
        print([f"{float(value):.5f}" for gradient in gradients for value in gradient.flatten(1).norm(dim=1)])
    if ranks > 1:
        dist.destroy_process_group()


main(int(sys.argv[1]))
