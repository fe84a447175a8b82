"""Which document is for training and which for testing: by the hash of its title, or by its place in a text."""

import itertools
import re
from collections.abc import Mapping, Sequence

from holdfast.data.checksum import title_hash

HELD_OUT = 0.1  # of a text, for each of valid and test
_PARAGRAPH = re.compile(rb"\n[ \t\r]*\n")
_LINE = re.compile(rb"\n")


def by_title(sizes: Mapping[str, int]) -> dict[str, str]:
    """The split of each title. In the order of their hashes, titles fill the test split, then valid, then train."""
    if len(sizes) < 3:
        raise ValueError(f"{len(sizes)} documents do not make three splits; there must be at least 3.")
    wanted = HELD_OUT * sum(sizes.values())
    order = sorted(sizes, key=title_hash)
    splits, filled = {}, 0
    remaining = ["test", "valid"]
    for place, title in enumerate(order):
        splits[title] = remaining[0] if remaining else "train"
        filled += sizes[title]
        if remaining and (filled >= wanted or len(order) - place - 1 == len(remaining)):
            remaining, filled = remaining[1:], 0
    return splits


def by_position(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Four fifths, a tenth and a tenth, cut after a paragraph or else a line; None where that leaves a part empty."""
    places = [round((1 - 2 * HELD_OUT) * len(data)), round((1 - HELD_OUT) * len(data)), len(data)]
    first, second = (_border(data, place, limit) for place, limit in itertools.pairwise(places))
    if first is None or second is None:
        return None
    parts = data[:first], data[first:second], data[second:]
    return parts if all(part.strip() for part in parts) else None


def _border(data: bytes, place: int, limit: int) -> int | None:
    for border in (_PARAGRAPH, _LINE):
        if found := border.search(data, place, limit):
            return found.end()
    return None


def hold_out(keys: Sequence[str], share: float = HELD_OUT) -> tuple[list[int], list[int]]:
    """Numbers of the keys that stay and of those held out, at least one each, both in the order given."""
    if len(keys) < 2:
        raise ValueError(f"of {len(keys)} examples none can be held out; there must be at least 2.")
    order = sorted(range(len(keys)), key=lambda number: (title_hash(keys[number]), number))
    held = min(max(1, round(share * len(keys))), len(keys) - 1)
    return sorted(order[held:]), sorted(order[:held])
