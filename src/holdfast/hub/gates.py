"""A family's gate with a router of ours inside.

The gate stays the object it was, with its weights under their names, and an instance of its class, so that transformers
still records its logits; only its class is now a subclass whose forward asks the router.
"""

import types
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from holdfast.hub.families import record
from holdfast.hub.subclasses import with_mixin, without_mixin
from holdfast.routing import Router
from holdfast.routing.parts import Rule


class ReroutedGate:
    """Mixed into the class of a family's gate. Without a router it is the family's own rule, observed."""

    holdfast: Router | None
    surroundings: Any  # set by `wire`
    rule: Rule
    losses: Any
    training: bool
    usual_order: bool  # (logits, weights, indices)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        surroundings = self.surroundings
        tokens = surroundings.tokens(hidden_states)
        context = surroundings.context(tokens)
        if self.holdfast is None:
            output: tuple[Tensor, Tensor, Tensor] = super().forward(hidden_states)  # type: ignore[misc]
            has_losses = self.training and self.losses is not None and surroundings.ledger.learning
            if surroundings.is_read or has_losses or surroundings.ledger.asked:
                routing = record(output, self.rule)
                if has_losses:
                    routing = replace(routing, losses=self.losses(routing, context.token_mask))
                weights = surroundings.leave(tokens, routing, context, self.losses, output[1])
                output = (output[0], weights, output[2])
            return output
        surroundings.follow(self.holdfast)
        routing = self.holdfast(tokens, context)
        weights = surroundings.leave(tokens, routing, context, self.holdfast.losses)
        experts = routing.experts
        usable = context.usable(tokens)
        if usable is not None and self.holdfast.select.ragged:
            # Then our function runs the experts, and takes the sentinel; not all of transformers' own do.
            experts = experts.where(usable.view(-1, 1), routing.gates.shape[-1])
            weights = weights.where(usable.view(-1, 1), 0.0)
        output = (routing.logits, weights, experts)
        return output if self.usual_order else output[::-1]


def install(gate: nn.Module, router: Router | None, rule: Rule, losses: Any, usual_order: bool) -> None:
    """Put a router into a family's gate; None is the family's own rule."""
    if not isinstance(gate, ReroutedGate):
        _become(gate, with_mixin(type(gate), ReroutedGate))
    gate.holdfast, gate.rule, gate.losses, gate.usual_order = router, rule, losses, usual_order  # type: ignore[assignment]


def uninstall(gate: nn.Module) -> None:
    """The gate as it was."""
    if isinstance(gate, ReroutedGate):
        _become(gate, without_mixin(type(gate)))
        for name in ("holdfast", "rule", "losses", "surroundings", "usual_order"):
            if hasattr(gate, name):
                delattr(gate, name)


def _become(gate: nn.Module, kind: type) -> None:
    gate.__class__ = kind
    if "_old_forward" in gate.__dict__:  # accelerate has put a function of its own before the class's: it calls this one
        gate._old_forward = types.MethodType(kind.forward, gate)  # type: ignore[attr-defined, assignment]
