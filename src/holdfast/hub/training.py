"""The routers' losses in a model's own training loss, each counted once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.routing import Routing
from holdfast.routing.state import mean_over_ranks

IGNORED = -100  # a label that transformers' losses leave out


class Ledger:
    """The losses of the forward under way, and the hooks that add them to `outputs.loss`.

    Open only while the model's forward runs: what a recomputation enters during the backward is not counted again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._losses: list[Tensor] | None = None
        self._with_gradient = False
        self.token_ids: Tensor | None = None  # of the forward under way
        self.when_done: list[Callable[[], None]] = []  # called when nothing of a forward is needed any more
        self._handles = [
            model.register_forward_pre_hook(self._open, with_kwargs=True),
            model.register_forward_hook(self._close, with_kwargs=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def enter(self, routing: Routing) -> None:
        """A router's losses. Reentrant checkpointing would drop their gradient without a word, so it is refused."""
        if self._losses is None or not routing.losses:
            return
        if self._with_gradient and not torch.is_grad_enabled():
            raise ValueError(
                "reentrant activation checkpointing drops the gradient of the routers' losses; call "
                'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}).'
            )
        self._losses.append(routing.loss)

    def _open(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.token_ids = options.get("input_ids", inputs[0] if inputs else None)
        self._losses, self._with_gradient = ([] if model.training else None), torch.is_grad_enabled()

    def _close(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        losses, self._losses = self._losses, None
        if not (model.training and torch.is_grad_enabled()):  # no backward that would recompute a layer
            self.token_ids = None
            for forget in self.when_done:
                forget()
        if not losses:
            return outputs
        if isinstance(outputs, tuple):  # return_dict=False: the loss comes first, if there is one, and only it is a scalar
            return (_plus(model, outputs[0], losses, options), *outputs[1:]) if outputs[0].dim() == 0 else outputs
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = _plus(model, outputs.loss, losses, options)
        return outputs


def _plus(model: nn.Module, loss: Tensor, losses: list[Tensor], options: dict[str, Any]) -> Tensor:
    total = torch.stack([term.to(loss.device) for term in losses]).sum()
    return loss + total * share_of_batch(model, options)


def share_of_batch(model: nn.Module, options: dict[str, Any]) -> Tensor | float:
    """The share that this forward has of the items that the whole batch's loss is divided by; 1 where it is its own mean.

    A trainer that accumulates gradients divides each part's summed loss by `num_items_in_batch`: the routers' losses, which
    are means, then count by their part's share, and once in all. They are of the tokens of all processes, as is the share.
    """
    items, labels = options.get("num_items_in_batch"), options.get("shift_labels")
    if labels is None:
        labels = options.get("labels")
        labels = labels[..., 1:] if isinstance(labels, Tensor) and _shifts_labels(model) else labels
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    return mean_over_ranks((labels != IGNORED).sum() / items)


def _shifts_labels(model: nn.Module) -> bool:
    """Is the first label never a target? As the Trainer decides when it counts."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
