"""FLOPs, memory and communication of a model whose shape is known.

FLOPs per token: a multiply-add counts 2, only matrix products count, a backward costs twice its forward. Causal attention
counts the half that it needs. Those of routers' parts are counted, because some of them have no backward.

Memory in bytes, b bytes per number of the model:

    weights      b per parameter                       gradients    b per trained parameter
    AdamW        8 per trained parameter (two float32 moments), and 4 more for a float32 master copy if b < 4
    activations  per token and layer, in numbers of b bytes; attention in blocks (flash), which stores no N x N matrix:
                   6 d, and 8 bytes d if b < 4         two norms: their inputs (in float32 too), scaled, and their outputs
                   H (D + D_v) + H_kv (D + D_v)        queries and the mixed values, keys and values
                   4 hidden, not gated 2 hidden        a dense network: outputs of its first maps, activated, multiplied
                   Holdfast's experts   rows 3 hidden                     not gated: rows 2 hidden
                   native experts       rows (2 d + 4 hidden)             not gated: rows (2 d + 2 hidden)
                 per token outside the layers: 2 d, b per logit, and while the loss is computed 12 bytes more per logit (its
                 float32 copy, its log-probability, its gradient)
    checkpointed d per token and layer, and the activations of one layer or of the loss, whichever is larger

Activations are an estimate. A token has one row for each of its slots. A router that may use a different number of experts
for each token reserves memory for all E on a GPU, because reading the number would synchronise with the host: its slots are
E. `smooth` declares fewer rows, k + 2 budget.

Communication, bytes that each of n GPUs sends in a training step, and what it holds, for three layouts:

    ring all-reduce of S bytes 2 S (n-1)/n        all-gather or reduce-scatter of S bytes S (n-1)/n
    exchange     a token's vector is sent once to each other GPU that holds one of its experts, and back, in the forward and
                 in the backward; with it K indices of 8 bytes, sent once, and K float32 weights, sent once, with gradients
                 that come back: 4 d b + 16 K. If experts are selected uniformly, K of E per token, it is sent to
                 (e-1) (1 - C(E-E/e, K) / C(E, K)) other GPUs on average; to fewer if a family (DeepSeek) selects within
                 groups. A recomputation sends it again, d b + 12 K, and back again, d b, only if something after the
                 experts is saved for the backward: torch stops at the last tensor that it needs
    ddp          everything on every GPU; gradients are all-reduced
    fsdp         weights, gradients and optimizer in n shards; weights are gathered for the forward and again for the
                 backward, which a recomputation uses too; gradients are reduce-scattered; two layers are complete at a time,
                 the current one and the next
    expert       experts in e shards, e the greatest common divisor of n and E; the rest as ddp, and the experts' gradients
                 are all-reduced among the n / e GPUs that hold the same experts

Router statistics, float32 or int64, are all-reduced in each training forward in every layout. A recomputation updates no
state and sums only what routing and losses need.
"""

import math
from dataclasses import dataclass, field

from holdfast.planning.model_shape import LayerShape, ModelShape, Setting
from holdfast.routing.declarations import FLOAT, INTEGER

MOMENTS = 8  # bytes per parameter of AdamW
MASTER = 4


@dataclass(frozen=True)
class Flops:
    """FLOPs per token, the mean over a sequence."""

    projections: float  # of attention
    mixing: float  # attention's scores and weighted sums
    dense: float  # feed-forward networks that every token passes
    experts: float
    head: float  # outside the layers: logits, image patches
    parts: dict[str, float] = field(default_factory=dict)  # of the routers, by part

    @property
    def router(self) -> float:
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        return self.projections + self.mixing + self.dense + self.experts + self.head + self.router


def forward_flops(shape: ModelShape, setting: Setting) -> Flops:
    """Return the FLOPs of inference: one forward over a sequence."""
    return _flops(shape, setting, experts_as="inference", part="forward", times=1)


def training_flops(shape: ModelShape, setting: Setting, checkpointing: bool = False) -> Flops:
    """Return the FLOPs of a training step: forward, backward and the routers' state updates.

    Checkpointing adds a second forward of every layer, in which routers update no state.
    """
    step = _flops(shape, setting, experts_as="training", part="training", times=3)
    if not checkpointing:
        return step
    again = _flops(shape, setting, experts_as="training", part="again", times=1)
    return Flops(
        projections=step.projections + again.projections,
        mixing=step.mixing + again.mixing,
        dense=step.dense + again.dense,
        experts=step.experts + again.experts,
        head=step.head,
        parts={name: step.parts[name] + again.parts[name] for name in step.parts},
    )


