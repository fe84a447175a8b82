"""Limit the size of a model before it is built: an untrusted config may have any number.

First the numbers of the config are checked, which takes no time: to build 100,000 layers takes minutes even on `meta`. Then
the model is built on `meta`, and its size is compared with that of the weights in the folder and with the memory of this
machine.
"""

import copy
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.files import require_regular

# Every module takes time to build, whatever its size. The largest models have about 200 layers, with 16,384 experts each.
COUNTS = {
    re.compile(r"(^|_)(n_layer|layers?|depth|blocks|stages|stack|codebooks|quantizers|loops)$"): 1024,
    re.compile(r"experts?(_num)?$"): 65_536,
    re.compile(r"(labels|classes)$"): 1_000_000,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of the entry in configs
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
MOST_PARAMETERS = 10**15  # the largest models have a few 10^12
MOST_PER_BYTE = 16  # parameters in a byte of a weight file: the most compact formats have 8
WEIGHTS = "*.safetensors"
LONGEST_HEADER = 100_000_000  # bytes, of safetensors


def require_sane_numbers(values: Mapping[str, Any], name: object) -> None:
    """Raise ValueError if the content of a config.json has numbers that no model has.

    Call it before a config is made from it: a config creates a name for each of its labels.
    """
    for field, value in _numbers(values):
        if isinstance(value, float):
            if math.isnan(value) or "limit" not in field:  # Mamba's time_step_limit ends at infinity
                raise ValueError(f"{name}: its config says {field} is {value}, with which no model computes.")
            continue
        if abs(value) >= 2**63:
            raise ValueError(f"{name}: its config says {field} is larger than 2^63, which no model has.")
        for pattern, most in COUNTS.items():
            if value > most and pattern.search(field):
                raise ValueError(f"{name}: its config says {field} is {value:,}; at most {most:,} are built.")


def _numbers(value: Any, field: str = "") -> Iterator[tuple[str, float]]:
    """Yield every integer, infinity and NaN of a config with its field; for a list of layer types, its length."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if key not in ("id2label", "label2id"):  # their keys are labels, not fields
                yield from _numbers(entry, str(key))
    elif isinstance(value, list):
        if field.endswith("layer_types"):
            yield "layers", len(value)
        for entry in value:
            yield from _numbers(entry, field)
    elif type(value) is int or (isinstance(value, float) and not math.isfinite(value)):
        yield field, value


def require_sane_top_k(config: Any, name: object) -> None:
    """Raise ValueError if a config has fewer than 1 expert per token, or more than there are experts."""
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))):
        experts = _first_int(part, EXPERTS)
        for field in TOP_K:
            chosen = _first_int(part, (field,))
            if experts and chosen is not None and not 1 <= chosen <= experts:
                raise ValueError(
                    f"{name}: its config says {field} is {chosen}; it must be between 1 and its {experts} experts."
                )


def _first_int(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)


def require_sane_size(folder: Path, kind: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a model is too large for the weights in `folder`, or for the memory of this machine."""
    stored = stored_bytes(folder)
    if stored is None:
        return  # the loader reports what is missing or broken
    count = meta_parameter_count(kind, config)
    if count is None:
        return
    require_enough_weights(folder, count, stored)
    if options.get("device_map") is not None or options.get("quantization_config") is not None:
        return
    dtype = getattr(torch, str(options.get("dtype") or options.get("torch_dtype")).removeprefix("torch."), None)
    needed = count * dtype.itemsize if isinstance(dtype, torch.dtype) else stored
    memory = memory_of_machine()
    if memory is not None and needed > memory:
        raise ValueError(
            f"{folder} needs {in_gib(needed)} of memory, and this machine has {in_gib(memory)}; load it with "
            "device_map='auto' and an offload folder (--device-map auto --offload FOLDER)."
        )


def require_enough_weights(folder: object, count: int, stored: int) -> None:
    """Raise ValueError if a config has more parameters than weight files of `stored` bytes can contain."""
    if count > MOST_PER_BYTE * stored:
        raise ValueError(
            f"{folder}: its config describes a model of {count:,} parameters, but its weight files have {stored:,} bytes: "
            "they do not belong together."
        )


def build_or_refuse(build: Callable[[], Any], kind: str) -> Any:
    """Return the model that `build` returns; raise a ValueError of one line if its config has sizes that no model has.

    kind    what the model is, in the error: "llama"
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # these raise an error below
            model = build()
    except Exception as problem:  # inconsistent sizes raise any kind of exception, anywhere in the constructor
        raise ValueError(
            f"no {kind} can have this config: {' '.join(str(problem).split()) or type(problem).__name__}"
        ) from None
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise ValueError(f"{name} would be {' x '.join(map(str, parameter.shape))}; no size may be 0.")
    return model


def meta_parameter_count(kind: Any, config: Any) -> int | None:
    """Return the size of a model built on `meta`; None if it cannot be built: the loader reports why."""
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            model = kind(copy.deepcopy(config))
    except Exception:  # inconsistent sizes raise any kind of exception
        return None
    return count_parameters(model)


def count_parameters(model: Any) -> int:
    """Return the number of elements in parameters and buffers."""
    return sum(math.prod(tensor.shape) for tensor in (*model.parameters(), *model.buffers()))


def stored_bytes(folder: Path) -> int | None:
    """Return the size of the safetensors in a folder; None if there are none, or one is not a real weight file."""
    sizes = [_weight_size(file) for file in sorted(folder.glob(WEIGHTS))]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _weight_size(file: Path) -> int | None:
    """Return the size of a safetensors file; None if it is something else, such as a pointer of git-lfs."""
    try:
        size = require_regular(file)
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
    except (OSError, ValueError):
        return None
    return size if 0 < header <= min(LONGEST_HEADER, size - 8) else None


def memory_of_machine() -> int | None:
    """Return the memory of this machine in bytes; None if it is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def memory_for_training() -> int | None:
    """Return the bytes of memory of the GPU, or of this machine if it has no GPU; None if that is not known."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return memory_of_machine()


def in_gib(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / 2**30:,.1f} GiB"
