"""Noise: of electronics, of too little light, of broken pixels.

Blurs: out of focus, through frosted glass, in motion, while zooming.

What software does to images: contrast, stretching, pixelation. JPEG has a file of its own.

Weather: snow, frost, fog, bright sun.

JPEG's loss in plain torch: 8-bit YCbCr, half the colour resolution, 8 x 8 cosine transforms, quantised (ITU-T T.81).

Only what loses information is computed; the lossless rest of the format changes nothing.
"""

import math
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.attacks.image_filters import blur, convolve, disc, pixel_grid, sample, smear, zoom
from holdfast.attacks.threat import draw

Sources = list[torch.Generator]  # one for each image


def gaussian_noise(images: Tensor, sources: Sources, scale: float) -> Tensor:
    """x + scale n, n normal."""
    return images + scale * draw(lambda source: torch.randn(images.shape[1:], generator=source), sources, images)


def shot_noise(images: Tensor, sources: Sources, photons: float) -> Tensor:
    """Poisson(photons x) / photons: light comes in grains."""
    means = (images.float() * photons).cpu()
    counts = [torch.poisson(mean, generator=source) for mean, source in zip(means, sources, strict=True)]
    return torch.stack(counts).to(images) / photons


def impulse_noise(images: Tensor, sources: Sources, share: float) -> Tensor:
    """Each value is 0 or 1, with probability share / 2 each."""
    chance = draw(lambda source: torch.rand(images.shape[1:], generator=source), sources, images)
    salted = images.masked_fill(chance < share / 2, 1.0)
    return salted.masked_fill(chance > 1 - share / 2, 0.0)


def defocus_blur(images: Tensor, sources: Sources, radius: float, smooth: float) -> Tensor:
    """A disc for each point."""
    return convolve(images, disc(radius, smooth))


def glass_blur(images: Tensor, sources: Sources, sigma: float, reach: int, rounds: int) -> Tensor:
    """Blur, swap each pixel with one at most `reach` away, `rounds` times over, blur again.

    The published code means to swap and copies instead, because two views of one array cannot be exchanged that way;
    this swaps.
    """
    height, width = images.shape[-2:]
    orders = torch.stack([torch.tensor(_shuffled(height, width, reach, rounds, source)) for source in sources])
    shuffled = blur(images, sigma).flatten(2)
    shuffled = shuffled.gather(2, orders.to(images.device).unsqueeze(1).expand_as(shuffled))
    return blur(shuffled.view_as(images), sigma)


def _shuffled(height: int, width: int, reach: int, rounds: int, source: torch.Generator) -> list[int]:
    """Which pixel ends up where, as positions in a flat image. One swap after the other: a pixel can travel far."""
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


def motion_blur(images: Tensor, sources: Sources, radius: float, sigma: float) -> Tensor:
    """A trail in a direction between -45 and 45 degrees."""
    angles = draw(lambda source: torch.rand((), generator=source) * 90 - 45, sources, images)
    return smear(images, radius, sigma, angles)


def zoom_blur(images: Tensor, sources: Sources, most: float, step: float) -> Tensor:
    """The mean of the image and of its enlargements by 1, 1 + step, ... up to `most`."""
    factors = [1 + step * number for number in range(round((most - 1) / step) + 1)]
    return (images + sum(zoom(images, factor) for factor in factors)) / (len(factors) + 1)


def contrast(images: Tensor, sources: Sources, share: float) -> Tensor:
    """Each channel drawn towards its mean."""
    means = images.mean((2, 3), keepdim=True)
    return (images - means) * share + means


