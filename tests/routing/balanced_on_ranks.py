"""Run by `check_two_ranks` on two processes: store what this rank routes, with each of the routers named."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from batches_of_two_ranks import outcome

dist.init_process_group("gloo")
rank = dist.get_rank()
for number, name in enumerate(sys.argv[2:]):
    torch.save(outcome(name, rank), Path(sys.argv[1]) / f"{number}-{rank}.pt")
dist.destroy_process_group()
