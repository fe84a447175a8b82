"""Random numbers that follow from a key alone: SplitMix64, written out so that no library release changes them.

Augmented images depend only on the seed and on the place of an example in the sequence of all training examples. So every
router of a comparison, a resumed run and each of several ranks see the same images.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar, final

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_Item = TypeVar("_Item")


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _mixed_array(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@final
class Draws:
    """A sequence of random numbers for a key of whole numbers, such as (seed, place)."""

    def __init__(self, *key: int) -> None:
        self._state = 0
        for number in key:
            self._state = _mixed((self._state + _STEP) & _MASK) ^ (number & _MASK)
        self._state = _mixed((self._state + _STEP) & _MASK)

    def bits(self) -> int:
        """Return 64 random bits."""
        self._state = (self._state + _STEP) & _MASK
        return _mixed(self._state)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number between `low` and `high`."""
        return low + (high - low) * ((self.bits() >> 11) * 2.0**-53)

    def below(self, count: int) -> int:
        """Return a whole number from 0 to count - 1."""
        return self.bits() * count >> 64

    def choice(self, items: Sequence[_Item]) -> _Item:
        return items[self.below(len(items))]

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
        steps = np.arange(1, -(-count // 8) + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(self.bits())
        return _mixed_array(steps).astype("<u8").view(np.uint8)[:count].reshape(shape)


@final
class ManyDraws:
    """The numbers of `Draws(*key, last)` for many last numbers of a key at once: an array with one number for each."""

    def __init__(self, *key: int, last: Iterable[int]) -> None:
        ends = np.fromiter((number & _MASK for number in last), dtype=np.uint64)
        self._state = _mixed_array((ends ^ np.uint64(Draws(*key)._state)) + np.uint64(_STEP))

    def bits(self) -> npt.NDArray[np.uint64]:
        """Return 64 random bits of each."""
        self._state = self._state + np.uint64(_STEP)
        return _mixed_array(self._state)

    def uniform(self) -> npt.NDArray[np.float64]:
        """Return a number between 0 and 1 of each."""
        return (self.bits() >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, count: int) -> npt.NDArray[np.int64]:
        """Return a whole number from 0 to count - 1 of each, for a count below 2^32."""
        bits, factor, half = self.bits(), np.uint64(count), np.uint64(32)
        low = (bits & np.uint64(2**32 - 1)) * factor  # in two halves: the product has up to 96 bits
        return (((bits >> half) * factor + (low >> half)) >> half).astype(np.int64)
