"""Operators and kernels that are started with less Python: the same work, and nothing that wants to see it misses it."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.kernels.fp32_linear import linear_float32
from holdfast.kernels.operators import Kernel


class Compiled:
    """A version of a kernel, as Triton returns it."""

    packed_metadata, function = "metadata", "function"

    def __init__(self, launches: list[Any]) -> None:
        self.launches = launches

    def run(self, *arguments: Any) -> None:
        assert arguments[3:9] == ("stream", "function", "metadata", None, None, None)
        self.launches.append((arguments[:3], arguments[9:]))


class Compiler:
    """A stand-in for a kernel of Triton: it counts how often Triton itself launches it."""

    arg_names = ("values", "out", "size", "scale", "WIDE", "BLOCK")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.asked, self.launches = compiles, 0, []  # type: ignore[var-annotated]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*operands: Any, **constants: Any) -> Compiled | None:
            self.asked += 1
            return Compiled(self.launches) if self.compiles else None

        return launch


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)


def launch(kernel: Kernel, values: Tensor, size: int = 5, **constants: Any) -> None:
    kernel[(3, 2)](values, values, size, 0.5, **{"WIDE": True, "BLOCK": 64, "num_warps": 4, **constants})


def launched(compiles: bool = True) -> tuple[Compiler, Kernel]:
    """Return the stand-in of a kernel and the kernel, which was launched once."""
    compiler = Compiler(compiles)
    kernel = Kernel(compiler)
    launch(kernel, torch.zeros(8))
    return compiler, kernel


def test_the_second_launch_does_not_ask_triton() -> None:
    kernel, fast = launched()
    assert kernel.asked == 1 and kernel.launches == []
    other = torch.ones(8)
    launch(fast, other, 7)  # another tensor and another size of the same kind
    assert kernel.asked == 1
    ((grid, arguments),) = kernel.launches
    assert grid == (3, 2, 1)
    assert arguments[0] is arguments[1] is other and arguments[2:] == (7, 0.5, True, 64)


OTHER_KINDS: dict[str, Any] = {
    "another dtype": lambda kernel: launch(kernel, torch.zeros(8, dtype=torch.bfloat16)),
    "another address": lambda kernel: launch(kernel, torch.zeros(9)[1:]),
    "a size of 1": lambda kernel: launch(kernel, torch.zeros(8), 1),
    "an aligned size": lambda kernel: launch(kernel, torch.zeros(8), 32),
    "a size of 64 bits": lambda kernel: launch(kernel, torch.zeros(8), 2**31 + 1),
    "another constant": lambda kernel: launch(kernel, torch.zeros(8), WIDE=False),
    "another option": lambda kernel: launch(kernel, torch.zeros(8), num_warps=8),
}


@pytest.mark.parametrize("other", OTHER_KINDS)
def test_arguments_of_another_kind_are_compiled_anew(other: str) -> None:
    kernel, fast = launched()
    OTHER_KINDS[other](fast)
    assert kernel.asked == 2
    OTHER_KINDS[other](fast)
    assert kernel.asked == 2 and len(kernel.launches) == 1


def test_the_interpreter_is_asked_every_time() -> None:
    kernel, fast = launched(compiles=False)
    launch(fast, torch.zeros(8))
    assert kernel.asked == 2


def test_a_profiler_with_hooks_is_called_by_triton() -> None:
    knobs = pytest.importorskip("triton.knobs")
    (kernel, fast), seen, values = launched(), list[Any](), torch.zeros(8)
    knobs.runtime.launch_exit_hook.add(seen.append)
    launch(fast, values)
    knobs.runtime.launch_exit_hook.remove(seen.append)
    assert kernel.asked == 2 and kernel.launches == []
    launch(fast, values)
    assert kernel.asked == 2 and len(kernel.launches) == 1


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_modes_see_operators() -> None:
    rows, weight = torch.randn(4, 8), torch.randn(3, 8)
    with Seen() as mode:
        found = linear_float32(rows, weight)
    assert "holdfast::matmul_float32" in mode.names
    torch.testing.assert_close(found, rows @ weight.t())


def test_fake_tensors_run_the_fake_operator() -> None:
    with FakeTensorMode():
        inside = linear_float32(torch.randn(4, 8), torch.randn(3, 8))
    assert inside.shape == (4, 3) and type(inside).__name__ == "FakeTensor"


def test_tensors_of_another_class_see_operators() -> None:
    linear_float32(torch.randn(4, 8).as_subclass(Own), torch.randn(3, 8))
    assert any("matmul_float32" in name for name in Own.seen)
