"""The package from outside: what it exports, what importing it brings along."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
from torch import nn

import holdfast


def test_instruments_are_functions_beside_packages_of_other_names() -> None:
    import holdfast.auditing
    import holdfast.certificates
    import holdfast.planning

    for function in (
        holdfast.audit,
        holdfast.certify,
        holdfast.compare,
        holdfast.measure_geometry,
        holdfast.measure_mismatch,
        holdfast.plan,
    ):
        assert inspect.isfunction(function) and "Example:" in (function.__doc__ or "")


@pytest.mark.parametrize("function", [holdfast.reroute, holdfast.restore, holdfast.sparsify])
def test_a_model_is_returned_as_the_type_that_was_given(function: Callable[..., object]) -> None:
    """So that an editor completes `.generate` on the result; the slow test beside asks mypy itself."""
    hints = get_type_hints(function)
    assert hints["return"] is hints["model"] and hints["model"].__bound__ is nn.Module


@pytest.mark.slow  # without a cache, mypy reads all of torch
def test_mypy_knows_the_model_that_comes_back(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import holdfast, torch\n"
        "class Own(torch.nn.Module): ...\n"
        "reveal_type(holdfast.reroute(Own(), 'smooth'))\n"
        "reveal_type(holdfast.restore(Own()))\n"
        "reveal_type(holdfast.sparsify(Own(), experts=2))\n"
    )
    line = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(tmp_path / "own.py")]
    found = subprocess.run(line, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert found.stdout.count('Revealed type is "own.Own"') == 3, found.stdout + found.stderr


def test_load_returns_a_model_of_transformers() -> None:
    assert inspect.signature(holdfast.load).return_annotation == "PreTrainedModel"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_holdfast_imports_no_extra() -> None:
    heavy = [
        "transformers",
        "triton",
        "datasets",
        "accelerate",
        "PIL",
        "sklearn",
        "scipy",
        "rich",
        "tyro",
        "plotly",
        "jinja2",
        "yaml",
        "torch._dynamo",
        "torch._inductor",
    ]
    code = "import torch, sys; before = set(sys.modules); import holdfast; print(*set(sys.modules) - before)"
    assert set(run(code).split()).isdisjoint(heavy)
