"""The command line that the benchmarks share."""

import argparse
import json
from pathlib import Path

import torch


def command(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """--device, --rounds and --out; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--force", action="store_true", help="overwrite what --out names")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Before anything is measured: is there such a device, and may the results be written?"""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; leave --device out to measure on the CPU.")
    if arguments.out and arguments.out.exists() and not arguments.force:
        raise SystemExit(f"{arguments.out} is there already; --force overwrites it.")


def write(path: Path, results: object) -> None:
    """All of the file or none of it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(results, indent=1))
    unfinished.replace(path)
