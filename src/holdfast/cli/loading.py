"""Where a model's weights go, for the commands that load one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Loading:
    device_map: str | None = None
    """Where the weights go, for example cuda, cpu, or auto: over all that is there, the rest on disk. By default one GPU, if
    there is one."""
    offload: Path | None = None
    """A folder for what auto puts on disk."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; by default that of the folder."""

    def options(self) -> dict[str, Any]:
        """As `from_pretrained` takes them."""
        import torch

        where = self.device_map or ("cuda" if torch.cuda.is_available() else None)
        given = {
            "device_map": where,
            "dtype": self.dtype,
            "offload_folder": None if self.offload is None else str(self.offload),
        }
        return {name: value for name, value in given.items() if value is not None}
