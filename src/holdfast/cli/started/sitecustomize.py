"""Import Holdfast before transformers in each program that `holdfast run` starts; Python runs this file at its start.

A program that does not use transformers does not import Holdfast. This file hides the machine's own sitecustomize, and so
runs it too.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType


class _BeforeTransformers:
    """Import Holdfast when transformers is about to be imported; find no module itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "transformers":
            sys.meta_path.remove(self)
            try:
                loaded = importlib.import_module("holdfast.public")
                for file in filter(None, os.environ.get("HOLDFAST_RUN_PLUGINS", "").split(os.pathsep)):
                    loaded.load_plugin(file)
            except (ImportError, ValueError) as problem:
                print(f"holdfast run: {sys.executable} cannot import holdfast ({problem}).", file=sys.stderr)
        return None


def _run_hidden() -> None:
    """Run the sitecustomize that Python would have run."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if os.path.abspath(place) != here])
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _BeforeTransformers())
_run_hidden()
