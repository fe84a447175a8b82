"""A device that only pretends to be another one, to find operations that mix devices on machines without a GPU.

Tensors on it hold their numbers in a CPU tensor and say that they are on `lazy:0`, a device type of PyTorch that has no
kernels of its own. An operation that a GPU refuses because some of its tensors are on the CPU raises MixedDevices. As on a
GPU, these are allowed: CPU tensors without dimensions in operations on single elements, CPU indices of a tensor on the other
device, and copies. Code behind `is_cuda` does not run on this device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy:0")
COPIES = {"aten::_to_copy", "aten::copy_", "aten::copy"}
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class MixedDevices(BaseException):
    """An operation got tensors of both devices. Not an Exception: an audit reports those of perturbations and goes on."""


class OtherTensor(Tensor):
    """A tensor on the pretended device; `held` has its numbers."""

    __module__ = "torch"  # tensor classes of other libraries are taken for quantised weights
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OtherTensor":
        shape, strides, start = held.size(), held.stride(), held.storage_offset()
        made = Tensor._make_wrapper_subclass(cls, shape, strides, start, dtype=held.dtype, device=DEVICE)  # type: ignore[attr-defined]
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None: ...

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Any) -> None:
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.held = new.held

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise MixedDevices(f"a tensor on {DEVICE} is read by numpy")
        return self.held.numpy(force=True)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _Mode(TorchDispatchMode):
    """See also operations without tensors on the other device: those that make some, and those that copy to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Inside the `with`, tensors and models can be moved to the device that this yields."""
    is_enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def is_autocast_enabled(device: str | None = None) -> bool:
        return False if device == DEVICE.type else is_enabled() if device is None else is_enabled(device)

    def plain_autocast(device: str, *args: Any, **options: Any) -> Any:
        return autocast("cpu" if device == DEVICE.type else device, *args, **options)

    # PyTorch knows no autocast of this device type, and these two functions fill a tensor without the mode.
    with (
        patch.object(torch, "is_autocast_enabled", is_autocast_enabled),
        patch.object(torch, "autocast", plain_autocast),
        patch.object(torch, "tensor", _made_on_cpu(torch.tensor)),
        patch.object(torch, "as_tensor", _made_on_cpu(torch.as_tensor)),
        _Mode(),
    ):
        yield DEVICE


def _made_on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `torch.tensor` or `torch.as_tensor` with a copy to the device as its last step."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        if device is None or isinstance(data, Tensor):
            return make(data, device=device, **options)
        return make(data, **options).to(device)

    return made


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers of its tensors; raise MixedDevices where a GPU would refuse them."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with _Mode():  # only inference mode passes such operations on; their parts come here again
            return func.decompose(*args, **kwargs)
    kwargs = dict(kwargs)
    asked = kwargs.get("device")
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    other = [each for each in tensors if isinstance(each, OtherTensor)]
    is_other = bool(other) if asked is None else torch.device(asked).type == DEVICE.type
    if other and len(other) < len(tensors) and func._schema.name not in COPIES:
        _require_allowed(func, args, kwargs)
    if is_other and kwargs.get("generator") is not None:
        raise MixedDevices(f"{func} has a generator of the CPU for a tensor of another device")
    if asked is not None:
        kwargs["device"] = torch.device("cpu")
    if func._schema.name == "aten::_to_copy":
        kwargs["memory_format"] = kwargs.get("memory_format") or torch.preserve_format
    if func._schema.name == "aten::histc" and not args[0].is_floating_point():  # on a GPU, integers have a histogram
        args = (args[0].double(), *args[1:])
    found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if func._schema.name in COPIES and func._schema.is_mutable:
        return args[0]
    return tree_map(lambda each: _wrapped(each, other), found) if is_other else found


def _require_allowed(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise MixedDevices unless the CPU tensors are indices, or elements that the operation only reads."""
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    changed = {each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    if func._schema.name in INDEXING:
        allowed = isinstance(named["self"], OtherTensor)
        named = {name: given for name, given in named.items() if name != "indices"}
    else:
        allowed = torch.Tag.pointwise in func.tags or func._schema.name in ("aten::masked_fill", "aten::masked_fill_")
    for name, given in named.items():
        plain = [each for each in tree_leaves(given) if isinstance(each, Tensor) and not isinstance(each, OtherTensor)]
        allowed = allowed and all(not each.dim() and name not in changed for each in plain)
    if not allowed:
        devices = [
            f"{tuple(each.shape)} on {each.device}" for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        ]
        raise MixedDevices(f"{func} got tensors of different devices: {', '.join(devices)}")


def _held(each: Any) -> Any:
    return each.held if isinstance(each, OtherTensor) else each


def _wrapped(found: Any, given: list[OtherTensor]) -> Any:
    """Return a tensor on the other device: that which was given, if the operation changed it in place."""
    if not isinstance(found, Tensor):
        return found
    same = next((each for each in given if each.held is found), None)
    return OtherTensor(found) if same is None else same
