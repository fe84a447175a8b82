"""Work on the side stream is done before what waits for it, and its inputs stay alive until then."""

import gc
import weakref
from functools import partial

import pytest
import torch

import holdfast
from holdfast import Context
from holdfast.kernels.operators import on_side_stream, wait_for_side_stream
from holdfast.routing import Previous, clustering

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def add(value: torch.Tensor, given: torch.Tensor) -> None:
    value.add_(given)


@pytest.mark.parametrize("device", DEVICES)
def test_work_after_waiting_sees_what_the_side_stream_wrote_and_returned(device: str) -> None:
    value, given = torch.zeros(3, device=device), torch.ones(3, device=device)

    def work() -> torch.Tensor:
        if device == "cuda":
            torch.cuda._sleep(20_000_000)  # as long as a hundred kernels: without waiting, the next would come first
        value.add_(given)
        return given + 1

    given.mul_(2)  # launched before: the work sees it
    result = on_side_stream(value, work)
    wait_for_side_stream(value)
    assert (value * 1).tolist() == [2.0, 2.0, 2.0] and (result * 1).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_side_work_reads_is_released_after_waiting(device: str) -> None:
    value, given = torch.zeros(3, device=device), torch.ones(3, device=device)
    alive = weakref.ref(given)
    on_side_stream(value, partial(add, value, given))
    del given
    gc.collect()
    assert (alive() is not None) == (device == "cuda")
    wait_for_side_stream(value)
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_are_the_same_to_the_bit_with_and_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    router = holdfast.create_router("ac+similarity", dim=256, experts=16, k=4, rank=32).to("cuda", torch.bfloat16)
    tokens = torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    previous = Previous(tokens.detach(), router.eval()(tokens.detach()))
    router.train()
    state = {name: value.clone() for name, value in router.state_dict().items()}
    expected: list[tuple[torch.Tensor, ...]] = []
    got: list[tuple[torch.Tensor, ...]] = []
    for steps, streams in ((expected, False), (got, True)):
        monkeypatch.setattr(clustering, "on_side_stream", on_side_stream if streams else lambda _, work: work())
        router.load_state_dict(state)
        for _ in range(30):  # memory is handed out again while kernels run
            routing = router(tokens, Context(causal=True, previous=previous))
            inputs = [tokens, *router.parameters()]
            torch.cuda._sleep(200_000)
            steps.append(torch.autograd.grad(routing.weights.square().sum() + routing.gates.square().sum(), inputs))
    for one, other in zip(expected, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
