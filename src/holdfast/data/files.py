"""Files of data, plain or packed with xz or gzip, and checksums of data.

Every problem with a file is a one-line ValueError that names it. Checksums are stored with every result, so that results on
different texts or images are never mixed up.
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
MOST_UNPACKED, MOST_RATIO = 64 * MIB, 100  # a file may unpack to this many bytes, or to this many times its size
_BOM = b"\xef\xbb\xbf"  # some editors write it before a text


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open the file for reading; its bytes are unpacked as they are read."""
    try:
        require_regular(path)  # a device has no end, and opening a pipe may wait forever
        with PACKED.get(path.suffix, open)(path, "rb") as file:
            yield file
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist.") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or does not have the format of its ending: {error}.") from error
    except OSError as error:
        raise ValueError(f"{path} could not be read: {error.strerror or error}.") from error


def read_bytes(path: Path) -> bytes:
    """Return the unpacked file; raise ValueError if it unpacks to far more than a text does, and could fill the memory."""
    with open_unpacked(path) as file:
        if path.suffix not in PACKED:
            return file.read()
        most = max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} unpacks to more than {MOST_RATIO} times its size; no text does, so it is not read.")
    return data


def read_text(path: Path) -> bytes:
    """Return the bytes of a text; raise ValueError if it is blank or not UTF-8."""
    data = read_bytes(path).removeprefix(_BOM)
    if not data.strip():
        raise ValueError(f"{path} contains no text.")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from error
    return data


def find_file(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first of the named files that exists in the folder, plain or packed."""
    for name in names:
        for ending in ("", *PACKED):
            if (path := folder / f"{name}{ending}").is_file():
                return path
    return None


def source_folders(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the folders where a source may be: `folder/NAME` for each name, or `folder` if it has one of the names."""
    known = list(names)
    return [*(folder / name for name in known), *([folder] if folder.resolve().name in known else [])]


def unpacked_name(path: Path) -> str:
    """Return the file's name without the ending of its packing."""
    return path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name


def checksum(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of the parts, each after its length, so that other parts with the same joined bytes differ."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def names_and_sizes(paths: Iterable[Path], folder: Path) -> Iterator[bytes]:
    """Yield the name in the folder and the size of each file, for a checksum that does not read the files."""
    for path in paths:
        yield path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        yield str(path.stat().st_size).encode()


def require_utf8_name(path: Path) -> Path:
    """Return the path of a folder whose name is shown in reports; raise ValueError if the name is not UTF-8."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name of the folder {path} is not UTF-8, so it cannot be shown; rename the folder.") from None
    return path


def title_hash(title: str) -> bytes:
    """Return a hash that decides the split of a document, independent of the seed of Python's `hash`."""
    return hashlib.sha256(title.encode("utf-8", "surrogatepass")).digest()
