"""Holdfast's version, and those of the packages that results depend on."""

VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of what results depend on, by name."""
    import platform

    import torch
    import transformers

    python = platform.python_version()
    return {"holdfast": VERSION, "torch": torch.__version__, "transformers": transformers.__version__, "Python": python}
