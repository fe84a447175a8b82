"""The score of outside_router.py, whose import registers it, without its name: other tests count the registered routers."""

from outside_router import Distance as Distance

from holdfast.routing.presets import REGISTRY

REGISTRY.remove("distance")
