"""Kernels. `naive` states the mathematics; the fast version beside it is tested against it.

Nothing here knows routers or models: the rest of the package may import `kernels`, `kernels` imports only torch.
"""
