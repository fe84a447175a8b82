"""Random numbers that depend on a seed and a place and nothing else: not on batch, device or Python's hash seed."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BITS = 63  # what torch.Generator.manual_seed takes without wrapping


def mixed(seed: int, *place: object) -> int:
    """One number from a seed and where it is used; the parts are strings or numbers, told apart by their order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *place):
        encoded = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big") >> (64 - BITS)


def generators(seed: int, count: int, *place: object, first: int = 0) -> list[torch.Generator]:
    """One generator for each of `count` examples, the first of which is number `first` of its set; on the CPU, where
    every device gets its numbers from."""
    return [torch.Generator().manual_seed(mixed(seed, *place, first + number)) for number in range(count)]


def draw(make: Callable[[torch.Generator], Tensor], sources: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """`make(generator)` of each generator, stacked, with the device and dtype of `like`."""
    return torch.stack([make(source) for source in sources]).to(device=like.device, dtype=like.dtype)


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed is {seed!r}; it must be a whole number.")
