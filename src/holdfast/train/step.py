"""One training step with the numbers of the Hugging Face Trainer, that never waits for the device.

    loss        mean over all labels of the step's micro-batches (`num_items_in_batch`), where the model accepts that number;
                otherwise the mean of the micro-batches' losses
    gradients   scaled down to the norm `clip`
    update      AdamW with decoupled weight decay; biases and norms are not decayed

The Trainer reads the loss after every step, and so waits for the GPU. Here loss and gradient norm stay on the device.
`TrainingStep.compute` does all the work on the device and nothing on the host that changes from step to step, so that it can
be captured in a CUDA graph: the learning rate is a tensor there, which is changed in place before the step.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.metrics.tasks import IGNORED
from holdfast.train.recipe import TrainingPart
from holdfast.train.robust_step import RobustLosses
from holdfast.train.task import Inputs

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of AdamW, as the Trainer sets them
NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")  # parameters, as in the Trainer


@final
@dataclass(frozen=True)
class StepRecord:
    """What a step reports. The tensors are on the model's device, and may not be computed yet.

    They are valid until the next step: a captured step writes the next values to the same place.
    """

    loss: Tensor  # ()
    grad_norm: Tensor  # (), before clipping
    learning_rate: float


Step = Callable[[Sequence[Inputs]], StepRecord]  # trains the model by one step on its micro-batches
Shapes = tuple[tuple[tuple[str, torch.Size, torch.dtype], ...], ...]  # of the inputs of each micro-batch, with their names


def adamw(model: nn.Module, training: TrainingPart) -> torch.optim.AdamW:
    """Return the optimizer of the Trainer. On a GPU its learning rate is a tensor, and its step can be captured."""
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(NOT_DECAYED)))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": training.weight_decay},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
    device = named[0][1].device
    on_gpu = device.type == "cuda"
    rate: Any = torch.tensor(training.learning_rate, device=device) if on_gpu else training.learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON, fused=True, capturable=on_gpu)


@final
class TrainingStep:
    """Call it with the micro-batches of a step, on the model's device, to train the model by one step.

    With the precision "bf16", every forward of the model runs under autocast, also after training.

    steps    of the whole run
    done     number of finished steps; set it when a run is resumed
    robust   the losses of a step that also trains on a perturbed view of its batch; None: it does not
    compiled   what is called in place of the model, for inputs of these shapes only: others would be compiled, unchecked
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        training: TrainingPart,
        steps: int,
        robust: RobustLosses | None = None,
    ) -> None:
        self.model, self.optimizer, self.training = model, optimizer, training
        self.rate_factor = training.rate_factor(steps)
        self.counts_labels = accepts_label_count(model)
        self.parameters = list(model.parameters())
        self.on_gpu, self.robust = self.parameters[0].is_cuda, robust
        self.done = 0
        self._rate: float | None = None
        self.compiled: tuple[Callable[..., Any], Shapes] | None = None
        if training.precision == "bf16":
            use_autocast(model)

    @property
    def is_compiled(self) -> bool:
        return self.compiled is not None

    def __call__(self, inputs: Sequence[Inputs]) -> StepRecord:
        rate = self.set_learning_rate()
        loss, grad_norm = self.compute(inputs)
        self.done += 1
        return StepRecord(loss, grad_norm, rate)

    def set_learning_rate(self) -> float:
        """Set the optimizer's learning rate for the next step and return it."""
        rate = self.training.learning_rate * self.rate_factor(self.done)
        if rate != self._rate:
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)  # in place: a captured step reads this tensor
                else:
                    group["lr"] = rate
            self._rate = rate
        return rate

    def compute(self, inputs: Sequence[Inputs]) -> tuple[Tensor, Tensor]:
        """Run forward, backward and update; return the loss and the gradient norm. Only the device part of a step."""
        run = self.model
        if self.compiled is not None and self.compiled[1] == shapes_of(inputs):
            run = self.compiled[0]
        loss = self.add_gradients(inputs, run)
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.training.clip or float("inf"))
        self.optimizer.step()
        self.drop_gradients()
        return loss, grad_norm

    def add_gradients(self, inputs: Sequence[Inputs], run: Callable[..., Any]) -> Tensor:
        """Run forward and backward of the micro-batches, with `run` in the place of the model; return the loss."""
        assert len(inputs) == self.training.accumulate, "one entry for each micro-batch"
        with masks_without_waiting(inputs) if self.on_gpu else nullcontext():
            count = label_count(inputs) if self.counts_labels else None
            total: Tensor | None = None
            for number, batch in enumerate(inputs):
                losses = [loss_of(run, batch, count)] if self.robust is None else self.robust.of_batch(batch, number, count)
                for loss in losses:
                    loss = loss if count is not None else loss / len(inputs)
                    loss.backward()
                    total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def shapes_of(inputs: Sequence[Inputs]) -> Shapes:
    """Return the names, shapes and dtypes of the inputs of each micro-batch."""
    return tuple(tuple((name, value.shape, value.dtype) for name, value in batch.items()) for batch in inputs)


