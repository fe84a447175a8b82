"""Batches for two ranks, and what a router makes of them: on each rank, or in one process that has both."""

from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor

from holdfast import Context, Losses, create_router

BALANCED = [
    "sinkhorn[bias=running]",
    "sinkhorn[sparsity=3,bias=running]",
    "symphony[init=kaiming]+sinkhorn",
    "base",
    "base, k=2",
]
LIMITED = [
    "capacity[factor=0.9]",
    "capacity[factor=0.9,order=position]",
    "capacity[factor=0.3:0.9:1.4:0.6:2]",
    "capacity[factor=0.3:0.9:1.4:0.6:2,policy=next]",
    "switch+capacity[factor=0.8,policy=next]",
    "top-p[p=0.15]+capacity[factor=0.7,policy=reroute]",
    "sinkhorn[bias=running]+capacity[factor=0.9,policy=reroute,order=position]",
]
LENGTHS = {0: [(2, 9), (1, 20), (3, 4)], 1: [(3, 9), (2, 20), (1, 4)]}  # of rank and step: sequences and tokens


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of a rank in a step, and which of them are real."""
    sequences, length = LENGTHS[rank][step]
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randn(sequences, length, 12, generator=generator) + torch.linspace(-1, 1, 12)
    real = torch.rand(sequences, length, generator=generator) < 0.8
    real[:, 0] = True
    return tokens, real


def outcome(name: str, rank: int | None) -> dict[str, Any]:
    """Return experts, weights, drops, gradients and state after three steps; `rank=None` has the tokens of both ranks."""
    torch.manual_seed(0)
    name, _, k = name.partition(", k=")
    router = create_router(name, dim=12, experts=5, k=int(k) if k else None, losses=Losses(balance=0.1))
    found: dict[str, Any] = {"experts": [], "weights": [], "dropped": []}
    total = torch.zeros(())
    for step in range(3):
        parts = [batch(each, step) for each in ((0, 1) if rank is None else (rank,))]
        tokens, real = (torch.cat([part[field] for part in parts]) for field in (0, 1))
        routing = router(tokens, Context(token_mask=real))
        mine = real.flatten()
        found["experts"].append(routing.experts[mine])
        found["weights"].append(routing.weights[mine].detach())
        found["dropped"].append(None if routing.dropped is None else routing.dropped[mine])
        total = total + (routing.dense_weights[mine] * torch.linspace(-1, 1, 5)).sum()
    total.backward()
    found["gradients"] = [parameter.grad for parameter in router.parameters()]
    found["state"] = dict(router.eval().state_dict())
    found["loss"] = routing.loss.detach()
    return found


def check_two_ranks(names: list[str], folder: Path) -> None:
    """Check that two processes route as one does, with each of the routers named."""
    on_ranks(Path(__file__).with_name("balanced_on_ranks.py"), str(folder), *names)
    for number, name in enumerate(names):
        halves = [torch.load(folder / f"{number}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        same(halves, outcome(name, rank=None))


def same(halves: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Check that two ranks found together what one process finds; a loss is the same on each."""
    for name in ("experts", "weights", "dropped"):
        for step, expected in enumerate(whole[name]):
            if expected is not None:
                torch.testing.assert_close(torch.cat([half[name][step] for half in halves]), expected, msg=f"{name}, {step}")
    for *own, expected in zip(*(half["gradients"] for half in halves), whole["gradients"], strict=True):
        torch.testing.assert_close(own[0] + own[1], expected)
    for half in halves:
        torch.testing.assert_close(half["loss"], whole["loss"])
        torch.testing.assert_close(half["state"], whole["state"])
