"""How large the tiles of the mixing kernels are: the first choice that fits into a multiprocessor's shared memory."""

import functools
from typing import Any, NamedTuple

import torch


class Tiling(NamedTuple):
    """Rows and columns of a tile of scores, and how a program works on it."""

    rows: int
    columns: int
    warps: int
    stages: int
    fold: bool = False  # see `triton._turn`
    chunk: int = 0  # columns of queries and keys that are read at a time; 0 is all

    @property
    def options(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Measured on an H200. The last fits everywhere.
SMALL = (Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1))
TILINGS = {
    "mix": (Tiling(64, 64, 4, 3, fold=True), Tiling(64, 64, 4, 2, fold=True), Tiling(64, 32, 4, 2), *SMALL),
    "query": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), *SMALL),
    "key": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),
    "value": (Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), *SMALL),  # the kernel over keys where only values are wanted
}
# For vectors that are read in chunks. The first of each was measured on an H200, at a width of 384 (docs/performance.md).
SMALL_WIDE = (Tiling(32, 32, 4, 2, chunk=32), Tiling(16, 16, 4, 1, chunk=16))
WIDE_TILINGS = {
    "mix": (Tiling(64, 64, 4, 3, chunk=64), Tiling(64, 64, 4, 2, fold=True, chunk=32), *SMALL_WIDE),
    "key": (Tiling(64, 64, 4, 3, chunk=64), Tiling(64, 64, 4, 2, chunk=32), *SMALL_WIDE),
    "value": (Tiling(64, 64, 4, 3, chunk=64), Tiling(64, 64, 4, 2, chunk=32), *SMALL_WIDE),
}
SCRATCH = 8192  # bytes that a kernel needs besides its tiles


class ProductTiling(NamedTuple):
    """Rows and columns of a tile of a gradient, and over how many slopes a step of its loop sums."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


PRODUCT_TILINGS = (
    ProductTiling(128, 128, 64, 8, 3),
    ProductTiling(128, 64, 64, 4, 2),
    ProductTiling(64, 64, 32, 4, 2),
    ProductTiling(32, 32, 32, 4, 1),
)
PADDING = 128  # the matrix of slopes has a multiple of this many rows and columns, so that tiles end inside of it


def _tile_bytes(kernel: str, tiling: Tiling, constants: dict[str, Any]) -> int:
    """Return the bytes of the tiles: those that a program keeps, and those of a step of its loop, `stages` times."""
    width, second, values = (constants[name] for name in ("WIDTH", "SECOND", "VALUES"))
    parts = constants["PARTS"]
    over_keys = kernel in ("key", "value")
    long, short = (tiling.columns, tiling.rows) if over_keys else (tiling.rows, tiling.columns)
    if tiling.chunk:  # steps of the inner loop, over chunks; gradients of queries and keys have a kernel of their own
        chunk = min(tiling.chunk, max(width, second))
        read = max(parts[0], parts[2]) * tiling.rows + max(parts[1], parts[3]) * tiling.columns
        kept = values * (parts[4] * tiling.columns + (2 * tiling.rows if over_keys else 0))
        return 2 * (tiling.stages * read * chunk + kept) + SCRATCH
    if over_keys:
        kept = parts[1] * width + parts[3] * second
        loaded = parts[0] * width + parts[2] * second + 2 * values
    else:
        kept = parts[0] * width + parts[2] * second
        loaded = parts[1] * width + parts[3] * second + parts[4] * values
    if kernel in ("query", "key"):
        kept += (2 if kernel == "query" else parts[4]) * values
        loaded += parts[5] * width * constants["SCALED"] + parts[6] * second
    return 2 * (long * kept + tiling.stages * short * loaded) + SCRATCH


def choose_tiling(kernel: str, constants: dict[str, Any], device: torch.device, wide: bool) -> Tiling:
    """Return the first tiling of the kernel that fits."""
    limit = shared_memory(device)
    tilings = (WIDE_TILINGS if wide else TILINGS)[kernel]
    return next(tiling for tiling in tilings if _tile_bytes(kernel, tiling, constants) <= limit)


def choose_product_tiling(width: int, slope_parts: int, parts: int, device: torch.device) -> ProductTiling:
    """Return the first tiling of `wide.slope_product` that fits, for rows of `width` columns in `parts` parts.

    Its columns divide the width.
    """
    limit = shared_memory(device)
    for tiling in PRODUCT_TILINGS:
        columns = min(tiling.columns, width & -width)
        read = slope_parts * tiling.rows + parts * columns
        if 2 * tiling.stages * tiling.inner * read + SCRATCH <= limit:
            return tiling._replace(columns=columns)
    return tiling._replace(columns=columns)


def fits(constants: dict[str, Any], device: torch.device, wide: bool) -> bool:
    """Return whether the smallest tiles of all kernels fit into the shared memory of one program."""
    tilings = (WIDE_TILINGS if wide else TILINGS).items()
    least = max(_tile_bytes(kernel, choices[-1], constants) for kernel, choices in tilings)
    return least <= shared_memory(device)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory one program may have; 2^30 in the interpreter, which has no limit."""
    if device.type != "cuda":
        return 2**30
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
