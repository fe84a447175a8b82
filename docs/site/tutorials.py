"""Run the tutorials: the Python of a page from top to bottom, in one process and an empty folder, and what it prints.

    python docs/site/tutorials.py                          # run all, write what they print and the numbers of their pictures
    python docs/site/tutorials.py compare-routers          # the same for one
    python docs/site/tutorials.py --check compare-routers  # change nothing; exit with 1 if the page shows something else

A block of Python may be followed by a block of text with one of these titles:

    Output                 exactly what the block prints
    Output, approximate    the same words; numbers may differ, because processors round differently and the text that comes
                           with Python changes between versions. They are compared, as close to those shown, only with the
                           version of Python, and on the kind of processor, that are stored with the numbers of the picture
    Output, for example    other numbers lead to other sentences: it is only tested that something is printed
"""

import argparse
import contextlib
import io
import json
import os
import platform
import re
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import figures

DOCS = Path(__file__).resolve().parent.parent
PAGES = DOCS / "tutorials"
PICTURES = DOCS / "pictures"

# The picture of each tutorial: docs/pictures/NAME.py takes its numbers from the names that the page defines.
PICTURE_OF = {
    "audit-and-mend": "tutorial_audit",
    "upcycle-and-fine-tune": "tutorial_upcycle",
    "replay-routes": "tutorial_replay",
    "write-a-router": "tutorial_router",
    "compare-routers": "tutorial_compare",
    "attack-an-image-classifier": "tutorial_images",
}

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n"
    r'(?:\n```text title="(?P<title>Output(?:, approximate|, for example)?)"\n(?P<output>.*?)^```\n)?',
    flags=re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})+|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
MARK = "--- end of a block ---"
CLOSE, SMALL = 0.35, 3  # relative, and in units of the last digit that is shown


@final
@dataclass(frozen=True)
class Block:
    """One block of Python of a page, and the block of output after it."""

    code: str
    line: int  # of the page, at which the code begins
    title: str | None
    shown: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["code"], text[: found.start("code")].count("\n") + 1, found["title"], found["output"])
        for found in BLOCK.finditer(text)
    ]


def script_of(page: Path) -> str:
    """Return the Python of a page as one script, with the line numbers of the page; a mark is printed after each block."""
    lines = [""] * (len(page.read_text(encoding="utf-8").splitlines()) + 1)
    for block in blocks_of(page):
        code = block.code.splitlines()
        lines[block.line - 1 : block.line + len(code)] = [*code, f"print({MARK!r})"]
    return "\n".join(lines) + "\n"


def run(page: Path) -> tuple[list[str], dict[str, Any]]:
    """Run a page in an empty folder; return what each block prints, and the names that they have defined."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as output:
        script = Path(folder) / "tutorial.py"
        script.write_text(script_of(page), encoding="utf-8")
        os.chdir(folder)
        try:
            names = runpy.run_path(str(script), run_name="__main__")
        finally:
            os.chdir(before)
    parts = output.getvalue().split(f"{MARK}\n")[:-1]
    return ["".join(f"{line.rstrip()}\n" for line in part.splitlines()) for part in parts], names


def difference(block: Block, printed: str, *, numbers: bool) -> str | None:
    """Return how the output differs from the one shown, or None. `numbers`: compare those of "Output, approximate" too."""
    if block.title is None:
        return f"prints {printed!r}, which is not shown" if printed else None
    if block.title == "Output" and printed != block.shown:
        return f"prints\n{printed}but the page shows\n{block.shown}"
    if block.title == "Output, for example":
        return None if printed else "prints nothing"
    shown = block.shown or ""
    if NUMBER.sub("0", " ".join(printed.split())) != NUMBER.sub("0", " ".join(shown.split())):
        return f"prints other words:\n{printed}but the page shows\n{shown}"
    if numbers:
        for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
            if not is_close(one, other):
                return f"prints {one} where the page shows {other}:\n{printed}"
    return None


def is_close(one: str, other: str) -> bool:
    """Return whether two printed numbers are close: relative, or in units of the last digit."""
    first, second = (float(number.replace(",", "")) for number in (one, other))
    unit = 10.0 ** -len(other.partition("e")[0].partition(".")[2])
    return abs(first - second) <= max(CLOSE * abs(second), SMALL * unit)


def with_output(page: Path, printed: list[str]) -> str:
    """Return the page with what its blocks have printed. A new block of output is "approximate"."""
    outputs = iter(printed)

    def block(found: re.Match[str]) -> str:
        output = next(outputs)
        code = f"```python\n{found['code']}```\n"
        return f'{code}\n```text title="{found["title"] or "Output, approximate"}"\n{output}```\n' if output else code

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


def store_numbers(name: str, names: dict[str, Any]) -> None:
    """Store what the picture of a tutorial shows, and draw it."""
    script = figures.script(name)
    import torch
    import transformers

    versions = {**here(), "torch": torch.__version__, "transformers": transformers.__version__}
    stored = {"versions": versions, **script.stored_numbers(names)}
    (PICTURES / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    (PICTURES / f"{name}.svg").write_bytes(script.picture(figures.numbers(name)).encode())


def here() -> dict[str, str]:
    """Return what the numbers of a short training run depend on."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "processor": platform.machine()}


def check(page: Path) -> list[str]:
    """Return the differences between what a page shows and what it prints."""
    stored = json.loads((PICTURES / f"{PICTURE_OF[page.stem]}.json").read_text(encoding="utf-8"))
    numbers = here().items() <= stored["versions"].items()
    found = []
    for block, printed in zip(blocks_of(page), run(page)[0], strict=True):
        if differs := difference(block, printed, numbers=numbers):
            found.append(f"{page.name}, line {block.line}: {differs}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of tutorials; all of them by default")
    parser.add_argument("--check", action="store_true", help="compare with the pages and change nothing")
    given = parser.parse_args()
    sys.path.insert(0, str(PICTURES))
    for name in given.names or PICTURE_OF:
        page = PAGES / f"{name}.md"
        if given.check:
            if found := check(page):
                print("\n".join(found), file=sys.stderr)
                return 1
            continue
        printed, names = run(page)
        page.write_text(with_output(page, printed), encoding="utf-8")
        store_numbers(PICTURE_OF[name], names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
