"""Random numbers, and orders of training examples, that follow from a key alone.

They are those of SplitMix64, written out so that no library release changes them. Augmented images depend only on the seed
and on the place of an example in the sequence of all training examples, and the examples of a training step only on the seed
and the step. So every router of a comparison, a resumed run and each of several ranks see the same images and batches.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


def _output(state: Any) -> Any:
    """Return the output of SplitMix64 for a state: a whole number, or an array of uint64."""
    z = (state + _STEP) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@final
class Draws:
    """A sequence of random numbers for a key of whole numbers, such as (seed, place)."""

    def __init__(self, *key: int) -> None:
        self._state: int = 0
        for number in key:
            self._state = _output(self._state) ^ (number & _MASK)
        self._state = _output(self._state)

    def bits(self) -> int:
        """Return 64 random bits."""
        bits: int = _output(self._state)
        self._state = (self._state + _STEP) & _MASK
        return bits

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number between `low` and `high`."""
        return low + (high - low) * ((self.bits() >> 11) * 2.0**-53)

    def below(self, count: int) -> int:
        """Return a whole number from 0 to count - 1."""
        return self.bits() * count >> 64

    def normal(self) -> float:
        """Return a number of the standard normal distribution (Box and Muller)."""
        radius = math.sqrt(-2 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2 * math.pi * self.uniform())

    def symmetric_beta(self, alpha: float) -> float:
        """Return a number of Beta(alpha, alpha) by Joehnk's rejection, which suits an alpha up to about 4.

        With U and V uniform, X = U^(1/alpha) and Y = V^(1/alpha), the number is X / (X + Y), given that X + Y <= 1.
        Logarithms are used because X and Y underflow if alpha is small.
        """
        while True:
            x, y = (math.log(1.0 - self.uniform()) / alpha for _ in range(2))
            if math.exp(x) + math.exp(y) <= 1:
                return 1 / (1 + math.exp(y - x)) if y - x < 700 else 0.0

    def byte_array(self, *shape: int) -> npt.NDArray[np.uint8]:
        """Return an array of random bytes."""
        count = math.prod(shape)
        states = np.arange(-(-count // 8), dtype=np.uint64) * np.uint64(_STEP) + np.uint64(self.bits())
        return _output(states).astype("<u8").view(np.uint8)[:count].reshape(shape)


@final
class ManyDraws:
    """The numbers of `Draws(*key, last)` for many last numbers of a key at once: an array with one number for each."""

    def __init__(self, *key: int, last: Iterable[int]) -> None:
        ends = np.fromiter((number & _MASK for number in last), dtype=np.uint64)
        self._state: npt.NDArray[np.uint64] = _output(ends ^ np.uint64(Draws(*key)._state))

    def bits(self) -> npt.NDArray[np.uint64]:
        """Return 64 random bits of each."""
        bits: npt.NDArray[np.uint64] = _output(self._state)
        self._state = self._state + np.uint64(_STEP)
        return bits

    def uniform(self) -> npt.NDArray[np.float64]:
        """Return a number between 0 and 1 of each."""
        return (self.bits() >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, count: int) -> npt.NDArray[np.int64]:
        """Return a whole number from 0 to count - 1 of each, for a count below 2^32."""
        bits, factor, half = self.bits(), np.uint64(count), np.uint64(32)
        low = (bits & np.uint64(2**32 - 1)) * factor  # in two halves: the product has up to 96 bits
        return (((bits >> half) * factor + (low >> half)) >> half).astype(np.int64)


def shuffled(count: int, *, seed: int, epoch: int) -> Tensor:
    """Return 0 to count-1, sorted by pseudo-random keys."""
    start = _output(_output(seed & _MASK) ^ (epoch & _MASK))
    keys = _output(np.arange(count, dtype=np.uint64) + np.uint64(start))
    return torch.from_numpy(np.argsort(keys, kind="stable"))


@final
class Order:
    """The examples, out of `count`, in the batch of every step. Each epoch has every example once.

    A batch may begin in one epoch and end in the next, so that all batches have the same size.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed
        self._epochs: dict[int, Tensor] = {}

    def at(self, places: Iterable[int]) -> Tensor:
        """Return the examples at these places of the endless sequence; the first example of the first step has place 0."""
        place = torch.tensor(list(places), dtype=torch.int64)
        epoch = place // self.count
        found = torch.empty_like(place)
        for number in epoch.unique().tolist():
            if number not in self._epochs:  # the order of the last epoch that was asked for is kept
                self._epochs = {number: shuffled(self.count, seed=self.seed, epoch=number)}
            there = epoch == number
            found[there] = self._epochs[number][place[there] % self.count]
        return found


@final
class DomainOrder:
    """The examples in the batch of every step, as `Order`, with as many of each domain.

    The training images are those of all domains, one domain after the other. Place p of the endless sequence is an image of
    domain p mod D; each domain has an order of its own, which has every image of it once per epoch of this domain.
    """

    def __init__(self, counts: Mapping[str, int], size: int, seed: int) -> None:
        assert size % len(counts) == 0, "a batch has as many images of each domain"
        self.count, self.size = sum(counts.values()), size
        self.orders = [Order(count, size // len(counts), domain_seed("order", name, seed)) for name, count in counts.items()]
        self.starts = [sum(list(counts.values())[:place]) for place in range(len(counts))]

    def at(self, places: Iterable[int]) -> Tensor:
        place = torch.tensor(list(places), dtype=torch.int64)
        found = torch.empty_like(place)
        for domain, (order, start) in enumerate(zip(self.orders, self.starts, strict=True)):
            there = place % len(self.orders) == domain
            found[there] = start + order.at((place[there] // len(self.orders)).tolist())
        return found


ExampleOrder = Order | DomainOrder


def domain_seed(what: str, domain: str, seed: int) -> int:
    """Return a seed for one domain: the split of a domain does not depend on which domain is held out."""
    return int.from_bytes(hashlib.sha256(f"{what} {seed} {domain}".encode()).digest()[:6], "big")
