"""What GPUs send: routers' sums exactly, the rest by the formulas of a ring."""

from typing import Any

import pytest
import torch
from tiny_dense import tiny_dense

import holdfast
from holdfast.plan import memory
from holdfast.plan.communication import layouts, reduced, sums
from holdfast.plan.outline import Setting, outline


def sparse(router: str = "smoe", **options: Any) -> Any:
    return holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router=router, **options).train()


@pytest.mark.parametrize("router", [*holdfast.routers(), "symphony+attention", "ac+smooth"])
def test_routers_sum_what_is_planned(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse(router)
    sent: list[int] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: sent.append(value.nbytes))
    model(input_ids=torch.arange(3, 27).view(2, 12))
    assert sum(sent) == sums(outline(model, Setting(12, 4)))


def spread(gpus: int, router: str = "smoe", checkpointing: bool = False) -> dict[str, Any]:
    shape = outline(sparse(router), Setting(12, 2))
    held = memory.training(shape, 24, 2, checkpointing)
    found = layouts(shape, held, gpus=gpus, tokens=24, number=2, checkpointing=checkpointing)
    return {"shape": shape, "memory": held, **{layout.name: layout for layout in found}}


def test_one_gpu_sends_nothing_and_holds_everything() -> None:
    alone = spread(1, "symphony")
    for name in ("ddp", "fsdp", "expert"):
        assert alone[name].traffic == 0
        assert alone[name].total == pytest.approx(alone["memory"].total)


def test_ddp_reduces_gradients_and_fsdp_gathers_weights_twice() -> None:
    at = spread(4)
    gradients, weights = at["memory"].gradients, at["memory"].weights
    assert at["ddp"].sent == 2 * gradients * 3 / 4
    assert at["fsdp"].sent == pytest.approx(2 * weights * 3 / 4 + gradients * 3 / 4)
    assert at["fsdp"].held == pytest.approx(at["memory"].held / 4)
    assert at["fsdp"].gathered == 2 * 2 * max(layer.parameters for layer in at["shape"].layers)


def test_experts_apart_exchange_rows_there_and_back_forward_and_backward() -> None:
    at = spread(4)
    assert at["expert"].exchanged == 4 * 24 * 3 * 2 * 32 * 2 * 3 / 4  # tokens, layers, k, d, bytes, what leaves
    share = at["shape"].expert_parameters / at["shape"].parameters
    assert at["expert"].held == pytest.approx(at["memory"].held * (1 - share * 3 / 4))


def test_more_gpus_than_experts_hold_copies_of_them() -> None:
    eight, many = spread(8), spread(32)
    assert many["expert"].held == pytest.approx(eight["expert"].held)
    assert many["expert"].sent > eight["expert"].sent  # the copies' gradients are summed


def test_a_recomputation_sums_once_more() -> None:
    assert spread(4, "symphony", checkpointing=True)["ddp"].summed == 2 * spread(4, "symphony")["ddp"].summed > 0


def test_a_ring() -> None:
    assert reduced(100.0, 1) == 0 and reduced(100.0, 2) == 100
