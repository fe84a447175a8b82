"""Models whose weights are spread over processes, made whole for writing: every process takes part, the first one writes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from holdfast.routing.state import several_ranks


def is_spread(model: nn.Module) -> bool:
    """Does this process hold only a part of some weight (FSDP2, `shard_experts`, tensor parallelism)?"""
    if not several_ranks():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The model's state with whole weights, on the first process; empty on the others. All of them call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


def on_first_process(action: Callable[[], object]) -> None:
    """Act on the first process only; where that fails, all raise its error, and none waits for ever."""
    problem: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as raised:
            problem = [raised]
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]


@contextmanager
def as_if_whole(model: Any) -> Iterator[None]:
    """Inside the `with`, transformers does not gather a model that it has distributed itself: the first process is alone."""
    config = model.config
    plan = config.__dict__.pop("distributed_config", None)
    try:
        yield
    finally:
        if plan is not None:
            config.distributed_config = plan