def elastic_transform(images: Tensor, sources: Sources, stretch: float, sigma: float, jitter: float) -> Tensor:
    """An affine map that moves three points by up to `jitter` pixels, and a smooth random displacement (Simard et al. 2003).

    The displacement is uniform noise, blurred by sigma and multiplied by `stretch`. Both in one interpolation.
    """
    height, width = images.shape[-2:]
    rows, columns = pixel_grid(images)
    noise = draw(lambda source: torch.rand((2, height, width), generator=source) * 2 - 1, sources, images)
    shift = stretch * blur(noise, sigma, truncate=3.0)
    rows, columns = rows + shift[:, 0], columns + shift[:, 1]
    reach, middle_row, middle_column = min(height, width) // 3, height // 2, width // 2
    points = torch.tensor(
        [
            [middle_row + reach, middle_column + reach, 1],
            [middle_row + reach, middle_column - reach, 1],
            [middle_row - reach, middle_column - reach, 1],
        ]
    ).to(images)
    moves = draw(lambda source: torch.rand((3, 2), generator=source) * 2 - 1, sources, images) * jitter
    # Points with a 1 appended, times the (3,2) matrix of the map, are where they came from.
    matrix = torch.linalg.solve(points.double(), (points[:, :2] + moves).double()).to(images)[:, None, None]
    sources_ = rows.unsqueeze(-1) * matrix[..., 0, :] + columns.unsqueeze(-1) * matrix[..., 1, :] + matrix[..., 2, :]
    return sample(images, sources_[..., 0], sources_[..., 1])


def pixelate(images: Tensor, sources: Sources, share: float) -> Tensor:
    """Each pixel becomes the mean of those whose centres are in its cell, with `share` as many cells as pixels along a side.

    This is what shrinking and enlarging with a box filter does.
    """
    down, across = (_same_cell(size, max(int(size * share), 1), images) for size in images.shape[-2:])
    return down @ images @ across.t()


def _same_cell(size: int, cells: int, like: Tensor) -> Tensor:
    """(size,size): averages over the cell that a pixel is in."""
    cell = ((2 * torch.arange(size) + 1) * cells).div(2 * size, rounding_mode="floor")
    together = (cell.unsqueeze(1) == cell).float()
    return (together / together.sum(1, keepdim=True)).to(like)


