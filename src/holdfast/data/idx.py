"""The IDX files of the MNIST family: a magic number, the sizes, the bytes."""

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.data.files import opened

_BYTES = 0x08  # the type code of unsigned bytes, the only one in use


def read_idx(path: Path, dimensions: int) -> Tensor:
    """A uint8 tensor with that many dimensions. No more is unpacked than the header announces."""
    with opened(path) as file:
        header = file.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, _BYTES, dimensions)):
            raise ValueError(f"{path} is not an IDX file of bytes with {dimensions} dimensions.")
        sizes = struct.unpack(f">{dimensions}I", header[4:])
        wanted = math.prod(sizes)
        if wanted > 2**32:
            raise ValueError(f"{path} announces {wanted:,} bytes of pictures; that is too many for an IDX file.")
        data = file.read(wanted + 1)
    if len(data) != wanted:
        more = "more" if len(data) > wanted else f"{len(data):,}"
        raise ValueError(f"{path} announces {wanted:,} bytes and holds {more}.")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(sizes).copy())
