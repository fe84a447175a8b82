"""JPEG's loss in plain torch: 8-bit YCbCr, half the colour resolution, 8 x 8 cosine transforms, quantised (ITU-T T.81).

Only what loses information is computed; the lossless rest of the format changes nothing.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.attacks.corruptions.noise import Sources

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
