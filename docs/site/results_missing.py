"""What benchmarks/verdicts.yaml asks for and results/ has not: the seeds asked for, and what is missing with its command."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verdict_cells import Entry, Places, Stored, read_list

COMMAND = "`PYTHONPATH=src python benchmarks/verdicts.py --data DATA --only"
HEAD = """## What is missing

What `benchmarks/verdicts.yaml` asks for and has no stored result, in the order in which it runs. The list says beforehand
which routers and how many seeds. Its language models have a cosine rate: cells above with a constant rate are others. The
command of a row runs what it lacks; DATA is a folder with the data sets, and `--list` in place of `--only` shows how long
each takes.

| asked for | cells stored | missing | command |
|---|---|---|---|
"""


@dataclass
class Asked:
    """What the list asks for, beside what is stored.

    seeds    by the folder of an experiment in the ledger and the router
    """

    seeds: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    # with the number of stored cells, what is missing and of which seeds
    missing: list[tuple[Entry, int, Counter[str], list[int]]] = field(default_factory=list)


def asked_for(results: Path) -> Asked:
    entries, stored, found = read_list(), Stored(Places(Path("runs"), results / "ledger")), Asked()
    folders: dict[str, str] = {}
    wanted = [(one, each) for one in entries for each in one.cells]
    for _, each in wanted:
        if (folder := stored.folder_of(each)) is not None:
            folders[each.experiment.name] = folder
    for _, each in wanted:
        if each.experiment.name in folders:
            found.seeds.setdefault((folders[each.experiment.name], each.cell.choice.name), []).append(each.seed)
    for entry in entries:
        cells = list(entry.cells)
        missing = [stored.missing(each) for each in cells]
        counts = Counter(part for parts in missing for part in parts)
        if counts:
            seeds = sorted({each.seed for each, parts in zip(cells, missing, strict=True) if parts})
            found.missing.append((entry, len(cells) - counts["cell"], counts, seeds))
    return found


def missing(asked: Asked) -> Iterator[str]:
    """Yield the lines of the section; none if nothing is missing."""
    for place, (entry, stored, counts, seeds) in enumerate(asked.missing):
        if place == 0:
            yield HEAD.rstrip("\n")
        number = len(entry.seeds) * len(entry.routers) * len(entry.experiments)
        lacks = _lacks(counts, seeds)
        yield f"| {entry.about} | {stored} of {number} | {lacks} | {COMMAND} {entry.name}` |"


def _lacks(counts: Counter[str], seeds: Sequence[int]) -> str:
    words = {"cell": "cells", "audits": "audits of stored cells", "certified": "certificates of stored cells"}
    named = ", ".join(f"{count} {words[part]}" for part, count in counts.items())
    return f"{named} (seeds {', '.join(map(str, seeds))})"
