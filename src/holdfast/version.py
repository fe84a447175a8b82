"""Holdfast's version, those of the packages that results depend on, and where results come from."""

from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of what results depend on, by name."""
    import platform

    import torch
    import transformers

    python = platform.python_version()
    return {"holdfast": VERSION, "torch": torch.__version__, "transformers": transformers.__version__, "Python": python}


def origin() -> dict[str, Any]:
    """Return what trains models in this process: the versions, the device, and the commit if Holdfast is a git checkout."""
    import platform
    import subprocess

    import torch

    root, commit = Path(__file__).resolve().parents[2], None
    if (root / ".git").exists():
        line = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
        with suppress(OSError):  # git is not installed
            commit = subprocess.run(line, check=False, capture_output=True, text=True).stdout.strip() or None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    return {"versions": versions(), "device": device, "commit": commit}
