"""Prints by how many MB the peak memory of this process grows with one long sequence; run by test_token_mixing.py."""

import sys
from pathlib import Path

import torch

import holdfast
from holdfast import Context
from holdfast.routing import Attention

HEADS, DIM, EXPERTS = 4, 64, 16


def step(router: holdfast.Router, length: int, masked: bool) -> None:
    sequences = 2 if masked else 1
    tokens = torch.randn(sequences, length, DIM, requires_grad=True)
    query, key, value = (torch.randn(sequences, HEADS, length, DIM // HEADS) for _ in range(3))
    projection = torch.nn.Linear(DIM, DIM)
    mask = torch.zeros(sequences, 1, length, length) if masked else None
    output = torch.randn(sequences, length, DIM, requires_grad=True)
    attention = Attention(query, key, value, projection, output, mask)
    routing = router(tokens, Context(causal=True, attention=attention))
    (routing.weights.square().sum() + routing.gates.square().sum()).backward()


def peak() -> float:
    """Of this program only: getrusage would start from the size of the process that launched it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    torch.manual_seed(0)
    options = {"heads": HEADS} if sys.argv[1] == "attention" else {}
    built = holdfast.create_router(sys.argv[1], dim=DIM, experts=EXPERTS, **options)
    masked = len(sys.argv) > 2
    step(built, 256, masked)
    before = peak()
    step(built, 4_096 if masked else 16_384, masked)
    print(peak() - before)
