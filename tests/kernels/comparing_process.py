"""Run kernel comparisons by name, for test_comparisons.py.

    python comparing_process.py DEVICE

Each line of the input names a comparison; each line of the output is JSON: null, or the traceback of its error. Triton
decides on import whether to interpret kernels, so comparisons need a process of their own. In the interpreter, an access
outside of the tensors of a kernel is an error too.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext

import torch
from kernels import compare_kernels, compare_layers, compare_mixing, compare_pointers, compare_routing_kernels
from kernels.pointer_check import pointers_checked

MODULES = (compare_kernels, compare_routing_kernels, compare_layers, compare_mixing, compare_pointers)


def comparisons(device: str) -> dict[str, Callable[[], None]]:
    """Return every comparison that can be made on `device`, by name."""
    found: dict[str, Callable[[], None]] = {}
    for module in MODULES:
        more = module.comparisons(device)
        assert not found.keys() & more.keys()
        found |= more
    return found


def main(device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    found = comparisons(device)
    for line in sys.stdin:
        torch.manual_seed(0)
        error = None
        try:
            with pointers_checked() if device == "cpu" else nullcontext():
                found[line.rstrip("\n")]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
