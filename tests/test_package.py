"""The package from outside: what it exports, what importing it brings along."""

import subprocess
import sys

import holdfast

# The public surface. A change here is a change for users: it belongs in CHANGELOG.md.
PUBLIC = {
    "Context",
    "Experts",
    "FeedForward",
    "Losses",
    "MoE",
    "Router",
    "Routing",
    "audit",
    "calibrate",
    "create_router",
    "list_routers",
    "load",
    "register",
    "reroute",
    "restore",
    "router_loss_scale",
    "save",
    "shard_experts",
    "sparsify",
    "trace",
    "trainer_callback",
}


def test_the_public_surface_is_what_we_promise() -> None:
    assert set(holdfast.__all__) == PUBLIC
    assert all(hasattr(holdfast, name) for name in PUBLIC)


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
        "torch._dynamo",
        "torch._inductor",
    ]
    code = "import torch, sys; before = set(sys.modules); import holdfast; print(*set(sys.modules) - before)"
    assert set(run(code).split()).isdisjoint(heavy)
