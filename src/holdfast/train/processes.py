"""How many processes train together, as torchrun and accelerate launch tell each of them."""

import os


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Of several processes, the one that writes and speaks."""
    return os.environ.get("RANK", "0") == "0"
