"""What software does to images: contrast, stretching, pixelation. JPEG has a file of its own."""

import torch
from torch import Tensor

from holdfast.attacks.corruptions.filters import blur, pixel_grid, sample
from holdfast.attacks.corruptions.noise import Sources
from holdfast.attacks.seeds import draw


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
