"""Floating-point operations a token: a multiply-add counts 2, only matrix products count, a backward is twice its forward.

Causal attention counts the half that it needs. What a router's parts add have formulas of their own (`Part.cost`), since not
all they do has a gradient.
"""

from dataclasses import dataclass, field

from holdfast.planning.outline import Outline, Setting


@dataclass(frozen=True)
class Flops:
    """A token's share, the mean over a sequence."""

    projections: float  # of attention
    mixing: float  # attention's scores and sums
    dense: float  # feed-forward networks that every token passes
    experts: float
    head: float  # outside the layers: logits, patches
    parts: dict[str, float] = field(default_factory=dict)  # of the routers, by part

    @property
    def router(self) -> float:
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        return self.projections + self.mixing + self.dense + self.experts + self.head + self.router


def forward(shape: Outline, setting: Setting) -> Flops:
    """Of inference: reading a sequence."""
    return _flops(shape, setting, experts_as="inference", part="forward", times=1)


def training(shape: Outline, setting: Setting, checkpointing: bool = False) -> Flops:
    """Of a training step: forward, backward and what routers learn; with checkpointing, every layer's forward once more,
    which learns nothing."""
    step = _flops(shape, setting, experts_as="training", part="training", times=3)
    if not checkpointing:
        return step
    again = _flops(shape, setting, experts_as="training", part="again", times=1)
    parts = {name: step.parts[name] + again.parts[name] for name in step.parts}
    return Flops(
        step.projections + again.projections,
        step.mixing + again.mixing,
        step.dense + again.dense,
        step.experts + again.experts,
        step.head,
        parts,
    )


def _flops(shape: Outline, setting: Setting, *, experts_as: str, part: str, times: int) -> Flops:
    parts: dict[str, float] = {}
    experts = 0.0
    for layer in shape.layers:
        if (sparse := layer.sparse) is None:
            continue
        used = getattr(sparse.active, experts_as)
        rows, tokens = sparse.adding_biases(layer.dim, used)
        # The matrix that says whose a row is has no gradient: that product has one in its backward, others two.
        experts += times * (sparse.flops * used + tokens) + min(times, 2) * rows
        for cost in sparse.costs:
            parts[cost.part] = parts.get(cost.part, 0.0) + getattr(cost, part)
    return Flops(
        projections=times * sum(layer.attention.projections for layer in shape.layers),
        mixing=times * sum(layer.attention.mixing for layer in shape.layers),
        dense=times * sum(layer.dense for layer in shape.layers),
        experts=experts,
        head=times * (shape.head + shape.once / setting.sequence),
        parts=parts,
    )
