"""Draw the pictures of docs/pictures from their stored numbers, byte for byte the same each time.

    python docs/site/figures.py                                             # draw all of them: `make figures`
    python docs/site/figures.py what_if results/demo/audit/audit.json       # store the numbers of a new report first

A picture is three files of docs/pictures:

    NAME.json   the stored numbers, with versions; if they are from a report, its commands and the commit that made it
    NAME.py     `picture(numbers)` returns the SVG; `stored_numbers(report)` returns what NAME.json keeps of a report
    NAME.svg    what `picture` returned

To add one, write the first two and run this script; svg_parts.py has what pictures share.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PICTURES = Path(__file__).resolve().parent.parent / "pictures"


def names() -> list[str]:
    """Return the names of all pictures: those of the stored numbers."""
    return sorted(path.stem for path in PICTURES.glob("*.json"))


def script(name: str) -> ModuleType:
    """Return the module docs/pictures/NAME.py."""
    file = PICTURES / f"{name}.py"
    if not file.is_file():
        raise ValueError(f"docs/pictures has no {file.name} that could draw {name}.json.")
    if str(PICTURES) not in sys.path:  # scripts may share modules of this folder
        sys.path.append(str(PICTURES))
    spec = importlib.util.spec_from_file_location(f"picture_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(name: str) -> Any:
    """Return the stored numbers of a picture."""
    return json.loads((PICTURES / f"{name}.json").read_text(encoding="utf-8"))


def draw(folder: Path) -> list[Path]:
    """Draw all pictures into `folder`, and return the files."""
    drawn = []
    for name in names():
        drawn.append(folder / f"{name}.svg")
        drawn[-1].write_bytes(script(name).picture(numbers(name)).encode())
    return drawn


def commit() -> str:
    """Return the commit of this checkout, with which the report must have been made."""
    line = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(line, cwd=PICTURES, check=True, capture_output=True, text=True).stdout.strip()


def store(name: str, report: Path) -> None:
    """Keep the numbers of a report that a picture needs, and the commit of this checkout."""
    kept = {"commit": commit(), **script(name).stored_numbers(json.loads(report.read_text(encoding="utf-8")))}
    (PICTURES / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=names(), help="the picture that gets new numbers")
    parser.add_argument("report", nargs="?", type=Path, help="the report that they are taken from")
    given = parser.parse_args()
    if (given.name is None) != (given.report is None):
        parser.error("give a picture and a report, or neither")
    try:
        if given.name is not None:
            store(given.name, given.report)
        for file in draw(PICTURES):
            print(file.relative_to(PICTURES.parent.parent), file=sys.stderr)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
