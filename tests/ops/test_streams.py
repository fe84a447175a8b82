"""Work beside: done when others come after it, and it holds what it reads."""

import gc
import weakref
from functools import partial

import pytest
import torch

from holdfast.ops.streams import beside, join

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def add(value: torch.Tensor, given: torch.Tensor) -> None:
    value.add_(given)


@pytest.mark.parametrize("device", DEVICES)
def test_what_comes_after_a_join_sees_what_was_done_beside(device: str) -> None:
    value, given = torch.zeros(3, device=device), torch.ones(3, device=device)

    def work() -> None:
        if device == "cuda":
            torch.cuda._sleep(20_000_000)  # as long as a hundred kernels: without waiting, the next would come first
        value.add_(given)

    given.mul_(2)  # launched before: the work sees it
    beside(value, work)
    join(value)
    assert (value * 1).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("device", DEVICES)
def test_what_work_returns_is_there_after_the_join(device: str) -> None:
    given = torch.ones(3, device=device)

    def work() -> torch.Tensor:
        if device == "cuda":
            torch.cuda._sleep(20_000_000)
        return given + 1

    result = beside(given, work)
    join(given)
    assert (result * 1).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_work_reads_is_let_go_at_the_join_and_not_before(device: str) -> None:
    value, given = torch.zeros(3, device=device), torch.ones(3, device=device)
    alive = weakref.ref(given)
    beside(value, partial(add, value, given))
    del given
    gc.collect()
    assert (alive() is not None) == (device == "cuda")
    join(value)
    gc.collect()
    assert alive() is None
