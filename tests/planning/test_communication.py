"""What GPUs send: router sums and expert exchanges as measured, the rest by the formulas of a ring."""

import json
from pathlib import Path
from typing import Any

import exchanges_on_ranks
import pytest
import torch
from ranks import on_ranks
from router_names import IN_TEXT_MODELS
from tiny_dense import tiny_dense

import holdfast
from holdfast.planning.model_shape import Setting, measure_shape
from holdfast.planning.planning import all_reduce_bytes, exchanged_bytes, layouts, mean_other_ranks, training_memory


def sparse(router: str = "smoe", **options: Any) -> Any:
    return holdfast.sparsify(tiny_dense("llama"), experts=8, router=router, **options).train()


@pytest.mark.parametrize(
    ("router", "options"),
    [
        *((name, {}) for name in [*IN_TEXT_MODELS, "symphony+attention", "ac+smooth"]),
        ("ac", {"stats": "batch"}),
        ("smooth", {"control": "loss"}),
        ("smoe", {"gradient_scaling": 10.0}),
    ],
    ids=str,
)
def test_routers_sum_what_is_planned(router: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward and in its recomputation, in which routers update no state."""
    names = router.split("+")
    again = bool(options) or bool({"sinkhorn", "stablemoe"} & set(names))  # what it sums again in a recomputation
    model = sparse(router, **options)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sent: list[int] = []
    gathered: list[int] = []

    def gather(rows: list[torch.Tensor], own: torch.Tensor) -> None:
        gathered.append(own.nbytes if own.dim() > 1 else 0)  # not the number of tokens
        for each in rows:
            each.copy_(own)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: sent.append(value.nbytes))
    shape, ids = measure_shape(model, Setting(12, 4)), torch.arange(3, 27).view(2, 12)
    costs = [cost for layer in shape.sparse for cost in layer.costs]
    planned = sum(cost.gathered for cost in costs)
    loss = model(input_ids=ids, labels=ids).loss
    assert (sum(sent), sum(gathered)) == (sum(cost.summed for cost in costs), ids.numel() * planned)
    sent.clear()
    gathered.clear()
    loss.backward()
    assert (sum(sent), sum(gathered)) == (sum(cost.summed_again for cost in costs), ids.numel() * planned)
    assert (sum(sent) > 0) == again
    assert (planned > 0) == bool({"base", "capacity"} & set(names))


def spread(gpus: int, router: str = "smoe", checkpointing: bool = False) -> dict[str, Any]:
    shape = measure_shape(sparse(router), Setting(12, 2))
    held = training_memory(shape, 24, 2, checkpointing)
    found = layouts(shape, held, gpus=gpus, tokens=24, number_bytes=2, checkpointing=checkpointing)
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


def test_expert_parallelism_sends_tokens_out_and_back_in_forward_and_backward() -> None:
    at = spread(4)
    other = 3 * (1 - 15 / 28)  # of 3 GPUs those with one of k = 2 experts: 1 - C(6,2) / C(8,2)
    assert at["expert"].exchanged == pytest.approx(24 * 3 * other * (4 * 32 * 2 + 16 * 2))  # tokens, layers, d, bytes, k
    again = spread(4, checkpointing=True)["expert"].exchanged
    assert again == pytest.approx(24 * 3 * other * (5 * 32 * 2 + 28 * 2))
    share = at["shape"].expert_parameters / at["shape"].parameters
    assert at["expert"].held == pytest.approx(at["memory"].held * (1 - share * 3 / 4))


def test_more_gpus_than_experts_hold_copies_of_them() -> None:
    eight, many = spread(8), spread(32)
    assert many["expert"].held == pytest.approx(eight["expert"].held)
    assert many["expert"].sent > eight["expert"].sent  # the copies' gradients are summed


@pytest.mark.parametrize(("experts", "used", "processes"), [(8, 2, 1), (8, 4, 2), (12, 5, 4), (6, 6, 3), (16, 2.5, 8)])
def test_the_mean_number_of_other_ranks_equals_a_simulation(experts: int, used: float, processes: int) -> None:
    random = torch.Generator().manual_seed(0)
    draws = 200_000
    order = torch.rand(draws, experts, generator=random).argsort(1)
    number = int(used) + (torch.rand(draws, 1, generator=random) < used % 1).int()
    owner = (order // (experts // processes)).where(torch.arange(experts) < number, 0)  # at home
    others = sum((owner == process).any(1).double().mean() for process in range(1, processes))
    assert mean_other_ranks(experts, used, processes) == pytest.approx(float(others), abs=0.01)


@pytest.mark.slow
def test_two_ranks_exchange_what_is_planned() -> None:
    """Bytes per token exactly; the number of tokens as far as untrained routers select uniformly."""
    script = Path(exchanges_on_ranks.__file__)
    found = json.loads(on_ranks(script).splitlines()[-1])
    sequences, length = exchanges_on_ranks.SIZE
    for case in exchanges_on_ranks.CASES:
        shape = measure_shape(exchanges_on_ranks.built(case), Setting(length, 4))
        layers = [layer for layer in shape.layers if layer.sparse is not None]
        for checkpointing in (False, True):
            rows, size = found[f"{case}, checkpointed" if checkpointing else case]
            each = {exchanged_bytes(layer, 4, checkpointing) for layer in layers}
            assert [size / rows] == list(each), (case, checkpointing)
            held = training_memory(shape, sequences * length, 4, checkpointing)
            apart = layouts(shape, held, gpus=2, tokens=sequences * length, number_bytes=4, checkpointing=checkpointing)[2]
            assert size / 2 == pytest.approx(apart.exchanged, rel=0.05), (case, checkpointing)


def test_a_ring_all_reduce() -> None:
    assert all_reduce_bytes(100.0, 1) == 0 and all_reduce_bytes(100.0, 2) == 100
