"""What a measurement was made with."""

import platform

import torch


def versions() -> dict[str, str]:
    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    found["machine"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return found
