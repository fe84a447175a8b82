"""Checksums of data, recorded with every result so that figures on different texts or pictures are never mixed up."""

import hashlib
from collections.abc import Iterable


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
