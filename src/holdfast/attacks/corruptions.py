"""Common corruptions: changes of images without an attacker, fifteen kinds at five severities (Hendrycks & Dietterich 2019).

    noise       gaussian_noise, shot_noise, impulse_noise
    blur        defocus_blur, glass_blur, motion_blur, zoom_blur
    weather     snow, frost, fog, brightness
    digital     contrast, elastic_transform, pixelate, jpeg_compression

Each function of a kind takes `images (B,C,H,W)` in [0,1], one random generator per image, and the settings of a severity.
`corrupt` clamps its result to [0,1]. `CORRUPTIONS` has the published settings: `large` for 224 x 224 pixels (ImageNet-C),
`small` for 32 x 32 (CIFAR-10-C), severities 1 to 5, in the order of the function's arguments.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.attacks.flags import AttackResult, Flag
from holdfast.attacks.threat import check_bounds, check_count, check_seed, distances, draw, generators
from holdfast.errors import require_known

FAINT = 1e-3  # taps of a filter below this share of its largest are skipped

Sources = list[torch.Generator]  # one generator per image
Group = Literal["noise", "blur", "weather", "digital"]
Setting = tuple[Any, ...]  # the arguments of a function at one severity
Kind = TypeVar("Kind", bound=Callable[..., Tensor])
FOR_LARGE, FOR_SMALL = 244, 32  # the published elastic settings are shares of these; the 244 is published so


class Corruption(NamedTuple):
    group: Group
    apply: Callable[..., Tensor]
    large: tuple[Setting, ...]
    small: tuple[Setting, ...]


CORRUPTIONS: dict[str, Corruption] = {}


def corruption(group: Group, large: tuple[Setting, ...], small: tuple[Setting, ...]) -> Callable[[Kind], Kind]:
    """Return a decorator that adds a function to `CORRUPTIONS`, with its settings for large and for small images."""

    def add(apply: Kind) -> Kind:
        CORRUPTIONS[apply.__name__] = Corruption(group, apply, large, small)
        return apply

    return add


def each(*values: float) -> tuple[Setting, ...]:
    return tuple((value,) for value in values)


def shares(size: int, *settings: tuple[float, float, float]) -> tuple[Setting, ...]:
    return tuple(tuple(size * share for share in setting) for setting in settings)


@corruption("noise", each(0.08, 0.12, 0.18, 0.26, 0.38), each(0.04, 0.06, 0.08, 0.09, 0.10))
def gaussian_noise(images: Tensor, sources: Sources, scale: float) -> Tensor:
    """Return x + scale n with normal n."""
    return images + scale * draw(lambda source: torch.randn(images.shape[1:], generator=source), sources, images)


@corruption("noise", each(60, 25, 12, 5, 3), each(500, 250, 100, 75, 50))
def shot_noise(images: Tensor, sources: Sources, photons: float) -> Tensor:
    """Return Poisson(photons x) / photons, the noise of a sensor that counts photons."""
    means = (images.float() * photons).cpu()
    counts = [torch.poisson(mean, generator=source) for mean, source in zip(means, sources, strict=True)]
    return torch.stack(counts).to(images) / photons


@corruption("noise", each(0.03, 0.06, 0.09, 0.17, 0.27), each(0.01, 0.02, 0.03, 0.05, 0.07))
def impulse_noise(images: Tensor, sources: Sources, share: float) -> Tensor:
    """Set each value to 0 or to 1, with probability share / 2 each."""
    chance = draw(lambda source: torch.rand(images.shape[1:], generator=source), sources, images)
    salted = images.masked_fill(chance < share / 2, 1.0)
    return salted.masked_fill(chance > 1 - share / 2, 0.0)


@corruption(
    "blur", ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)), ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
)
def defocus_blur(images: Tensor, sources: Sources, radius: float, smooth: float) -> Tensor:
    """Spread each point over a disc."""
    return convolve(images, disc(radius, smooth))


@corruption(
    "blur",
    ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
)
def glass_blur(images: Tensor, sources: Sources, sigma: float, reach: int, rounds: int) -> Tensor:
    """Blur, swap each pixel with one at most `reach` away, `rounds` times, and blur again.

    The published code intends to swap but copies, because two views of one array cannot be exchanged by assignment; this
    function swaps.
    """
    height, width = images.shape[-2:]
    orders = torch.stack([torch.tensor(_shuffled_positions(height, width, reach, rounds, source)) for source in sources])
    shuffled = blur(images, sigma).flatten(2)
    shuffled = shuffled.gather(2, orders.to(images.device).unsqueeze(1).expand_as(shuffled))
    return blur(shuffled.view_as(images), sigma)


def _shuffled_positions(height: int, width: int, reach: int, rounds: int, source: torch.Generator) -> list[int]:
    """Return the source position of each pixel of a flat image. Swaps are sequential, so a pixel can move far."""
    random = Random(int(torch.randint(2**62, (), generator=source))).random
    order = list(range(height * width))
    choices = 2 * reach + 1
    for _ in range(rounds):
        for row in range(height - reach - 1, reach - 1, -1):
            for column in range(width - reach - 1, reach - 1, -1):
                here = row * width + column
                there = here + (int(random() * choices) - reach) * width + int(random() * choices) - reach
                order[here], order[there] = order[there], order[here]
    return order


@corruption("blur", ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)), ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)))
def motion_blur(images: Tensor, sources: Sources, radius: float, sigma: float) -> Tensor:
    """Smear along a direction between -45 and 45 degrees."""
    angles = draw(lambda source: torch.rand((), generator=source) * 90 - 45, sources, images)
    return smear(images, radius, sigma, angles)


# The largest factor is that which np.arange returns; by rounding it is sometimes the excluded end.
@corruption(
    "blur",
    ((1.11, 0.01), (1.15, 0.01), (1.20, 0.02), (1.24, 0.02), (1.30, 0.03)),
    ((1.06, 0.01), (1.11, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01)),
)
def zoom_blur(images: Tensor, sources: Sources, most: float, step: float) -> Tensor:
    """Return the mean of the image and of its enlargements by 1, 1 + step, ... up to `most`."""
    factors = [1 + step * number for number in range(round((most - 1) / step) + 1)]
    return (images + sum(zoom(images, factor) for factor in factors)) / (len(factors) + 1)


FERNS = 1.6  # the decay of the clouds whose ridges are ferns of frost


@corruption(
    "weather",
    (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
)
def snow(
    images: Tensor,
    sources: Sources,
    mean: float,
    spread: float,
    size: float,
    least: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Tensor:
    """Add flakes, which are enlarged noise above `least`, smeared by wind; whiten the scene behind them."""
    height, width = images.shape[-2:]
    noise = draw(lambda source: torch.randn((1, height, width), generator=source), sources, images)
    flakes = zoom(mean + spread * noise, size)
    flakes = flakes.masked_fill(flakes < least, 0.0).clamp(0, 1)
    angles = draw(lambda source: torch.rand((), generator=source) * 90 - 135, sources, images)
    flakes = smear(flakes, radius, sigma, angles)
    whitened = keep * images + (1 - keep) * torch.maximum(images, grey(images) * 1.5 + 0.5)
    return whitened + flakes + flakes.flip((-2, -1))


@corruption(
    "weather",
    ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
)
def frost(images: Tensor, sources: Sources, keep: float, cover: float, photographs: Tensor | None) -> Tensor:
    """Return keep x + cover f, where f is a random part of a random photograph of frost.

    Without photographs, f is a texture of ours: the ridges of clouds, bright lines that branch as ferns of frost do.
    """
    height, width = images.shape[-2:]
    if photographs is None:
        return keep * images + cover * (1 - (2 * cloud_noise(images, FERNS, sources) - 1).abs()).square()
    if photographs.dim() != 4 or photographs.shape[-2] < height or photographs.shape[-1] < width:
        got = tuple(photographs.shape)
        raise ValueError(f"frost has shape {got}; expected (photographs, channels, at least {height}, at least {width}).")
    photographs = photographs.to(images)
    if photographs.shape[1] != images.shape[1]:
        photographs = grey(photographs)
    parts = []
    for source in sources:
        which, top, left = torch.rand(3, generator=source).tolist()
        photograph = photographs[int(which * photographs.shape[0])]
        top, left = int(top * (photograph.shape[-2] - height + 1)), int(left * (photograph.shape[-1] - width + 1))
        parts.append(photograph[:, top : top + height, left : left + width])
    return keep * images + cover * torch.stack(parts)


@corruption(
    "weather", ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)), ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
)
def fog(images: Tensor, sources: Sources, thickness: float, decay: float) -> Tensor:
    """Return (x + thickness clouds) max / (max + thickness), max the largest value, so that brightness stays."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * cloud_noise(images, decay, sources)) * brightest / (brightest + thickness)


