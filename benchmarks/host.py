"""Measure where the time of a small training step goes: in Python on the host, or in kernels on the GPU.

    python benchmarks/host.py                            # on a CPU: one step of each router, and the slowest operators
    python benchmarks/host.py --device cuda              # on a GPU: GPT-2 of 6 layers, d 384, 16 experts, top 2, bf16
    python benchmarks/host.py --device cuda --profile smoe   # also the host time of each operator and Python function

    wall        milliseconds of a step if many are queued, as in training, and in brackets times those of the dense model, in
                turns with it: hosts become slower and faster by a third within seconds
    issue       milliseconds that Python needs to start a step, without waiting for the GPU
    kernels     the sum of the times of all kernels of a step
    launches    how many kernels a step launches
    captured    milliseconds of a step of `holdfast compare`, which is replayed as a CUDA graph (`CapturedStep`), and in
                brackets the time of its kernels; it also clips gradients

"dense" is the same model with a feed-forward network as wide as k experts. A step is forward, backward and AdamW.
"""

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from command import check, command, write
from models import Shape, trainer
from timing import median_ratio, time_in_turns
from torch import Tensor
from versions import versions

import holdfast
from holdfast.train.fast_step import CapturedStep
from holdfast.train.recipe import TrainingPart
from holdfast.train.step import TrainingStep, adamw

NAMES = ("dense", "smoe", "symphony", "ac", "smooth", "similarity", "attention")
QUEUED = 10
SHAPES = {"cpu": Shape(2, 96, 4, 96, 8, 2, 8, 64, 256), "cuda": Shape(6, 384, 8, 384, 16, 2, 64, 512, 256)}


def model(shape: Shape, router: str, device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.length,
        n_embd=shape.dim,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.k * shape.hidden if router == "dense" else shape.hidden,
        activation_function="relu",
    )
    with torch.device(device):
        made = transformers.GPT2LMHeadModel(config)
    if router == "dense":
        return made
    losses = holdfast.Losses(balance=0.01)
    return holdfast.sparsify(made, experts=shape.experts, k=shape.k, router=router, init="random", losses=losses)


def captured(made: Any, ids: Tensor) -> Callable[[], object]:
    """Return a step that is captured as in `holdfast compare`; it raises an error if that is not possible."""
    training = TrainingPart(steps=1, batch=len(ids), learning_rate=1e-4, precision="bf16")
    step = CapturedStep(TrainingStep(made, adamw(made, training), training, 1))
    made.config.use_cache = False  # as the training loop does
    batch = [{"input_ids": ids, "labels": ids}]
    for _ in range(5):
        step(batch)
    if not step.is_captured:
        raise SystemExit(f"this step cannot be captured: {step.refused}")
    return lambda: step(batch)


def issue_time(step: Callable[[], object], device: str, rounds: int) -> float:
    """Return the milliseconds that the host needs to start a step; on a CPU that is the whole step."""
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def kernels(step: Callable[[], object], device: str) -> tuple[float, int]:
    """Return the milliseconds in kernels and the number of kernels of one step; 0 on a CPU."""
    if device != "cuda":
        return 0.0, 0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    found = [event for event in profile.events() if event.device_type == torch._C._autograd.DeviceType.CUDA]
    return sum(event.device_time for event in found) / 1e3, len(found)


def print_profile(step: Callable[[], object], steps: int = 5) -> None:
    """Print the Python functions that take most host time, by their own time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def measure(shape: Shape, device: str, rounds: int, routers: Sequence[str]) -> dict[str, dict[str, float]]:
    ids = torch.randint(1, shape.vocabulary, (shape.sequences, shape.length), device=device)
    found: dict[str, dict[str, float]] = {}
    dense = trainer(model(shape, "dense", device), ids, device)
    for name in routers:
        step = dense if name == "dense" else trainer(model(shape, name, device), ids, device)
        times = time_in_turns({"dense": dense, name: step}, device, rounds, QUEUED if device == "cuda" else 1)
        wall, ratio = statistics.median(times[name]), median_ratio(times[name], times["dense"])
        issue = issue_time(step, device, rounds)
        inside, launches = kernels(step, device)
        found[name] = {"wall": wall, "of dense": ratio, "issue": issue, "kernels": inside, "launches": launches}
        line = f"  {name:14} wall {wall:7.2f} ms ({ratio:.2f})   issue {issue:7.2f}"
        line += f"   kernels {inside:7.2f}   launches {launches}"
        del step
        if device == "cuda":
            step = captured(model(shape, name, device).train(), ids)
            replayed = statistics.median(time_in_turns({name: step}, device, rounds, QUEUED)[name])
            found[name] |= {"captured": replayed, "captured kernels": kernels(step, device)[0]}
            line += f"   captured {replayed:7.2f} ({found[name]['captured kernels']:.2f})"
            del step
        print(line, flush=True)
        gc.collect()  # a modified model has reference cycles
    return found


def main() -> None:
    parser = command(__doc__, rounds=8)
    parser.add_argument("--routers", nargs="*", default=NAMES, help="routers, and dense (default: all)")
    parser.add_argument("--profile", help="profile the host's part of a step of this router, and measure nothing")
    arguments = parser.parse_args()
    check(arguments)
    shape = SHAPES[arguments.device]
    print(shape, flush=True)
    if arguments.profile:
        ids = torch.randint(1, shape.vocabulary, (shape.sequences, shape.length), device=arguments.device)
        step = trainer(model(shape, arguments.profile, arguments.device), ids, arguments.device)
        for _ in range(3):
            step()
        print_profile(step)
        return
    result = measure(shape, arguments.device, arguments.rounds, arguments.routers)
    if arguments.out:
        write(arguments.out, {"versions": versions(), **asdict(shape), "routers": result})


if __name__ == "__main__":
    main()
