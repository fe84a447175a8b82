VERSION = "0.1.0"


def versions() -> dict[str, str]:
    """Of what figures depend on."""
    import platform

    import torch
    import transformers

    python = platform.python_version()
    return {"holdfast": VERSION, "torch": torch.__version__, "transformers": transformers.__version__, "Python": python}