def _flops(shape: ModelShape, setting: Setting, *, experts_as: str, part: str, times: int) -> Flops:
    parts: dict[str, float] = {}
    experts = 0.0
    for layer in shape.layers:
        if (sparse := layer.sparse) is None:
            continue
        used = getattr(sparse.active, experts_as)
        experts += times * sparse.flops * used
        for name, flops in sparse.part_flops.items():
            parts[name] = parts.get(name, 0.0) + getattr(flops, part)
    return Flops(
        projections=times * sum(layer.attention.projections for layer in shape.layers),
        mixing=times * sum(layer.attention.mixing for layer in shape.layers),
        dense=times * sum(layer.dense for layer in shape.layers),
        experts=experts,
        head=times * (shape.outside_flops + shape.outside_flops_per_sequence / setting.sequence),
        parts=parts,
    )


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one model and the tokens of a batch, on one GPU that holds all of it."""

    weights: float
    gradients: float
    moments: float
    master: float
    activations: float
    routers: float  # the part of the activations that routers save
    state: float

    @property
    def held(self) -> float:
        """Return the bytes that stay in memory between steps."""
        return self.weights + self.gradients + self.moments + self.master + self.state

    @property
    def total(self) -> float:
        return self.held + self.activations


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes while decoding, for the tokens of all sequences together."""

    weights: float
    state: float
    cache: float  # keys and values
    router_cache: float

    @property
    def total(self) -> float:
        return self.weights + self.state + self.cache + self.router_cache


def training_memory(shape: ModelShape, tokens: int, number_bytes: int, checkpointing: bool = False) -> TrainingMemory:
    """Return the memory of a training step on `tokens` tokens."""
    saved_by_routers = [sum(cost.kept for cost in sparse.costs) for sparse in shape.sparse]
    routers = max(saved_by_routers, default=0.0) if checkpointing else sum(saved_by_routers)
    return TrainingMemory(
        weights=float(number_bytes * shape.parameters),
        gradients=float(number_bytes * shape.trained),
        moments=float(MOMENTS * shape.trained),
        master=0.0 if number_bytes >= MASTER else float(MASTER * shape.trained),
        activations=tokens * activation_bytes(shape, number_bytes, checkpointing),
        routers=tokens * routers,
        state=float(shape.state),
    )


def inference_memory(shape: ModelShape, tokens: int, number_bytes: int) -> InferenceMemory:
    """Return the memory of decoding, with `tokens` tokens in the caches."""
    cache, rows = 0.0, 0.0
    if shape.decodes:
        cache = float(sum(number_bytes * layer.attention.cached for layer in shape.layers))
        rows = sum(cost.cached for sparse in shape.sparse for cost in sparse.costs)
    return InferenceMemory(float(number_bytes * shape.parameters), float(shape.state), tokens * cache, tokens * rows)


def activation_bytes(shape: ModelShape, number_bytes: int, checkpointing: bool) -> float:
    """Return the activations in bytes per token, at the peak of a training step."""
    each = [_layer_activation_bytes(layer, number_bytes) for layer in shape.layers]
    outside = number_bytes * (2 * shape.dim + shape.vocabulary)
    loss = 3.0 * FLOAT * shape.vocabulary
    if not checkpointing:
        return sum(each) + outside + loss
    inputs = sum(number_bytes * layer.dim for layer in shape.layers)
    return inputs + outside + max(*each, loss)


def _layer_activation_bytes(layer: LayerShape, number_bytes: int) -> float:
    """Return what one layer saves for its backward, in bytes per token."""
    attention = layer.attention
    width = attention.key_width + attention.value_width
    numbers = 6.0 * layer.dim + attention.key_heads * width + attention.heads * width
    numbers += 2 * max(layer.dense_widths - layer.dim, 0)
    other_bytes = float(FLOAT * attention.heads)  # the softmax's log-sums, float32 in any dtype
    if number_bytes < FLOAT:
        other_bytes += 2 * FLOAT * layer.dim
    if layer.sparse is not None:
        sparse = layer.sparse
        slot = sparse.inner + sparse.hidden if sparse.runs_holdfast else 2 * (layer.dim + sparse.inner)
        numbers += sparse.active.training_rows * slot
        other_bytes += sum(cost.kept for cost in sparse.costs)
    return number_bytes * numbers + other_bytes


@dataclass(frozen=True)
class Layout:
    """What one GPU holds, and what it sends in a step, in bytes."""

    name: str
    held: float  # weights, gradients, optimizer, state
    gathered: float  # weights of other GPUs, held temporarily
    activations: float
    sent: float  # for weights and gradients
    exchanged: float  # tokens sent to experts and back
    summed: float  # by routers, for their state and for selecting

    @property
    def total(self) -> float:
        return self.held + self.gathered + self.activations

    @property
    def traffic(self) -> float:
        return self.sent + self.exchanged + self.summed


