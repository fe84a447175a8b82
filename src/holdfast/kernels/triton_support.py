"""Whether the Triton kernels can run, found out without importing Triton."""

import importlib.util
from contextlib import AbstractContextManager

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device; make it the tensor's."""
    return torch.cuda.device(tensor.device)


def has_kernels(tensor: Tensor) -> bool:
    """Is there something to compute on, and Triton to do it with? An exported program has no kernels of ours."""
    return HAS_TRITON and tensor.is_cuda and not torch.compiler.is_exporting() and tensor.numel() > 0