def accepts_label_count(model: Any) -> bool:
    """Return whether the model's forward takes `num_items_in_batch`, as the Trainer finds out."""
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def label_count(inputs: Sequence[Inputs]) -> Tensor:
    """Return (): the number of labels in the micro-batches, on their device."""
    labels = [batch["shift_labels"] if "shift_labels" in batch else batch["labels"] for batch in inputs]
    counts = [own.ne(IGNORED).sum() for own in labels]
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum()


def loss_of(model: Any, inputs: Inputs, count: Tensor | None) -> Tensor:
    """Return the model's loss on inputs on its device; with a `count`, the sum over labels divided by it."""
    options = {} if count is None else {"num_items_in_batch": count}
    return model(**inputs, **options)["loss"]


def use_autocast(model: Any) -> None:
    """Run every forward of the model under bf16 autocast, and return float32 outputs: as accelerate prepares a model.

    Hooks of the model run outside of it. The model keeps this forward, so that it is also evaluated in bf16.
    """
    from accelerate.utils import convert_outputs_to_fp32  # type: ignore[import-untyped]

    autocast = torch.autocast(model.device.type, torch.bfloat16)
    model.forward = MethodType(convert_outputs_to_fp32(autocast(model.forward.__func__)), model)


@contextmanager
def masks_without_waiting(inputs: Sequence[Inputs]) -> Iterator[None]:
    """Inside the `with`, make transformers decide by the names of the inputs which masks it builds.

    transformers looks at the values of position ids and masks in every forward, to use a faster attention kernel if it can,
    and so waits for the GPU. While a CUDA graph is captured it cannot, and then always builds a mask. In a training step of
    ours the inputs say enough:

        no position ids        no row has several sequences, so there is nothing to look for
        no attention mask      every token is real, and no mask is built, captured or not
        an attention mask      a mask is built, captured or not

    Under `torch.compile`, transformers builds a mask in every case (before torch 2.14), and then attention cannot use its
    flash kernel. Here a compiled step has a mask only if a step that is not compiled has one.
    """
    from transformers import masking_utils
    from transformers.utils import import_utils

    has_mask = any("attention_mask" in batch for batch in inputs)
    may_be_packed = any("position_ids" in batch for batch in inputs)
    with ExitStack() as changes:
        _replace(changes, import_utils, "is_cuda_stream_capturing", _yes if has_mask else _no)
        if not may_be_packed:
            _replace(changes, masking_utils, "find_packed_sequence_indices", _no_packed_rows)
        if not has_mask and not may_be_packed:
            for name in ("is_tracing", "is_torchdynamo_exporting"):
                _replace(changes, masking_utils, name, _no)
        yield


# Named functions, not lambdas: `torch.compile` would compile again for each new function object.
def _yes(*_: Any, **named: Any) -> bool:
    return True


def _no(*_: Any, **named: Any) -> bool:
    return False


def _no_packed_rows(position_ids: Any) -> None:
    return None


def _replace(changes: ExitStack, module: Any, name: str, function: Any) -> None:
    """Replace a function of a module until the end of `changes`; do nothing in a version that does not have it."""
    if hasattr(module, name):
        changes.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, function)
