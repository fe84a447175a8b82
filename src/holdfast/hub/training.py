"""The routers' losses in a model's own training loss, each counted once."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.routing import Router, Routing
from holdfast.routing.state import mean_over_ranks

IGNORED = -100  # a label that transformers' losses leave out


class Ledger:
    """The losses of the forward under way, and the hooks that add them to `outputs.loss`.

    Open only while the model's forward runs: what a recomputation enters during the backward is not counted again. A rollout
    of a model in training mode makes no losses and teaches its routers nothing: a token is no batch, and each process may
    take as many as it likes.
    """

    def __init__(self, model: nn.Module, routers: Sequence[Router] = ()) -> None:
        self._routers = routers
        self._losses: list[Tensor] | None = None
        self._with_gradient = self._generating = self._told = False
        self.learning = True
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
        self._with_gradient = torch.is_grad_enabled()
        continues = self._generating or options.get("past_key_values") is not None
        if model.training:
            self._let_learn(self._with_gradient or not continues)
        self._losses = [] if model.training and self.learning else None

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Inside the `with`, forwards without gradients are those of a rollout."""
        before, self._generating = self._generating, True
        try:
            yield
        finally:
            self._generating = before

    def _let_learn(self, learning: bool) -> None:
        if self.learning != learning:
            self.learning = learning
            for router in self._routers:
                router.learning = learning

    def _close(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        losses, self._losses = self._losses, None
        self._let_learn(True)
        if not (model.training and torch.is_grad_enabled()):  # no backward that would recompute a layer
            self.token_ids = None
            for forget in self.when_done:
                forget()
        if not losses:
            return outputs
        if isinstance(outputs, tuple):  # return_dict=False: the loss comes first, if there is one, and only it is a scalar
            if outputs[0].dim() == 0:
                return (outputs[0] + _total(losses, outputs[0].device) * share_of_batch(model, options), *outputs[1:])
        elif getattr(outputs, "loss", None) is not None:
            outputs.loss = outputs.loss + _total(losses, outputs.loss.device) * share_of_batch(model, options)
            return outputs
        elif isinstance(outputs, dict):  # as transformers' outputs are
            outputs["router_loss"] = _total(losses, losses[-1].device)
        self._tell_of_lost_losses()
        return outputs

    def _tell_of_lost_losses(self) -> None:
        if self._with_gradient and not (self._told or torch.compiler.is_compiling()):
            self._told = True
            warnings.warn(
                "the model was given no labels and so has no loss to add its routers' losses to: add outputs.router_loss "
                "(a dict's, not a tuple's) to yours, or they train nothing.",
                stacklevel=2,
            )


def _total(losses: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack([term.to(device) for term in losses]).sum()


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
