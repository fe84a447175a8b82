"""The loss consistency: a second forward of a model in training, whose gates should be those of the first.

    first view    the forward that the caller runs
    second view   the same inputs with other dropout and, with `word_noise`, some token ids replaced. It updates no router
                  state, makes no router losses, draws no routing noise, and its outputs are not used

The loss is added to `outputs.loss` as the losses of layers are. For trainers that compute their loss from logits alone it is
attached to the first output that has a gradient.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.layers.losses import Losses, consistency
from holdfast.routing import Router, Routing
from holdfast.routing.state import mean_over_ranks

View = list[tuple[Routing, Losses | None, Tensor | None]]  # of each layer: its routing, losses and token mask
LABELS = ("labels", "shift_labels", "num_items_in_batch")  # arguments of a loss
NOT_COMPARED = ("return_loss", "output_router_logits")  # arguments that ask for further outputs
EQUAL_VIEWS = (
    "the loss consistency compares two views of an input, and here they are equal: give word_noise (such as 0.1) in the "
    "losses, or a model with dropout in its config."
)
NO_IDS = (
    "word_noise replaces token ids, and this forward reads none (it got pixels or embeddings): set word_noise to 0, so that "
    "dropout alone makes the views differ."
)


def require_second_view(model: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a second forward of the model, with these options, would not be right."""
    from torch.distributed.fsdp import FSDPModule

    reason = None
    if torch.compiler.is_compiling():  # without `fullgraph`, torch then runs the model without a compiler
        reason = "torch.compile cannot trace it: compile without fullgraph"
    elif getattr(model, "is_gradient_checkpointing", False):
        reason = "activation checkpointing would recompute it as the first: switch gradient checkpointing off"
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        reason = "FSDP2 gathers weights for one forward only: use DDP"
    elif options.get("past_key_values") is not None:
        reason = "it would be added to past_key_values: leave these out"
    if reason is not None:
        raise ValueError(f"the loss consistency runs a second forward, and {reason}, or set consistency to 0.")


def require_views_differ(model: Any, word_noise: float) -> None:
    """Raise ValueError if the two views would be equal, so that the loss is 0, or would differ by the noise of a router."""
    require_no_noise(model)
    has_layers = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    if not (word_noise or has_layers or _has_dropout(model.config.to_dict())):
        raise ValueError(EQUAL_VIEWS)


def require_no_noise(model: nn.Module) -> None:
    """Raise ValueError if a router draws noise: only the gates of one view of an input would have it."""
    if any(isinstance(module, Router) and module.select.noise is not None for module in model.modules()):
        raise ValueError(
            "the gates of two views of an input are compared, and routing noise makes them differ: use a router without "
            "noise, or set consistency to 0 (and, in robust training, routing_term to balance)."
        )


def _has_dropout(config: Mapping[Any, Any]) -> bool:
    """Return whether an entry of a config, or of one inside it, is a dropout above 0."""
    inside = any(_has_dropout(value) for value in config.values() if isinstance(value, Mapping))
    found = (value for name, value in config.items() if "drop" in str(name))
    return inside or any(isinstance(value, int | float) and value > 0 for value in found)


def word_noise_of(view: View) -> float:
    """Return the largest word noise of the layers' losses."""
    return max(0.0 if losses is None else losses.word_noise for _, losses, _ in view)


def second_inputs(
    model: Any, inputs: Sequence[Any], options: Mapping[str, Any], noised: Tensor | None
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the second forward: those of the first, with `noised` token ids and without labels."""
    is_seq2seq = getattr(model.config, "is_encoder_decoder", False)  # makes its decoder's inputs from labels
    left_out = NOT_COMPARED if is_seq2seq else (*LABELS, *NOT_COMPARED)
    given, named = list(inputs), {name: value for name, value in options.items() if name not in left_out}
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        named["logits_to_keep"] = 1  # logits over a vocabulary are large, and not used
    if noised is not None and "input_ids" in named:
        named["input_ids"] = noised
    elif noised is not None:
        given[0] = noised
    return given, named


def with_noise(ids: Tensor, share: float, mask: Any, kept: Sequence[int]) -> Tensor:
    """Return `ids (B,N)` with a share of the real ones replaced by ids of real tokens of the batch, drawn at random.

    mask    the attention mask; if it is (B,N), padding is not replaced. Ids in `kept` are neither replaced nor drawn
    """
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    for token in kept:
        real = real & (ids != token)
    # The position of a random real token, without reading their number on the host.
    order = real.flatten().cumsum(0)
    rank = (torch.rand(ids.numel(), device=ids.device) * order[-1:]).long() + 1
    drawn = ids.flatten()[torch.searchsorted(order, rank).clamp_max(ids.numel() - 1)].view_as(ids)
    return torch.where(real & (torch.rand(ids.shape, device=ids.device) < share), drawn, ids)


def consistency_of(first: View, second: View, device: torch.device) -> Tensor:
    """Return the sum over layers of the weighted consistency of two views, for the tokens of all ranks."""
    total = torch.zeros((), device=device)
    for (one, losses, mask), (other, _, _) in zip(first, second, strict=True):
        if losses is not None and losses.consistency:
            total = total + (losses.consistency * consistency(one, other, mask, mean_over_ranks)).to(device)
    return total


def first_with_gradient(outputs: Any) -> Any:
    """Return the key of the first output, not a loss, that has a gradient; None if there is none."""
    pairs = enumerate(outputs) if isinstance(outputs, tuple) else outputs.items() if isinstance(outputs, dict) else ()
    found = (key for key, value in pairs if isinstance(value, Tensor) and value.dim() > 0 and value.requires_grad)
    return next(found, None)


def with_output(outputs: Any, key: Any, value: Tensor) -> Any:
    """Return the outputs with another value of one output."""
    if isinstance(outputs, tuple):
        return tuple(value if place == key else other for place, other in enumerate(outputs))
    outputs[key] = value
    return outputs