def cloud_noise(images: Tensor, decay: float, sources: Sources) -> Tensor:
    """Return clouds (B,1,H,W) between 0 and 1, cut out of a square whose side is the next power of two.

    They are made by the diamond-square algorithm on a torus: a point halfway between known ones is their mean plus noise,
    whose amplitude falls by decay^2 from scale to scale.
    """
    height, width = images.shape[-2:]
    size = 1 << max(height - 1, width - 1, 1).bit_length()
    field = torch.zeros(len(sources), size, size, dtype=torch.float64)
    step, amplitude = size, 1.0
    while step >= 2:
        half, points = step // 2, size // step
        corners = field[:, ::step, ::step]
        sideways, downwards = corners.roll(-1, 2), corners.roll(-1, 1)
        middles = (corners + sideways + downwards + downwards.roll(-1, 2)) / 4 + amplitude * _noise(points, sources)
        field[:, half::step, half::step] = middles
        tops = (corners + sideways + middles + middles.roll(1, 1)) / 4 + amplitude * _noise(points, sources)
        lefts = (corners + downwards + middles + middles.roll(1, 2)) / 4 + amplitude * _noise(points, sources)
        field[:, ::step, half::step], field[:, half::step, ::step] = tops, lefts
        step, amplitude = half, amplitude / decay**2
    field = field - field.amin((1, 2), keepdim=True)
    return (field / field.amax((1, 2), keepdim=True))[:, None, :height, :width].to(images)


