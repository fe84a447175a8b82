"""Files are written whole or not at all: to a temporary name beside the target, then renamed."""

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, whose folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
