"""The state rule: staged by a training forward, committed once, all ranks alike."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast import Context, create_router
from holdfast.routing import Informer, Router, StatefulPart
from holdfast.routing.state import sum_over_ranks


class Counter(Informer, StatefulPart):
    """Counts tokens; the count it used is added to the gates, so that a forward shows which state it saw."""

    side = "expert"
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_statistics(tokens=torch.zeros(()))

    def new_state(self) -> dict[str, Tensor]:
        return {"count": self.count + self.get_buffer("staged_tokens")}

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        used = self.count.clone()
        if self.training:
            self.stage_statistics(tokens=sum_over_ranks(torch.tensor(float(tokens.shape[0] * tokens.shape[1]))))
        return gates + used


def build() -> tuple[Router, Counter]:
    plain = create_router("smoe", dim=4, experts=3)
    counter = Counter()
    return Router(plain.score, plain.select, (counter,)), counter


def seen(routing_gates: Tensor) -> float:
    """Which count a forward used: gates sum to 1 without it."""
    return float((routing_gates.detach().sum(-1) - 1).mean() / 3)


def test_a_forward_uses_the_state_from_before_its_batch() -> None:
    built, counter = build()
    used = [round(seen(built(torch.randn(2, 5, 4)).gates)) for _ in range(4)]
    assert used == [0, 10, 20, 30]
    assert counter.count == 30


def test_eval_commits_what_is_staged_and_only_once() -> None:
    built, counter = build()
    built(torch.randn(2, 5, 4))
    built.eval()
    built.eval()
    assert counter.count == 10
    built.train()
    assert round(seen(built(torch.randn(2, 5, 4)).gates)) == 10


def test_saving_commits_what_is_staged() -> None:
    built, _ = build()
    built(torch.randn(2, 5, 4))
    assert built.state_dict()["inform.0.count"] == 10


def test_evaluation_never_stages() -> None:
    built, counter = build()
    built.eval()(torch.randn(2, 5, 4))
    assert not counter.pending
    assert built.state_dict()["inform.0.count"] == 0


def test_recomputation_sees_the_same_state_and_counts_once() -> None:
    built, counter = build()
    built(torch.randn(2, 5, 4))
    calls = []

    def forward(x: Tensor) -> Tensor:
        gates = built(x).gates
        calls.append(round(seen(gates)))
        return gates.square().sum()

    for expected in (10, 20):
        calls.clear()
        checkpoint(forward, torch.randn(2, 5, 4, requires_grad=True), use_reentrant=False).backward()
        assert calls == [expected, expected]
    assert counter.commit() is None and counter.count == 30


@pytest.mark.slow
def test_recomputation_of_a_compiled_router_counts_once() -> None:
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.init()  # a compiler does it, and checkpointing does not want to see that
    built, counter = build()
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(2, 5, 4, requires_grad=True)
        checkpoint(lambda y: compiled(y).gates.square().sum(), x, use_reentrant=False).backward()
    built.eval()
    assert counter.count == 30


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor has no C++ compiler here")
def test_a_compiled_backward_reads_the_state_that_its_forward_saw() -> None:
    """Inductor makes small things again in the backward, when buffers have moved on."""
    torch.compiler.reset()
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        built = create_router("remoe", dim=4, experts=3, l1=0.1)
        run = torch.compile(built, fullgraph=True) if compiled else built
        batches = [torch.randn(2, 5, 4, requires_grad=True) for _ in range(3)]
        gradients.append([torch.autograd.grad(run(batch).loss, batch)[0] for batch in batches])
    torch.testing.assert_close(*gradients)


def test_a_backward_after_the_next_forward_still_works() -> None:
    """State used in a graph is not overwritten under it."""
    built = create_router("remoe", dim=4, experts=3)
    first = built(torch.randn(2, 5, 4))
    built(torch.randn(2, 5, 4))
    first.loss.backward()


def test_state_stays_float32_when_the_model_does_not() -> None:
    built, counter = build()
    counter.count.fill_(16777215.0)
    built.to(torch.bfloat16)
    assert counter.count.dtype == torch.float32 and counter.count == 16777215.0
    assert built.score.weight.dtype == torch.bfloat16


def test_copies_do_not_share_state() -> None:
    built, counter = build()
    other = copy.deepcopy(built)
    built(torch.randn(2, 5, 4))
    built.eval()
    assert counter.count == 10
    assert other.state_dict()["inform.0.count"] == 0


@pytest.mark.slow
def test_two_processes_learn_the_same_from_both_batches() -> None:
    script = Path(__file__).with_name("two_ranks.py")
    assert sorted(on_ranks(script).split("\n"))[-2:] == ["rank 0: 20", "rank 1: 20"]


@pytest.mark.parametrize("name", ["remoe", "smooth"])
def test_a_recomputation_neither_counts_nor_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the gradient of the forward that did."""
    messages: list[int] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: messages.append(value.nbytes))
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        built, x = create_router(name, dim=4, experts=3, k=1), torch.randn(2, 5, 4, requires_grad=True)

        def forward(y: Tensor, built: Router = built) -> Tensor:
            routing = built(y)
            return routing.weights.square().sum() + 1e8 * routing.loss  # remoe's own is too small to see

        total = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
        assert messages
        messages.clear()
        total.backward()
        assert not messages
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)
