"""Holdfast: mixture-of-experts routing that holds.

`import holdfast` imports neither torch nor transformers: it takes milliseconds, so that commands answer at once. The first
use of a name imports the library (`holdfast.public`). What other libraries must know of Holdfast without such a use, they
are told when they are imported (`holdfast.registration`).
"""
# ruff: noqa: F403, F405 (one list of imports: type checkers read the names of `__all__` in holdfast.public)

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holdfast.registration import register_on_import
from holdfast.version import VERSION

if TYPE_CHECKING:
    from holdfast.public import *

__version__ = VERSION
__all__ = [
    "SMEAR",
    "Context",
    "Experts",
    "FeedForward",
    "Losses",
    "MoE",
    "Rollout",
    "RolloutReplay",
    "Router",
    "Routes",
    "Routing",
    "SoftMoE",
    "audit",
    "calibrate",
    "certify",
    "compare",
    "create_router",
    "disable",
    "geometry",
    "list_routers",
    "load",
    "load_plugin",
    "measure_geometry",
    "measure_mismatch",
    "plan",
    "prune",
    "record",
    "register",
    "register_attack",
    "register_dataset",
    "register_family",
    "register_metric",
    "replay",
    "reroute",
    "restore",
    "router_loss_scale",
    "save",
    "set_teacher",
    "shard_experts",
    "sparsify",
    "trace",
    "trainer_callback",
]

register_on_import()

if not TYPE_CHECKING:  # a type checker would take any name for known

    def __getattr__(name: str) -> Any:
        """Return a public name, or a module of the package, after importing it."""
        if name in __all__:
            value = getattr(import_module("holdfast.public"), name)
        elif not name.startswith("_") and find_spec(f"holdfast.{name}") is not None:
            value = import_module(f"holdfast.{name}")
        else:
            raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
