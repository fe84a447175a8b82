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
"""

from dataclasses import dataclass

from holdfast.planning.outline import LayerShape, Outline
from holdfast.routing.costs import FLOAT

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
