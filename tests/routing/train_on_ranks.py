"""Five training steps on this process's share of the batch, then the state to a file; run by test_distributed.py.

python train_on_ranks.py ROUTER OUTPUT   (alone, or under torchrun)
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from test_training import context_for
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

OPTIONS: dict[str, dict[str, Any]] = {"ac+symphony+attention+smooth": {"heads": 2, "init": "identity"}, "remoe": {"l1": 0.1}}


class Objective(nn.Module):
    """The layer with its loss, so that DDP sees a scalar."""

    def __init__(self, name: str) -> None:
        super().__init__()
        router = holdfast.router(name, dim=16, experts=8, **OPTIONS[name])
        self.layer = holdfast.MoE(router, holdfast.Experts(16, 16, 8))

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        out, routing = self.layer(tokens, context_for(tokens, 8, real))
        return out.square().mean() + routing.loss


def main(name: str, path: str) -> None:
    rank, world = 0, 1
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    objective = Objective(name)
    model = DistributedDataParallel(objective) if world > 1 else objective
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        tokens = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(step))
        real = torch.ones(4, 24, dtype=torch.bool)
        if (
            name != "remoe"
        ):  # its L1 loss is a mean over the real tokens at hand: shares must be equal to average to the whole
            real[3, 20:] = False
        share = slice(rank * 4 // world, (rank + 1) * 4 // world)
        optimizer.zero_grad()
        model(tokens[share], real[share]).backward()
        optimizer.step()
    objective.eval()
    state = {key: value.tolist() for key, value in objective.layer.router.state_dict().items()}
    with open(f"{path}.{world}.{rank}.json", "w") as file:
        json.dump(state, file)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
