"""Kernels. `naive` states the mathematics; the fast version beside it is tested against it.

Nothing here knows routers or models: the rest of the package may import `ops`, `ops` imports only torch.
"""
