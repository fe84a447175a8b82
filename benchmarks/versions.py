"""What a measurement was made with, and on."""

import platform

import torch

from holdfast.version import versions as of_packages


def versions() -> dict[str, str]:
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {**of_packages(), "machine": machine}
