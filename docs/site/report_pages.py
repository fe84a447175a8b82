"""The pages of the site that commands write: the leaderboard of results/ledger, and the reports of docs/examples.

    docs/examples/NAME/results.json     or audit.json, geometry.json, mismatch.json: an example, small enough to be stored
    docs/examples/NAME/about.txt        the command that made it, in one line

Each becomes the page examples/NAME.html of the site, as `holdfast report` writes it, and a row of examples.md. To add one,
copy the stored report of a finished run into a folder of its own.
"""

from pathlib import Path

from holdfast.report.stored_pages import KINDS, board_page, find_stored, read_page
from holdfast.train.ledger import read_ledger

DOCS = Path(__file__).resolve().parent.parent
EXAMPLES, LEDGER = DOCS / "examples", DOCS.parent / "results" / "ledger"
INTRODUCTION = """# Pages that commands write

Each is one file that works offline. The buttons at the top save its numbers ([the schema](exporting.md#the-schema)).

| page | what it is | written by |
|---|---|---|
"""


def examples() -> dict[str, Path]:
    """Return the stored reports of docs/examples, by the name of their folder."""
    folders = sorted(path for path in EXAMPLES.glob("*") if path.is_dir())
    return {folder.name: find_stored(folder) for folder in folders if find_stored(folder).exists()}


def files() -> dict[str, str]:
    """Return the pages and the page that lists them, by their places on the site."""
    made = {"examples/leaderboard.html": board_page(read_ledger(LEDGER)).html()}
    rows = [
        "| [leaderboard](examples/leaderboard.html) | our results, from `results/ledger` | `holdfast board results/ledger` |"
    ]
    for name, stored in examples().items():
        made[f"examples/{name}.html"] = read_page(stored).html()
        about = stored.with_name("about.txt")
        command = about.read_text(encoding="utf-8").strip() if about.exists() else f"holdfast report {name}"
        rows.append(f"| [{name}](examples/{name}.html) | {KINDS[stored.name].kind} | `{command}` |")
    return {**made, "examples.md": INTRODUCTION + "\n".join(rows) + "\n"}
