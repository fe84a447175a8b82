"""ReMoE's load-weighted penalty, its warm-up, and one coefficient for all layers of a model."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast import Context, Experts, MoE, create_router
from holdfast.routing import Router, join_routers
from holdfast.testing import check_router


class Stack(nn.Module):
    """A few MoE layers, one after the other, with or without activation checkpointing."""

    def __init__(self, layers: int, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        routers = [create_router("remoe", dim=8, experts=6, **options) for _ in range(layers)]
        self.layers = nn.ModuleList(MoE(router, Experts(8, 8, 6)) for router in routers)
        self.recompute = recompute
        join_routers(routers)

    @property
    def coefficients(self) -> list[float]:
        return [float(layer.router.select.l1) for layer in self.layers]  # type: ignore[union-attr, operator, arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for layer in self.layers:
            run = lambda y, layer=layer: (lambda out, routing: (y + out, routing.loss))(*layer(y))  # noqa: E731
            x, loss = checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)
            losses.append(loss)
        return x, torch.stack(losses).sum()


def test_the_load_weighted_penalty_is_that_of_the_paper() -> None:
    built = create_router("remoe", dim=8, experts=5, k=2, penalty="load", l1=0.3)
    tokens = torch.randn(2, 9, 8, requires_grad=True)
    mask = torch.rand(2, 9) < 0.7
    routing = built(tokens, Context(token_mask=mask))
    gates, real = routing.gates, mask.flatten()
    expected = torch.zeros(())
    for expert in range(5):
        share = 5 / (2 * int(real.sum())) * int((gates[real, expert] > 0).sum())
        expected = expected + share * gates[real, expert].sum() / int(real.sum())
    torch.testing.assert_close(routing.losses["l1"], 0.3 * expected)
    wanted = [tokens, *built.parameters()]
    found = torch.autograd.grad(routing.losses["l1"], wanted, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(0.3 * expected, wanted))


def test_the_penalty_is_off_during_the_warm_up_and_saved_with_it() -> None:
    built, tokens = create_router("remoe[warmup=0.25, l1=0.5]", dim=8, experts=6, k=1), torch.randn(2, 40, 8)
    for fraction, enforced in ((0.0, False), (0.2, False), (0.25, True), (0.9, True)):
        built.progress(fraction)
        before = float(built.select.l1)  # type: ignore[arg-type]
        loss = built(tokens).losses["l1"]
        assert (float(loss) > 0) == enforced
        built.eval().train()  # commits
        assert (float(built.select.l1) != before) == enforced  # type: ignore[arg-type]
    other = create_router("remoe[warmup=0.25, l1=0.5]", dim=8, experts=6, k=1)
    assert float(other(tokens).losses["l1"]) == 0  # before the first progress: dense
    other.load_state_dict(built.state_dict())
    assert float(other(tokens).losses["l1"]) > 0


def test_after_the_warm_up_it_conforms() -> None:
    def build() -> Router:
        built = create_router("remoe", dim=24, experts=7, warmup=0.1, penalty="load")
        built.progress(0.5)
        return built

    assert not check_router(build, only=["no inert coefficient", "save and load", "activation checkpointing"]).skipped


@pytest.mark.parametrize("recompute", [False, True])
def test_one_coefficient_follows_the_mean_of_all_layers(recompute: bool) -> None:
    """Two layers use about 3 experts per token and one none: together all follow the mean, which is above k = 1, once a
    batch. Alone the third would move in the other direction."""
    stack = Stack(3, recompute, coefficient="model", l1=0.1, l1_rate=1.5, k=1)
    with torch.no_grad():
        stack.layers[2].router.score.weight.zero_()  # type: ignore[union-attr, operator]
    for step in range(4):
        torch.manual_seed(step)
        out, loss = stack(torch.randn(2, 9, 8))
        assert stack.coefficients == pytest.approx([0.1 * 1.5**step] * 3)  # of the batches before this one
        (out.square().mean() + loss).backward()
        staged = [float(layer.router.select.staged_active) for layer in stack.layers]  # type: ignore[union-attr, arg-type]
        assert staged[2] == 0 and sum(staged) > 3 * 18
    stack.eval()
    assert stack.coefficients == pytest.approx([0.1 * 1.5**4] * 3)
    assert not any(layer.router.select.pending for layer in stack.layers)  # type: ignore[union-attr]


def test_layers_with_their_own_coefficients_move_apart() -> None:
    stack = Stack(2, l1=0.1, l1_rate=1.5, k=2)
    with torch.no_grad():
        stack.layers[1].router.score.weight.zero_()  # type: ignore[union-attr, operator]
    stack(torch.randn(2, 9, 8))
    stack.eval()
    assert stack.coefficients == pytest.approx([0.15, 0.1 / 1.5])


def test_a_shared_coefficient_is_saved_loaded_and_copied_in_every_layer() -> None:
    stack = Stack(3, coefficient="model", l1=0.1, l1_rate=1.5)
    stack(torch.randn(2, 9, 8))
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)  # saving commits, in the first layer for all
    file.seek(0)
    loaded = Stack(3, coefficient="model", l1=0.1, l1_rate=1.5)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.coefficients == stack.coefficients == [stack.coefficients[0]] * 3
    assert stack.coefficients[0] != pytest.approx(0.1)
    copied = copy.deepcopy(stack)
    tokens = torch.randn(2, 9, 8)
    for model in (copied, loaded, stack):
        model(tokens)
        model.eval()
    assert copied.coefficients == loaded.coefficients == stack.coefficients


@pytest.mark.slow
def test_a_shared_coefficient_compiles_to_one_graph() -> None:
    outcomes = []
    for compiled in (False, True):
        torch.compiler.reset()
        stack = Stack(2, coefficient="model", penalty="load", l1=0.1, l1_rate=1.5)
        run = torch.compile(stack, fullgraph=True, backend="aot_eager") if compiled else stack
        for step in range(3):
            torch.manual_seed(step)
            _, loss = run(torch.randn(2, 9, 8))
        outcomes.append((loss.detach(), torch.tensor(stack.eval().coefficients)))
    torch.testing.assert_close(*outcomes)


@pytest.mark.slow
def test_two_processes_equal_one() -> None:
    script = Path(__file__).with_name("learning_on_ranks.py")
    assert on_ranks(script, "2", "remoe") == on_ranks(script, "1", "remoe", processes=1)
