"""Run by test_fixed.py on two processes: DDP over a StableMoE router, with a batch of other size on each rank.

Gradients of stage 1, the table of stage 2 and the losses by modality must be those of one process with both batches.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import Context, Losses, Router

DIM, EXPERTS, VOCABULARY, STEPS = 12, 6, 50, 6
REAL = torch.tensor([True] * 7 + [False] * 3)  # the first batch; all tokens of the second are real


def build() -> Router:
    torch.manual_seed(0)
    options: dict[str, Any] = {"vocabulary": VOCABULARY, "k": 2, "losses": Losses(balance=0.5, importance=0.1, load=0.1)}
    return holdfast.create_router("modality+stablemoe", dim=DIM, experts=EXPERTS, stage=0.5, **options)


class Weighted(nn.Module):
    """The routers' losses, and a loss of the weights that is a mean over all tokens, real or not."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, tokens: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        modality = (ids < VOCABULARY // 3).long()
        routing = self.router(tokens, Context(token_ids=ids, modality=modality, token_mask=mask))
        return routing.weights.square().mean() + routing.loss


def batches(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens, ids = torch.randn(2, 10, DIM, generator=generator), torch.randint(VOCABULARY, (2, 10), generator=generator)
    return [(tokens[:1], ids[:1], REAL.unsqueeze(0)), (tokens[1:], ids[1:], torch.ones(1, 10, dtype=torch.bool))]


def train(module: nn.Module, router: Router, rank: int | None) -> list[Tensor]:
    optimizer = torch.optim.AdamW(router.parameters(), lr=0.02, weight_decay=0.3)
    for step in range(STEPS):
        router.progress(step / STEPS)
        router.train()
        both = batches(step)
        batch = both[rank] if rank is not None else tuple(torch.cat(parts) for parts in zip(*both, strict=True))
        optimizer.zero_grad()
        module(*batch).backward()
        optimizer.step()
    select = router.select
    return [router.score.get_parameter("weight"), select.get_buffer("table"), select.get_buffer("frozen")]


alone = train(Weighted(router := build()), router, None)
dist.init_process_group("gloo")
rank = dist.get_rank()
module = Weighted(build())
together = train(DistributedDataParallel(module), module.router, rank)
torch.testing.assert_close(together, copy.deepcopy(alone), rtol=1e-4, atol=1e-6)
assert bool(together[2])
dist.barrier()
print("equal", flush=True)
dist.destroy_process_group()
