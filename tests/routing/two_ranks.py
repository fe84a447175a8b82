"""Run by test_state.py on two processes: each rank sees 4 or 6 tokens and both must count 20 after two steps."""

import torch
import torch.distributed as dist
from test_state import build

dist.init_process_group("gloo")
rank = dist.get_rank()
built, counter = build()
for _ in range(2):
    built(torch.randn(2, 2 + rank, 4))
built.eval()
for turn in range(2):
    dist.barrier()
    if turn == rank:
        print(f"rank {rank}: {int(counter.count)}", flush=True)
dist.destroy_process_group()
