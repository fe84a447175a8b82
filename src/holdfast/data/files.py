"""Files, plain or packed with xz or gzip. Whatever is wrong with one is a sentence that names it.

Checksums of data, recorded with every result so that figures on different texts or pictures are never mixed up.
"""

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from holdfast.files import MIB, require_regular

PACKED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
_BOM = b"\xef\xbb\xbf"  # some editors put it before a text
ALWAYS_UNPACKED, MOST_RATIO = 64 * MIB, 100  # a packed file may unpack to so many bytes, or to so many times its size


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked as they are read."""
    try:
        require_regular(path)  # a device has no end, and a pipe may never begin
        with PACKED.get(path.suffix, open)(path, "rb") as file:
            yield file
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist.") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or not what its ending says: {error}.") from error
    except OSError as error:
        raise ValueError(f"{path} could not be read: {error.strerror or error}.") from error


def read_bytes(path: Path) -> bytes:
    """Return the whole file, unpacked; refuse one that unpacks to far more than text does, and would fill the memory."""
    with opened(path) as file:
        if path.suffix not in PACKED:
            return file.read()
        most = max(ALWAYS_UNPACKED, MOST_RATIO * path.stat().st_size)
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} unpacks to more than {MOST_RATIO} times its size; no text does, so it is not read.")
    return data


def read_text(path: Path) -> bytes:
    """The bytes of a text, known to be UTF-8 and not to be blank."""
    data = read_bytes(path).removeprefix(_BOM)
    if not data.strip():
        raise ValueError(f"{path} holds no text.")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from error
    return data


def find(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of the names that the folder holds, plain or packed."""
    for name in names:
        for ending in ("", *PACKED):
            if (path := folder / f"{name}{ending}").is_file():
                return path
    return None


def places(folder: Path, names: Iterable[str]) -> list[Path]:
    """Where a source may lie: in a folder of its own under any of its names. The folder itself may be that one."""
    known = list(names)
    return [*(folder / name for name in known), *([folder] if folder.resolve().name in known else [])]


def plain_name(path: Path) -> str:
    """The file's name without the ending of its packing."""
    return path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name


def checksum(parts: Iterable[bytes]) -> str:
    """SHA-256 over the parts, each with its length before it, so that no other parts spell the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def title_hash(title: str) -> bytes:
    """A place for the title that no seed of Python's own hash moves."""
    return hashlib.sha256(title.encode("utf-8", "surrogatepass")).digest()
