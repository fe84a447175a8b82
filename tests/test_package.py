"""The package from outside: what it exports, what importing it brings along."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import get_type_hints

import pytest
from torch import nn

import holdfast


@pytest.mark.parametrize("function", [holdfast.reroute, holdfast.restore, holdfast.sparsify])
def test_a_model_is_returned_as_the_type_that_was_given(function: Callable[..., object]) -> None:
    """So that an editor completes `.generate` on the result."""
    hints = get_type_hints(function)
    assert hints["return"] is hints["model"] and hints["model"].__bound__ is nn.Module


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
