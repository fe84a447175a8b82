"""Python runs this file at its start in whatever `holdfast run` starts: there `import transformers` imports Holdfast first.

A program that does not use transformers imports nothing. The machine's own sitecustomize, which this one hides, is run too.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType


class _BeforeTransformers:
    """Imports Holdfast when transformers is looked for, and finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "transformers":
            sys.meta_path.remove(self)
            try:
                importlib.import_module("holdfast")
            except ImportError as problem:
                print(f"holdfast run: {sys.executable} cannot import holdfast ({problem}).", file=sys.stderr)
        return None


def _run_hidden() -> None:
    """The sitecustomize that Python would have run."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if os.path.abspath(place) != here])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _BeforeTransformers())
_run_hidden()
