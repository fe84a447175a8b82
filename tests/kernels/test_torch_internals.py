"""The private interfaces of PyTorch still do what the package needs: a new version of torch that changes one fails here."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import holdfast
from holdfast.kernels.torch_internals import (
    assert_on_device,
    constant_when_compiled,
    has_gradient,
    is_exporting,
    is_exporting_to_onnx,
    is_intercepted,
    is_recomputing,
    keep_address,
    raw_stream,
    register_dataclass,
    running_backward,
)

SOURCE = Path(holdfast.__file__).parent
PRIVATE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]|^\s*from torch\S* import .*\b_[a-z]|_dynamo_marked", re.MULTILINE)


def test_private_interfaces_stand_in_one_file() -> None:
    files = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if PRIVATE.search(file.read_text())}
    # What is watched for must be named without importing torch; tests/hub/test_registration.py fails if it has another name.
    assert files == {"kernels/torch_internals.py", "registration.py"}


@pytest.mark.slow
def test_a_function_can_be_a_constant_for_the_compiler_without_importing_it() -> None:
    calls: list[int] = []

    @constant_when_compiled
    def one() -> int:
        calls.append(1)
        return len(sys.modules) > 0

    assert torch.compile(lambda x: x + one(), backend="eager", fullgraph=True)(torch.zeros(())).item() == 1
    assert calls == [1]
    code = "import sys, holdfast.kernels.torch_internals; assert 'torch._dynamo.symbolic_convert' not in sys.modules"
    path = os.pathsep.join([str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


class Asks(nn.Module):
    """Adds 1 if it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if is_exporting() else x + 0


def test_an_export_is_told_from_a_compilation() -> None:
    zero = torch.zeros(2)
    assert torch.export.export(Asks(), (zero,)).module()(zero).tolist() == [1, 1]
    assert torch.compile(Asks(), backend="eager", fullgraph=True)(zero).tolist() == [0, 0]
    assert not is_exporting() and not is_exporting_to_onnx()


def test_an_export_to_onnx_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert is_exporting_to_onnx()

    def add(x: Tensor) -> Tensor:
        return x + is_exporting_to_onnx()

    assert torch.compile(add, backend="eager", fullgraph=True)(torch.zeros(())).item() == 1


def test_modes_transforms_and_batched_gradients_intercept_operators() -> None:
    seen: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        seen.append(is_intercepted())
        return x

    ask(torch.zeros(2))
    with FlopCounterMode(display=False):
        ask(torch.zeros(2))
    torch.func.vmap(ask)(torch.zeros(2))
    leaf = torch.zeros(2, requires_grad=True)
    out = leaf * 1
    out.register_hook(ask)
    torch.autograd.grad(out, leaf, torch.eye(2), is_grads_batched=True)
    assert seen == [False, True, True, True]


def test_a_recomputation_runs_in_a_backward() -> None:
    seen: list[tuple[bool, int]] = []

    def forward(x: Tensor) -> Tensor:
        seen.append((is_recomputing(), running_backward()))
        return x.sin()

    leaf = torch.zeros(2, requires_grad=True)
    for _ in range(2):
        torch.utils.checkpoint.checkpoint(forward, leaf, use_reentrant=False).sum().backward()
    (first, of_first), (second, of_second), _, (_, of_fourth) = seen
    assert (first, of_first) == (False, -1) and second and of_second != of_fourth


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, answers: list[bool]) -> Tensor:
        ctx.answers = answers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.answers.append(has_gradient(ctx))
        return grad, None


def test_a_backward_knows_whether_it_adds_to_a_gradient() -> None:
    parameter, answers = nn.Parameter(torch.ones(2)), []  # type: ignore[var-annotated]
    for _ in range(2):
        Identity.apply(parameter * 2, answers).sum().backward()
    torch.autograd.grad(Identity.apply(parameter * 2, answers).sum(), parameter)
    assert answers == [False, True, False]


def test_a_kept_address_is_marked_for_the_compiler() -> None:
    rows = torch.zeros(2)
    keep_address(rows)
    assert rows._dynamo_static_input_type == "unguarded"  # type: ignore[attr-defined]


def test_an_assertion_on_the_device_fails() -> None:
    assert_on_device(torch.tensor(True), "fits")
    with pytest.raises(RuntimeError, match="does not fit"):
        assert_on_device(torch.tensor(False), "does not fit")


def test_an_exported_program_with_a_registered_dataclass_can_be_saved(tmp_path: Path) -> None:
    @dataclass
    class Pair:
        first: Tensor
        second: Tensor

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Pair:
            return Pair(x, x + 1)

    register_dataclass(Pair, "holdfast.tests.Pair")
    program = torch.export.export(Makes(), (torch.zeros(2),))
    torch.export.save(program, tmp_path / "made.pt2")
    assert torch.export.load(tmp_path / "made.pt2").module()(torch.zeros(2)).second.tolist() == [1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_stream_is_the_current_one() -> None:
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert raw_stream(0) == torch.cuda.current_stream(0).cuda_stream
