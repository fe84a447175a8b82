"""Bytes: weights, gradients, AdamW's states, activations, routers' state, and the caches of decoding.

    weights      b a parameter                         gradients    b a trained parameter
    AdamW        8 a trained parameter (two float32 moments), and 4 more for a float32 master copy where b < 4
    activations  a token and layer, in numbers of b bytes; attention in blocks (flash), which keeps no N x N matrix:
                   6 d, and 8 bytes d where b < 4      two norms: what they read (in float32 too), scaled, and put out
                   H (D + D_v) + H_kv (D + D_v)        queries and the mixed values, keys and values
                   4 hidden, not gated 2 hidden        a dense network: what its first maps put out, activated, multiplied
                   experts, ours     slots 3 hidden                       not gated: slots 2 hidden
                   experts, native   slots (2 d + 4 hidden)               not gated: slots (2 d + 2 hidden)
                 a token beside the layers: 2 d, a logit b, and while the loss is computed 12 bytes a logit more (its
                 float32 copy, its log-probability, its gradient)
    checkpointed d a token and layer, and one layer's activations or the loss's, of which there is one at a time

The activations are an estimate. A router that may use a different number of experts for each token makes room for all of
them on a GPU, where nobody waits to learn how many there are: its `slots` are E.


Bytes that each of n GPUs sends in a training step, and what it holds, for three ways to spread a model.

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

from holdfast.planning.outline import LayerShape, Outline
from holdfast.routing.declarations import FLOAT, INTEGER

MOMENTS = 8  # bytes a parameter of AdamW
MASTER = 4


@dataclass(frozen=True)
class Training:
    """Bytes of one model and `tokens` of a batch, on one GPU that holds all of it."""

    weights: float
    gradients: float
    moments: float
    master: float
    activations: float
    routers: float  # of the activations, what routers keep
    state: float

    @property
    def held(self) -> float:
        """What stays from step to step."""
        return self.weights + self.gradients + self.moments + self.master + self.state

    @property
    def total(self) -> float:
        return self.held + self.activations


@dataclass(frozen=True)
class Inference:
    """Bytes while decoding `tokens` of all sequences together."""

    weights: float
    state: float
    cache: float  # keys and values
    router_cache: float

    @property
    def total(self) -> float:
        return self.weights + self.state + self.cache + self.router_cache


def training(shape: Outline, tokens: int, number: int, checkpointing: bool = False) -> Training:
    kept_by_routers = [sum(cost.kept for cost in sparse.costs) for sparse in shape.sparse]
    routers = max(kept_by_routers, default=0.0) if checkpointing else sum(kept_by_routers)
    return Training(
        weights=float(number * shape.parameters),
        gradients=float(number * shape.trained),
        moments=float(MOMENTS * shape.trained),
        master=0.0 if number >= MASTER else float(MASTER * shape.trained),
        activations=tokens * activations(shape, number, checkpointing),
        routers=tokens * routers,
        state=float(shape.state),
    )


def inference(shape: Outline, tokens: int, number: int) -> Inference:
    cache, rows = 0.0, 0.0
    if shape.decodes:
        cache = float(sum(number * layer.attention.cached for layer in shape.layers))
        rows = sum(cost.cached for sparse in shape.sparse for cost in sparse.costs)
    return Inference(float(number * shape.parameters), float(shape.state), tokens * cache, tokens * rows)


def layer_activations(layer: LayerShape, number: int) -> float:
    """Bytes a token."""
    attention = layer.attention
    width = attention.key_width + attention.value_width
    numbers = 6.0 * layer.dim + attention.key_heads * width + attention.heads * width
    numbers += 2 * max(layer.dense_widths - layer.dim, 0)
    beside = float(FLOAT * attention.heads)  # the logarithms of the sums
    if number < FLOAT:
        beside += 2 * FLOAT * layer.dim
    if layer.sparse is not None:
        sparse = layer.sparse
        slot = sparse.inner + sparse.hidden if sparse.ours else 2 * (layer.dim + sparse.inner)
        numbers += sparse.active.slots * slot
        beside += sum(cost.kept for cost in sparse.costs)
    return number * numbers + beside


def activations(shape: Outline, number: int, checkpointing: bool) -> float:
    """Bytes a token, at the peak of a step."""
    each = [layer_activations(layer, number) for layer in shape.layers]
    outside = number * (2 * shape.dim + shape.vocabulary)
    loss = 3.0 * FLOAT * shape.vocabulary
    if not checkpointing:
        return sum(each) + outside + loss
    inputs = sum(number * layer.dim for layer in shape.layers)
    return inputs + outside + max(*each, loss)


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
