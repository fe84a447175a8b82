"""What majority votes under Gaussian noise share (Cohen et al. 2019): the noise, and the radius that a count of draws gives.

p = Beta^-1(alpha; hits, n - hits + 1)      Clopper-Pearson: the chance of a hit is at least p, with confidence 1 - alpha
r = sigma Phi^-1(p), if p > 1/2             within r in l2 the chance stays above 1/2; else nothing is certified
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.routing.bounds import ABOVE

BLOCK = 2**23  # numbers drawn at a time; fixed, because a generator's numbers depend on the size of each draw


@dataclass(frozen=True)
class Smoothing:
    """The noise of a majority vote.

    sigma      standard deviation of the noise, in every feature
    samples    number of draws that estimate the probability of the set, or of the class
    selection  number of other draws that choose it
    alpha      probability that the certificate of one token, or of one input, is wrong
    first      number of the first token or input: `i` of a call has the noise of number `first + i`, in any batch
    """

    sigma: float
    samples: int = 1000
    selection: int = 100
    alpha: float = 0.001
    seed: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"sigma is {self.sigma}; the noise needs a positive standard deviation.")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}; the probability of an error must be between 0 and 1.")
        if self.samples < 1 or self.selection < 1:
            raise ValueError(f"samples is {self.samples} and selection {self.selection}; both must be at least 1.")


def generator_of(*place: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator whose numbers depend only on `place`, the seed and what they are for, and on the kind of device."""
    digest = hashlib.blake2b(" ".join(map(str, place)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def noise_blocks(shape: Sequence[int], count: int, *place: object, device: torch.device) -> Iterator[Tensor]:
    """Yield `count` rows (n, *shape) of standard normal numbers, some at a time; each block has a generator of its own.

    They are drawn on the device: 10,000 copies of an image take a CPU longer to draw than a GPU to classify.
    """
    rows = max(1, BLOCK // max(1, torch.Size(shape).numel()))
    for number, start in enumerate(range(0, count, rows)):
        source = generator_of(*place, number, device=device)
        yield torch.randn(min(rows, count - start), *shape, generator=source, device=device)


def lowest_chance(hits: Tensor, samples: int, alpha: float) -> Tensor:
    """Return the lower Clopper-Pearson bound, float64 on the CPU, of the chance of a draw of which `hits` were counted."""
    from scipy.special import betaincinv

    counts = hits.double().cpu().numpy()
    found: Tensor = torch.as_tensor(betaincinv(counts, samples - counts + 1, alpha)).nan_to_num(0.0)  # NaN for no hit
    return found


def certified_radius(lowest: Tensor, sigma: float) -> Tensor:
    """Return the l2 radius within which the chance stays above 1/2; 0 if its lower bound is at most 1/2."""
    return sigma * torch.special.ndtri(lowest).clamp_min(0) / ABOVE
