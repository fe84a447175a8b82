"""The command line that the benchmarks share."""

import argparse
import json
from pathlib import Path

import torch


def command(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with --device, --rounds, --out and --force; a benchmark adds its own options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Exit before anything is measured if the device is missing or the output file exists."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU; omit --device to measure on the CPU.")
    if arguments.out and arguments.out.exists() and not arguments.force:
        raise SystemExit(f"{arguments.out} exists; overwrite it with --force.")


def write(path: Path, results: object) -> None:
    """Write the results atomically."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(results, indent=1))
    unfinished.replace(path)
