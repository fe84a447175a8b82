"""Bytes that each of n GPUs sends in a training step, and what it holds, for three ways to spread a model.

    ring all-reduce of S bytes 2 S (n-1)/n        all-gather or reduce-scatter of S bytes S (n-1)/n
    exchange     a token's row goes once to each other GPU that has one of its experts, and back, forward and backward; with
                 it K indices of 8 bytes, out, and K float32 weights, out and as gradients back: 4 d b + 16 K. Where
                 experts are chosen uniformly, a token of K of E, it goes to (e-1) (1 - C(E-E/e, K) / C(E, K)) of the others
                 on average; fewer where a family (DeepSeek's) chooses within groups. A recomputation goes out again,
                 d b + 12 K, and comes home again, d b, only where something after the experts is kept for the backward:
                 torch stops at the last tensor that it needs
    ddp          everything everywhere; gradients all-reduced
    fsdp         weights, gradients and optimizer in n shares; weights gathered for the forward and again for the backward,
                 where a recomputation uses them too, gradients reduce-scattered; two layers are whole at a time, the one
                 at work and the next
    expert       experts in e shares, e the largest number that divides both n and E; the rest as ddp, and experts' gradients
                 all-reduced among the n / e GPUs that hold the same

Routers' statistics are all-reduced, float32 or int64, in each training forward, whatever the layout. A recomputation learns
nothing and sums only what routes and losses need.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.planning.memory import Training
from holdfast.planning.outline import LayerShape, Outline
from holdfast.routing.costs import FLOAT, INTEGER


@dataclass(frozen=True)
class Layout:
    """Of one GPU, in bytes."""

    name: str
    held: float  # weights, gradients, optimizer, state
    gathered: float  # for a moment
    activations: float
    sent: float  # a step, for the model
    exchanged: float  # a step, between experts
    summed: float  # a step, for the routers' state

    @property
    def total(self) -> float:
        return self.held + self.gathered + self.activations

    @property
    def traffic(self) -> float:
        return self.sent + self.exchanged + self.summed


def layouts(
    shape: Outline, memory: Training, *, gpus: int, tokens: int, number: int, checkpointing: bool = False
) -> list[Layout]:
    """`tokens` are one GPU's."""
    summed = reduced(float(sums(shape) + (sums_again(shape) if checkpointing else 0)), gpus)
    ways: list[Callable[[], Layout]] = [
        lambda: _ddp(memory, gpus, summed),
        lambda: _fsdp(shape, memory, gpus, number, summed),
        lambda: _expert(shape, memory, gpus, tokens, number, summed, checkpointing),
    ]
    return [way() for way in ways]


def sums(shape: Outline) -> int:
    """Bytes of the statistics that routers sum over ranks in one training forward."""
    return sum(cost.summed for sparse in shape.sparse for cost in sparse.costs)


def sums_again(shape: Outline) -> int:
    """And in a recomputation of it."""
    return sum(cost.summed_again for sparse in shape.sparse for cost in sparse.costs)


def reduced(size: float, gpus: int) -> float:
    """What each GPU sends in a ring all-reduce."""
    return 2 * size * (gpus - 1) / gpus


def _ddp(memory: Training, gpus: int, summed: float) -> Layout:
    return Layout("ddp", memory.held, 0.0, memory.activations, reduced(memory.gradients, gpus), 0.0, summed)


def _fsdp(shape: Outline, memory: Training, gpus: int, number: int, summed: float) -> Layout:
    share = (gpus - 1) / gpus
    sharded = memory.held - memory.state
    whole = 2 * number * max(layer.parameters for layer in shape.layers) if gpus > 1 else 0.0
    sent = (2 * memory.weights + memory.gradients) * share
    return Layout("fsdp", sharded / gpus + memory.state, whole, memory.activations, sent, 0.0, summed)


def visited(experts: int, used: float, processes: int) -> float:
    """How many other processes have one of the `used` experts of a token, on average, where all are as likely.

    A mean number that is none of experts counts as of tokens that use the next lower and the next higher one.
    """

    def of(number: int) -> float:
        return (processes - 1) * (1 - math.comb(experts - experts // processes, number) / math.comb(experts, number))

    lower = math.floor(used)
    return of(lower) if lower == used else (lower + 1 - used) * of(lower) + (used - lower) * of(lower + 1)


def row(layer: LayerShape, number: int, checkpointing: bool = False) -> float:
    """Bytes that travel for each GPU that a token goes to."""
    assert layer.sparse is not None
    again = int(checkpointing)
    vectors = 4 + again * (2 if layer.goes_on else 1)
    return vectors * layer.dim * number + layer.sparse.active.slots * (INTEGER * (1 + again) + FLOAT * (2 + again))


def _expert(
    shape: Outline, memory: Training, gpus: int, tokens: int, number: int, summed: float, checkpointing: bool
) -> Layout:
    divided = math.gcd(gpus, *(sparse.experts for sparse in shape.sparse))
    experts = shape.expert_parameters / shape.parameters
    held = (memory.held - memory.state) * (1 - experts + experts / divided) + memory.state
    exchanged = tokens * sum(
        visited(sparse.experts, sparse.active.training, divided) * row(layer, number, checkpointing)
        for layer in shape.layers
        if (sparse := layer.sparse) is not None
    )
    shared = reduced(memory.gradients * (1 - experts), gpus)
    own = reduced(memory.gradients * experts / divided, gpus // divided)
    return Layout("expert", held, 0.0, memory.activations, shared + own, exchanged, summed)