GREY = (0.299, 0.587, 0.114)  # what red, green and blue contribute to brightness
NO_FROST = (
    "frost needs photographs of frost, which are not ours to ship: frost1.png to frost6.jpg, in the folder "
    "ImageNet-C/create_c of the GitHub repository hendrycks/robustness. Load them as a tensor (photographs, channels, "
    "height, width) with values from 0 to 1, at least as large as the images, and pass it as frost=..."
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
    """Flakes are enlarged noise above `least`, driven by wind; the scene behind them whitens."""
    height, width = images.shape[-2:]
    noise = draw(lambda source: torch.randn((1, height, width), generator=source), sources, images)
    flakes = zoom(mean + spread * noise, size)
    flakes = flakes.masked_fill(flakes < least, 0.0).clamp(0, 1)
    angles = draw(lambda source: torch.rand((), generator=source) * 90 - 135, sources, images)
    flakes = smear(flakes, radius, sigma, angles)
    whitened = keep * images + (1 - keep) * torch.maximum(images, grey(images) * 1.5 + 0.5)
    return whitened + flakes + flakes.flip((-2, -1))


def frost(images: Tensor, sources: Sources, keep: float, cover: float, photographs: Tensor | None) -> Tensor:
    """keep x + cover f, f a random part of a random photograph of frost."""
    if photographs is None:
        raise ValueError(NO_FROST)
    height, width = images.shape[-2:]
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


def fog(images: Tensor, sources: Sources, thickness: float, decay: float) -> Tensor:
    """(x + thickness plasma) max / (max + thickness), max the image's largest value: clouds added, brightness kept."""
    brightest = images.amax((1, 2, 3), keepdim=True)
    clouds = plasma(max(images.shape[-2:]), decay, sources, images)[..., : images.shape[-2], : images.shape[-1]]
    return (images + thickness * clouds) * brightest / (brightest + thickness)


def plasma(least: int, decay: float, sources: Sources, like: Tensor) -> Tensor:
    """(B,1,S,S) between 0 and 1, S the next power of two: clouds by diamond-square midpoint displacement on a torus.

    Points halfway between known ones are their mean plus noise, whose amplitude falls by decay^2 from scale to scale.
    """
    size = 1 << max(least - 1, 1).bit_length()
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
    return (field / field.amax((1, 2), keepdim=True)).unsqueeze(1).to(like)


def _noise(points: int, sources: Sources) -> Tensor:
    return torch.stack([torch.rand((points, points), generator=source, dtype=torch.float64) * 2 - 1 for source in sources])


def brightness(images: Tensor, sources: Sources, more: float) -> Tensor:
    """The V of HSV raised by `more`, hue and saturation kept: all channels are scaled by V' / V, and black becomes grey."""
    value = images.amax(1, keepdim=True)
    raised = (value + more).clamp(0, 1)
    return torch.where(value > 0, images * (raised / value.clamp_min(1e-8)), raised)


def grey(images: Tensor) -> Tensor:
    """(B,1,H,W)"""
    if images.shape[1] == 1:
        return images
    return (images * torch.tensor(GREY).to(images).view(1, 3, 1, 1)).sum(1, keepdim=True)


# Annex K of the standard: the steps of brightness and of colour, for quality 50.
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


def jpeg_compression(images: Tensor, sources: Sources, quality: float) -> Tensor:
    """What is left of the images after a JPEG of this quality, 1 to 100; the result has 8 bits a value, like a JPEG."""
    height, width = images.shape[-2:]
    pixels = (images * 255).round()
    if images.shape[1] == 1:
        return _through_blocks(pixels - 128, _steps(LUMINANCE, quality), height, width).add(128).round().clamp(0, 255) / 255
    planes = _turned(pixels, TO_YCBCR)
    light = _through_blocks(planes[:, :1].round() - 128, _steps(LUMINANCE, quality), height, width) + 128
    colours = F.pad(planes[:, 1:], (0, width % 2, 0, height % 2), mode="replicate")
    colours = F.avg_pool2d(colours, 2).round()
    colours = _through_blocks(colours, _steps(CHROMINANCE, quality), *colours.shape[-2:])
    colours = F.interpolate(colours, scale_factor=2, mode="bilinear", align_corners=False)[..., :height, :width]
    return _turned(torch.cat([light, colours], 1), TO_RGB).round().clamp(0, 255) / 255


def _steps(table: tuple[tuple[int, ...], ...], quality: float) -> Tensor:
    """The table of the Independent JPEG Group for a quality: 50 is the standard's, 100 has all steps 1."""
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    return ((torch.tensor(table, dtype=torch.float64) * scale + 50) / 100).floor().clamp(1, 255)


def _through_blocks(planes: Tensor, steps: Tensor, height: int, width: int) -> Tensor:
    """Each 8 x 8 block in cosines, rounded to multiples of `steps`, and back; the edge is filled up with its last pixel."""
    padded = F.pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate")
    count, channels = planes.shape[:2]
    blocks = padded.view(count, channels, padded.shape[-2] // 8, 8, padded.shape[-1] // 8, 8).transpose(3, 4)
    cosines, steps = _cosines().to(planes), steps.to(planes)
    coarse = (cosines @ blocks @ cosines.t() / steps).round() * steps
    restored = (cosines.t() @ coarse @ cosines).transpose(3, 4).reshape(padded.shape)
    return restored[..., :height, :width].round().clamp(-128, 127)


def _cosines() -> Tensor:
    """(8,8), orthogonal: row u is the cosine of frequency u."""
    frequency, place = torch.arange(8.0).view(-1, 1), torch.arange(8.0)
    matrix = torch.cos((2 * place + 1) * frequency * math.pi / 16) / 2
    return torch.where(frequency == 0, matrix / math.sqrt(2), matrix)


def _turned(planes: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Another basis for the three channels."""
    return torch.einsum("ij,bjhw->bihw", torch.tensor(matrix).to(planes), planes)