def layouts(
    shape: ModelShape, memory: TrainingMemory, *, gpus: int, tokens: int, number_bytes: int, checkpointing: bool = False
) -> list[Layout]:
    """Return the layouts "ddp", "fsdp" and "expert". `tokens` is the number of tokens of one GPU."""
    summed = statistics_bytes(shape) + (recomputed_statistics_bytes(shape) if checkpointing else 0)
    forwards = 2 if checkpointing else 1
    sent_by_routers = all_reduce_bytes(float(summed), gpus) + forwards * tokens * gathered_bytes(shape) * (gpus - 1)
    return [
        _ddp(memory, gpus, sent_by_routers),
        _fsdp(shape, memory, gpus, number_bytes, sent_by_routers),
        _expert_parallel(shape, memory, gpus, tokens, number_bytes, sent_by_routers, checkpointing),
    ]


def gathered_bytes(shape: ModelShape) -> float:
    """Return the bytes per token that the routers of a rank send to each other rank in one training forward."""
    return sum(cost.gathered for sparse in shape.sparse for cost in sparse.costs)


def statistics_bytes(shape: ModelShape) -> int:
    """Return the bytes of the statistics that routers sum over ranks in one training forward."""
    return sum(cost.summed for sparse in shape.sparse for cost in sparse.costs)


def recomputed_statistics_bytes(shape: ModelShape) -> int:
    """Return the bytes of the statistics that routers sum over ranks in a recomputation."""
    return sum(cost.summed_again for sparse in shape.sparse for cost in sparse.costs)


def all_reduce_bytes(size: float, gpus: int) -> float:
    """Return the bytes that each GPU sends in a ring all-reduce of `size` bytes."""
    return 2 * size * (gpus - 1) / gpus


def _ddp(memory: TrainingMemory, gpus: int, summed: float) -> Layout:
    return Layout("ddp", memory.held, 0.0, memory.activations, all_reduce_bytes(memory.gradients, gpus), 0.0, summed)


def _fsdp(shape: ModelShape, memory: TrainingMemory, gpus: int, number_bytes: int, summed: float) -> Layout:
    share = (gpus - 1) / gpus
    sharded = memory.held - memory.state
    gathered = 2 * number_bytes * max(layer.parameters for layer in shape.layers) if gpus > 1 else 0.0
    sent = (2 * memory.weights + memory.gradients) * share
    return Layout("fsdp", sharded / gpus + memory.state, gathered, memory.activations, sent, 0.0, summed)


def _expert_parallel(
    shape: ModelShape,
    memory: TrainingMemory,
    gpus: int,
    tokens: int,
    number_bytes: int,
    summed: float,
    checkpointing: bool,
) -> Layout:
    shards = math.gcd(gpus, *(sparse.experts for sparse in shape.sparse))
    experts = shape.expert_parameters / shape.parameters
    held = (memory.held - memory.state) * (1 - experts + experts / shards) + memory.state
    exchanged = tokens * sum(
        mean_other_ranks(sparse.experts, sparse.active.training, shards)
        * exchanged_bytes(layer, number_bytes, checkpointing)
        for layer in shape.layers
        if (sparse := layer.sparse) is not None
    )
    replicated = all_reduce_bytes(memory.gradients * (1 - experts), gpus)
    own = all_reduce_bytes(memory.gradients * experts / shards, gpus // shards)
    return Layout("expert", held, 0.0, memory.activations, replicated + own, exchanged, summed)


def mean_other_ranks(experts: int, used: float, ranks: int) -> float:
    """Return how many other ranks hold one of the `used` experts of a token, on average, if all sets are equally likely.

    If `used` is not a whole number, some tokens use the next lower number of experts and the rest the next higher one.
    """

    def mean(number: int) -> float:
        return (ranks - 1) * (1 - math.comb(experts - experts // ranks, number) / math.comb(experts, number))

    lower = math.floor(used)
    return mean(lower) if lower == used else (lower + 1 - used) * mean(lower) + (used - lower) * mean(lower + 1)


def exchanged_bytes(layer: LayerShape, number_bytes: int, checkpointing: bool = False) -> float:
    """Return the bytes that a step sends for each pair of a token and another rank that holds its experts."""
    assert layer.sparse is not None
    again = int(checkpointing)
    vectors = 4 + again * (2 if layer.continues_after_experts else 1)
    indices_and_weights = layer.sparse.active.slots * (INTEGER * (1 + again) + FLOAT * (2 + again))
    return vectors * layer.dim * number_bytes + indices_and_weights
