"""Every operator can be called through PyTorch's dispatcher, as `torch.compile` calls it, also where there is no GPU."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import holdfast.kernels
import holdfast.routing
from holdfast.kernels.operators import operator

pytest.importorskip("triton")

T, D, E, K, N, H = 6, 8, 4, 2, 5, 2  # tokens, width, experts, slots, sequence, heads
F32, I64, I32, BOOL = torch.float32, torch.int64, torch.int32, torch.bool


def f32(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
    return shape, F32


ROWS: list[Any] = [f32(1, T, D), f32(1, T, D), f32(1, T, E)]  # query, key and value of one sequence
PLAN: list[Any] = [((T * K,), I64), ((T, K), I64), ((E,), I32), None]
# Arguments of a call: a tensor is (shape, dtype), several are a list of these. Optional arguments are None.
CALLS: dict[str, list[Any]] = {
    "assign_balanced": [f32(T, E), ((T,), BOOL), K],
    "attention_entropy": [f32(1, H, N, D), f32(1, H, N, D), None, None, True, 0.5, 1],
    "choose": [f32(T, E), f32(T, E), None, K, K, 2, False, 1.0, 50.0, None],
    "choose_backward": [
        *(f32(T, K), f32(T, E), f32(T, E), None, f32(T, K), ((T, E), torch.int16), f32(0)),
        *(K, 2, False, 1.0, 50.0),
    ],
    "chosen_together": [f32(T, E), None, K],
    "cluster_sums": [f32(T, D), None, ((64,), I32), ((E + 1,), I32), None, None, False],
    "copy_of": [f32(E, E)],
    "count_bytes": [f32(T, E), None, f32(), ((256,), I32), 3],
    "dispatch": [((T, K), I64), E, T * K],
    "feature_scales": [f32(E, D), 0.1],
    "first_forward": [f32(T, D)],
    "gather_mm": [f32(T, D), f32(E, 16, D), *PLAN],
    "gather_mm_backward": [f32(T * K, 16), f32(T, D), f32(E, 16, D), *PLAN, [True, True, False]],
    "group_by_cluster": [((T,), I64), None, E],
    "limit_experts": [f32(T, E), ((T, E), I64), ((T, E), BOOL), ((T,), BOOL), [1.0], 0, False, False],
    "matmul_float32": [f32(T, D), f32(D, E)],
    "midpoint_of_bytes": [f32(), ((256,), I32)],
    "mix_parts": [*ROWS, None, None, None, False, [True, True, True]],
    "mm_combine": [f32(T * K, 16), f32(E, D, 16), f32(T, K), *PLAN, ""],
    "mm_combine_backward": [f32(T, D), f32(T * K, 16), f32(E, D, 16), f32(T, K), *PLAN, "", [True, True, True, False]],
    "projected_norms": [f32(T, D), f32(D, 16), None, H],
    "put_head": [f32(1, N, D), ((1,), I64), H, H],
    "require_finite": [f32(T, E), f32(T, D), ((20,), I64), None],
    "softmax_mix": [*ROWS, *(None,) * 7, [], False, True, 0.5, 0.0],
    "softmax_mix_backward": [
        *(f32(1, T, E), None, f32(1, T, E), f32(1, T), *ROWS, *(None,) * 7),
        *([], False, True, 0.5, 0.0, [True, True, True]),
    ],
    "split_linear": [f32(T, D), f32(E, D), *(None,) * 4],
    "split_linear_backward": [f32(T, E), f32(T, D), f32(E, D), *(None,) * 4, [True, True]],
    "strip_gaps": [f32(T, E), K, E, False],
    "take_heads": [[f32(1, H, N, D), f32(1, H, N, D)], ((1,), I64), H],
    "value_at_rank": [((), I64), ((256,), I32)],
}


def registered() -> set[str]:
    """Return the names of all operators of Holdfast, after importing the modules that define them."""
    for package in (holdfast.kernels, holdfast.routing):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "triton" not in module.name:
                importlib.import_module(module.name)
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("holdfast::") for name in names if name.startswith("holdfast::")}


def test_the_table_names_every_operator() -> None:
    assert registered() == set(CALLS)


def fake(argument: Any) -> Any:
    """Return what the table describes, with fake tensors on a GPU."""
    if isinstance(argument, tuple):
        return torch.empty(argument[0], dtype=argument[1], device="cuda")
    return [fake(each) for each in argument] if isinstance(argument, list) else argument


@pytest.mark.every_combination
@pytest.mark.parametrize("name", CALLS)
def test_an_operator_can_be_called_without_its_optional_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered()
    monkeypatch.setattr("holdfast.kernels.token_mixing.launch.shared_memory", lambda device: 2**17)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    call = getattr(torch.ops.holdfast, name).default
    # Without no_grad, autograd on fake CUDA tensors aborts the process of a PyTorch without CUDA.
    with torch.no_grad(), FakeTensorMode():
        call(*(fake(argument) for argument in CALLS[name]))


def test_an_operator_with_a_default_value_is_refused() -> None:
    with pytest.raises(AssertionError, match="doubled has a default value"):
        operator("doubled(Tensor rows, float by=2) -> Tensor", torch.mul, torch.mul)
    assert not any("=" in str(getattr(torch.ops.holdfast, name).default._schema).partition("->")[0] for name in CALLS)
