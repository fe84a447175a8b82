"""The registered routers by the kind of layer they are for."""

import holdfast
from holdfast.routing.presets import REGISTRY


def moe_routers() -> list[str]:
    """Return the names of all routers of MoE layers: `reroute` takes them, and any model that `sparsify` takes."""
    return [name for name in holdfast.list_routers() if REGISTRY.layer_kind(name) == "moe"]


def layer_routers() -> list[str]:
    """Return the names of the routers that are for layers of their own: SoftMoE and SMEAR."""
    return [name for name in holdfast.list_routers() if REGISTRY.layer_kind(name) != "moe"]