def _noise(points: int, sources: Sources) -> Tensor:
    return torch.stack([torch.rand((points, points), generator=source, dtype=torch.float64) * 2 - 1 for source in sources])


@corruption("weather", each(0.1, 0.2, 0.3, 0.4, 0.5), each(0.05, 0.1, 0.15, 0.2, 0.3))
def brightness(images: Tensor, sources: Sources, more: float) -> Tensor:
    """Raise V of HSV by `more`, at the same hue and saturation: scale all channels by V' / V; black becomes grey."""
    value = images.amax(1, keepdim=True)
    raised = (value + more).clamp(0, 1)
    return torch.where(value > 0, images * (raised / value.clamp_min(1e-8)), raised)


def grey(images: Tensor) -> Tensor:
    """Return the brightness (B,1,H,W)."""
    return images if images.shape[1] == 1 else _change_basis(images, TO_YCBCR[:1])


@corruption("digital", each(0.4, 0.3, 0.2, 0.1, 0.05), each(0.75, 0.5, 0.4, 0.3, 0.15))
def contrast(images: Tensor, sources: Sources, share: float) -> Tensor:
    """Scale each channel's distance from its mean by `share`."""
    means = images.mean((2, 3), keepdim=True)
    return (images - means) * share + means


@corruption(
    "digital",
    shares(FOR_LARGE, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    shares(FOR_SMALL, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
)
def elastic_transform(images: Tensor, sources: Sources, stretch: float, sigma: float, jitter: float) -> Tensor:
    """Apply an affine map that moves three points by up to `jitter` pixels, and a smooth displacement (Simard et al. 2003).

    The displacement is uniform noise, blurred by sigma and multiplied by `stretch`. One interpolation applies both.
    """
    height, width = images.shape[-2:]
    rows, columns = pixel_grid(images)
    noise = draw(lambda source: torch.rand((2, height, width), generator=source) * 2 - 1, sources, images)
    shift = stretch * blur(noise, sigma, truncate=3.0)
    rows, columns = rows + shift[:, 0], columns + shift[:, 1]
    corners = torch.tensor([[1, 1], [1, -1], [-1, -1]])
    points = (torch.tensor([height // 2, width // 2]) + min(height, width) // 3 * corners).to(images)
    moves = draw(lambda source: torch.rand((3, 2), generator=source) * 2 - 1, sources, images) * jitter
    # A point with a 1 appended, times the (3,2) matrix, is its source.
    matrix = torch.linalg.solve(F.pad(points, (0, 1), value=1).double(), (points + moves).double()).to(images)[:, None, None]
    origins = rows.unsqueeze(-1) * matrix[..., 0, :] + columns.unsqueeze(-1) * matrix[..., 1, :] + matrix[..., 2, :]
    return sample(images, origins[..., 0], origins[..., 1])


@corruption("digital", each(0.6, 0.5, 0.4, 0.3, 0.25), each(0.95, 0.9, 0.85, 0.75, 0.65))
def pixelate(images: Tensor, sources: Sources, share: float) -> Tensor:
    """Replace each pixel by the mean of its cell; a side has `share` times as many cells as pixels.

    This equals shrinking and enlarging with a box filter.
    """
    means = []  # for each side, the matrix (size,size) that averages over the cell of each pixel
    for size in images.shape[-2:]:
        cell = ((2 * torch.arange(size) + 1) * max(int(size * share), 1)).div(2 * size, rounding_mode="floor")
        means.append(F.normalize((cell.unsqueeze(1) == cell).float(), p=1, dim=1).to(images))
    return means[0] @ images @ means[1].t()


# Annex K of ITU-T T.81: quantisation steps of brightness and of colour, for quality 50.
LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136, -0.714136), (1.0, 1.772, 0.0))


@corruption("digital", each(25, 18, 15, 10, 7), each(80, 65, 58, 50, 40))
def jpeg_compression(images: Tensor, sources: Sources, quality: float) -> Tensor:
    """Return the images after JPEG compression of this quality, 1 to 100; values have 8 bits.

    Only the lossy steps of ITU-T T.81 are computed: 8-bit YCbCr, half the colour resolution, quantised 8 x 8 cosine
    transforms. The lossless coding of the format changes no value.
    """
    height, width = images.shape[-2:]
    pixels = (images * 255).round()
    planes = pixels if images.shape[1] == 1 else _change_basis(pixels, TO_YCBCR)
    light = _quantised_blocks(planes[:, :1].round() - 128, _steps(LUMINANCE, quality), height, width) + 128
    if images.shape[1] == 1:
        return light.round().clamp(0, 255) / 255
    colours = F.pad(planes[:, 1:], (0, width % 2, 0, height % 2), mode="replicate")
    colours = F.avg_pool2d(colours, 2).round()
    colours = _quantised_blocks(colours, _steps(CHROMINANCE, quality), *colours.shape[-2:])
    colours = F.interpolate(colours, scale_factor=2, mode="bilinear", align_corners=False)[..., :height, :width]
    return _change_basis(torch.cat([light, colours], 1), TO_RGB).round().clamp(0, 255) / 255


def _steps(table: tuple[tuple[int, ...], ...], quality: float) -> Tensor:
    """Return the Independent JPEG Group's table for a quality: 50 is the standard's table, 100 has steps of 1."""
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    return ((torch.tensor(table, dtype=torch.float64) * scale + 50) / 100).floor().clamp(1, 255)


def _quantised_blocks(planes: Tensor, steps: Tensor, height: int, width: int) -> Tensor:
    """Round the cosine transform of each 8 x 8 block to multiples of `steps`; edges are padded with their last pixel."""
    padded = F.pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate")
    count, channels = planes.shape[:2]
    blocks = padded.view(count, channels, padded.shape[-2] // 8, 8, padded.shape[-1] // 8, 8).transpose(3, 4)
    frequency, place = torch.arange(8.0).view(-1, 1), torch.arange(8.0)
    matrix = torch.cos((2 * place + 1) * frequency * math.pi / 16) / 2
    # The orthogonal matrix (8,8) whose row u is the cosine of frequency u.
    cosines, steps = torch.where(frequency == 0, matrix / math.sqrt(2), matrix).to(planes), steps.to(planes)
    coarse = (cosines @ blocks @ cosines.t() / steps).round() * steps
    restored = (cosines.t() @ coarse @ cosines).transpose(3, 4).reshape(padded.shape)
    return restored[..., :height, :width].round().clamp(-128, 127)


def _change_basis(planes: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Multiply the three channels by a matrix (channels of the result, 3)."""
    return torch.einsum("ij,bjhw->bihw", torch.tensor(matrix).to(planes), planes)


# Filters that several kinds use. Borders are mirrored, the edge pixel included.


def mirrored(positions: Tensor, size: int) -> Tensor:
    """Map positions outside 0..size-1 to indices inside: ... 1 0 | 0 1 2 ... size-1 | size-1 ..."""
    folded = positions.remainder(2 * size)
    return torch.minimum(folded, 2 * size - 1 - folded)


def gaussian_matrix(size: int, sigma: float, truncate: float, like: Tensor) -> Tensor:
    """Return the matrix (size,size) of a Gaussian blur along one axis, mirrored at its ends.

    A matrix rather than a convolution, because the elastic corruption blurs with sigmas as large as the image.
    """
    reach = max(int(truncate * sigma + 0.5), 0)
    steps = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (steps / max(sigma, 1e-6)).square())
    matrix = torch.zeros(size, size)
    places = mirrored(torch.arange(size).unsqueeze(1) + steps, size)
    matrix.scatter_add_(1, places, (weights / weights.sum()).expand(size, -1).contiguous())
    return matrix.to(like)


def blur(images: Tensor, sigma: float, truncate: float = 4.0) -> Tensor:
    """Blur with a Gaussian; sigma 0 changes nothing."""
    if sigma == 0:
        return images
    height, width = images.shape[-2:]
    down = gaussian_matrix(height, sigma, truncate, images)
    return down @ images @ gaussian_matrix(width, sigma, truncate, images).t()


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel with the same odd-sized `kernel (k,k)`."""
    reach = kernel.shape[-1] // 2
    rows, columns = (mirrored(torch.arange(-reach, size + reach, device=images.device), size) for size in images.shape[-2:])
    padded = images.index_select(-2, rows).index_select(-1, columns)
    out = F.conv2d(padded.flatten(0, 1).unsqueeze(1), kernel.to(images)[None, None])
    return out.view_as(images)


def disc(radius: float, smooth: float) -> Tensor:
    """Return the kernel (k,k) of a point out of focus: a disc, its edge softened by a Gaussian of width `smooth`."""
    edge = 1 if radius <= 8 else 2
    reach = int(radius) + edge
    steps = torch.arange(-reach, reach + 1).float()
    hard = (steps.square() + steps.square().unsqueeze(1) <= radius**2).float()
    soft = torch.exp(-0.5 * (torch.arange(-edge, edge + 1) / smooth).square())
    soft = soft / soft.sum()
    kernel = F.conv2d(hard[None, None], torch.outer(soft, soft)[None, None], padding=edge)[0, 0]
    return kernel / kernel.sum()


def pixel_grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each pixel, (1,H,W) each."""
    lines = [torch.arange(size, device=images.device, dtype=images.dtype) for size in images.shape[-2:]]
    rows, columns = torch.meshgrid(*lines, indexing="ij")
    return rows.unsqueeze(0), columns.unsqueeze(0)


def sample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the images at positions `rows, columns (B,H,W)` in pixels, by bilinear interpolation."""
    height, width = images.shape[-2:]
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=-1)
    grid = grid.expand(images.shape[0], -1, -1, -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def zoom(images: Tensor, factor: float) -> Tensor:
    """Return the middle of the images, enlarged by `factor` to their size."""
    rows, columns = pixel_grid(images)
    middle_row, middle_column = (images.shape[-2] - 1) / 2, (images.shape[-1] - 1) / 2
    return sample(images, middle_row + (rows - middle_row) / factor, middle_column + (columns - middle_column) / factor)


def smear(images: Tensor, radius: float, sigma: float, angles: Tensor) -> Tensor:
    """Smear each pixel over 2 radius + 1 pixels with the weights of half a Gaussian, at `angles (B,)` in degrees."""
    rows, columns = pixel_grid(images)
    radians = (angles * math.pi / 180).view(-1, 1, 1).to(images)
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(2 * math.ceil(radius) + 1)]
    weights = [weight for weight in weights if weight > FAINT]
    total = torch.zeros_like(images)
    for step, weight in enumerate(weights):
        total += weight * sample(images, rows + step * radians.sin(), columns + step * radians.cos())
    return total / sum(weights)


Size = Literal["large", "small"]
LARGE = 96  # images whose shorter side has this many pixels or more take the settings for 224, others those for 32
SEVEREST = 5


@dataclass(frozen=True)
class CorruptedImages(AttackResult):
    """Images after a corruption."""

    stored = ("attack", "group", "severity", "seed", "size", "realised", "examples", "flags")
    attack: str  # the corruption's name
    images: Tensor  # (B,C,H,W), in [0,1]
    severity: int  # the budget: 0 is clean, 5 the worst
    seed: int
    size: Size  # which published settings were used
    distances: Tensor  # (B,) float64: root mean square difference from the clean image
    flags: tuple[Flag, ...] = ()

    @property
    def realised(self) -> float:
        """The mean of `distances`."""
        return float(self.distances.mean()) if self.distances.numel() else 0.0

    @property
    def group(self) -> str:
        return CORRUPTIONS[self.attack].group

    @property
    def examples(self) -> int:
        return self.images.shape[0]


def corrupt(
    images: Tensor,
    name: str,
    *,
    severity: int,
    seed: int = 0,
    first: int = 0,
    size: Size | None = None,
    frost: Tensor | None = None,
) -> CorruptedImages:
    """Apply one of the common corruptions of Hendrycks & Dietterich 2019; `CORRUPTIONS` has their names.

    The recipes and settings are the published ones, the arithmetic is not: only JPEG rounds to 8 bits, and borders are
    mirrored. The published frost is cut from photographs, which cannot be shipped (frost1.png to frost6.jpg, in the folder
    ImageNet-C/create_c of the GitHub repository hendrycks/robustness). Pass them as `frost`; without them it is a texture of
    ours. To compare with published numbers, use the published files.

    images      (B,C,H,W) with 1 or 3 channels, values from 0 to 1
    severity    1 to 5; 0 returns the images unchanged
    first       the index of the first image in its data set: an image's random numbers depend only on the seed and on
                its index, and are the same at each severity
    size        "large" for the settings published for 224 pixels, "small" for those for 32; by default large from a shorter
                side of 96 pixels on
    frost       photographs of frost, (photographs, channels, height, width), from 0 to 1
    """
    require_known("corruption", name, CORRUPTIONS)
    check_count(severity, "severity", least=0)
    if severity > SEVEREST:
        raise ValueError(f"severity is {severity}; expected 1 to {SEVEREST}, or 0 for clean images.")
    check_seed(seed)
    check_count(first, "first", least=0)
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images have shape {tuple(images.shape)}; expected (B, C, H, W) with 1 or 3 channels.")
    check_bounds(images, (0.0, 1.0))
    size = size or ("large" if min(images.shape[-2:]) >= LARGE else "small")
    require_known("size", size, ("large", "small"))
    corruption = CORRUPTIONS[name]
    corrupted = images
    if severity > 0 and images.numel() > 0:
        settings = (corruption.large if size == "large" else corruption.small)[severity - 1]
        sources = generators(seed, images.shape[0], name, first=first)
        files = (frost,) if name == "frost" else ()
        corrupted = corruption.apply(images.float(), sources, *settings, *files).clamp(0, 1).to(images.dtype)
    pixels = max(images[0].numel(), 1) if images.shape[0] else 1
    apart = distances(corrupted, images, "l2") / pixels**0.5
    return CorruptedImages(name, corrupted, severity, seed, size, apart)
