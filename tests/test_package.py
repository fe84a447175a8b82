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


@pytest.mark.parametrize("function", [holdfast.reroute, holdfast.restore, holdfast.sparsify])
def test_a_model_is_returned_as_the_type_that_was_given(function: Callable[..., object]) -> None:
    """So that an editor completes `.generate` on the result."""
    hints = get_type_hints(function)
    assert hints["return"] is hints["model"] and hints["model"].__bound__ is nn.Module


def test_load_returns_a_model_of_transformers() -> None:
    assert inspect.signature(holdfast.load).return_annotation == "PreTrainedModel"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_holdfast_alone_imports_no_other_package_and_offers_all_names() -> None:
    code = """
import sys, holdfast, holdfast.errors, holdfast.plugins
from holdfast import __version__, cli
assert {*holdfast.__all__, "__version__", "errors"} <= {*dir(holdfast)} and not hasattr(holdfast, "nothing")
print(*{name.partition(".")[0] for name in sys.modules} - {*sys.stdlib_module_names, "__main__", "sitecustomize"})
from holdfast import *
assert all(holdfast.__dict__[name] is globals()[name] for name in holdfast.__all__)
assert holdfast.routing.create_router is create_router
"""
    assert {name for name in run(code).split() if not name.startswith("_")} == {"holdfast"}


def test_a_plugin_can_be_loaded_before_anything_else_is_imported(tmp_path: Path) -> None:
    """All registries must be known before it runs, or what the package ships would count as the plugin's."""
    plugin = tmp_path / "own.py"
    plugin.write_text("import holdfast\n@holdfast.register_dataset('own', task='text', about='')\ndef own(folder): ...\n")
    assert run(f"from holdfast.plugins import load_plugin; print(load_plugin({str(plugin)!r}).provides)") == (
        "{'datasets': ('own',)}\n"
    )
