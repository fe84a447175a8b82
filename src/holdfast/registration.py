"""What other libraries must know of Holdfast: they are told when they are imported, so that Holdfast need not import them.

transformers    the registries of Auto classes, quantisers and the Trainer's callbacks (`holdfast.hub.checkpoint.REGISTRIES`)
torch           the operators in exported programs, which `torch.export.load` looks up by name

`import holdfast` adds to the modules that are imported already, and watches for the others. Only then are torch and
`holdfast.hub` imported.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WATCHED = (
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.quantizers.auto",
    "transformers.trainer",
    "torch._export.serde.serialize",  # `torch.export.load` imports it
)


def register_on_import() -> None:
    """Register with the watched modules that are imported, and with the others when they are."""
    if not any(isinstance(finder, _WatchingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WatchingFinder())
    for name in WATCHED:
        if name in sys.modules:
            _register(sys.modules[name])


def _register(module: ModuleType) -> None:
    """Import what registers with this module, and register."""
    import holdfast.public  # noqa: F401 (our operators, and all registries of names)
    from holdfast.hub.checkpoint import REGISTRIES

    if module.__name__ in REGISTRIES:
        REGISTRIES[module.__name__](module)


class _WatchingFinder:
    """Import finder that finds a watched module as the other finders do, and makes its loader register with it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in WATCHED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                loader: Any = spec.loader
                loader.exec_module = partial(_run_and_register, loader)
                return spec
        return None


def _run_and_register(loader: Any, module: ModuleType) -> None:
    """Run a module with its loader, then register with it."""
    del loader.exec_module  # this function; the loader has its own again
    loader.exec_module(module)
    _register(module)
