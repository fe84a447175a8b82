"""Small image tools in plain torch: blurs, line and disc filters, resampling. Borders are mirrored, edge pixel included.

images (B,C,H,W)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FAINT = 1e-3  # taps of a filter below this share of its largest are left out


def mirrored(positions: Tensor, size: int) -> Tensor:
    """Indices into 0..size-1 of positions that may lie outside: ... 1 0 | 0 1 2 ... size-1 | size-1 ..."""
    folded = positions.remainder(2 * size)
    return torch.minimum(folded, 2 * size - 1 - folded)


def gaussian_matrix(size: int, sigma: float, truncate: float, like: Tensor) -> Tensor:
    """(size,size): a Gaussian blur along one axis, mirrored at its ends, as a product with this matrix.

    A matrix, because the elastic corruption blurs with sigmas as large as the image.
    """
    reach = max(int(truncate * sigma + 0.5), 0)
    steps = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (steps / max(sigma, 1e-6)).square())
    matrix = torch.zeros(size, size)
    places = mirrored(torch.arange(size).unsqueeze(1) + steps, size)
    matrix.scatter_add_(1, places, (weights / weights.sum()).expand(size, -1).contiguous())
    return matrix.to(like)


def blur(images: Tensor, sigma: float, truncate: float = 4.0) -> Tensor:
    """Gaussian blur; sigma 0 changes nothing."""
    if sigma == 0:
        return images
    height, width = images.shape[-2:]
    down = gaussian_matrix(height, sigma, truncate, images)
    return down @ images @ gaussian_matrix(width, sigma, truncate, images).t()


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Each channel with the same odd-sized `kernel (k,k)`."""
    reach = kernel.shape[-1] // 2
    rows, columns = (mirrored(torch.arange(-reach, size + reach, device=images.device), size) for size in images.shape[-2:])
    padded = images.index_select(-2, rows).index_select(-1, columns)
    out = F.conv2d(padded.flatten(0, 1).unsqueeze(1), kernel.to(images)[None, None])
    return out.view_as(images)


def disc(radius: float, smooth: float) -> Tensor:
    """(k,k): what a point becomes out of focus, its edge softened by a small Gaussian of width `smooth`."""
    edge = 1 if radius <= 8 else 2
    reach = int(radius) + edge
    steps = torch.arange(-reach, reach + 1).float()
    hard = (steps.square() + steps.square().unsqueeze(1) <= radius**2).float()
    soft = torch.exp(-0.5 * (torch.arange(-edge, edge + 1) / smooth).square())
    soft = soft / soft.sum()
    kernel = F.conv2d(hard[None, None], torch.outer(soft, soft)[None, None], padding=edge)[0, 0]
    return kernel / kernel.sum()


def pixel_grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, (1,H,W) each."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device, dtype=images.dtype).view(1, -1, 1).expand(1, height, width)
    columns = torch.arange(width, device=images.device, dtype=images.dtype).view(1, 1, -1).expand(1, height, width)
    return rows, columns


def sample(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The images at positions `rows, columns (B,H,W)` in pixels, between pixels by bilinear interpolation."""
    height, width = images.shape[-2:]
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], dim=-1)
    grid = grid.expand(images.shape[0], -1, -1, -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def zoom(images: Tensor, factor: float) -> Tensor:
    """The middle of the images, enlarged to their size."""
    rows, columns = pixel_grid(images)
    middle_row, middle_column = (images.shape[-2] - 1) / 2, (images.shape[-1] - 1) / 2
    return sample(images, middle_row + (rows - middle_row) / factor, middle_column + (columns - middle_column) / factor)


def smear(images: Tensor, radius: float, sigma: float, angles: Tensor) -> Tensor:
    """Motion: each pixel trails off over 2 radius + 1 pixels, by half a Gaussian, at `angles (B,)` in degrees."""
    rows, columns = pixel_grid(images)
    radians = (angles * math.pi / 180).view(-1, 1, 1).to(images)
    weights = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(2 * math.ceil(radius) + 1)]
    weights = [weight for weight in weights if weight > FAINT]
    total = torch.zeros_like(images)
    for step, weight in enumerate(weights):
        total += weight * sample(images, rows + step * radians.sin(), columns + step * radians.cos())
    return total / sum(weights)
