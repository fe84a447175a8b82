"""What docs/families.md says about each family."""

import re
from pathlib import Path

PAGE = (Path(__file__).parent.parent.parent / "docs" / "families.md").read_text()


def listed(part: str) -> tuple[list[str], list[str]]:
    """Return the families that pass and those that are refused, in a part of docs/families.md."""
    text = PAGE.partition(f"## {part}")[2].partition("\n## ")[0]
    passed, _, refused = text.partition("| refused |")
    rows = re.compile(r"^\| ([\w-]+) \|", re.M)
    return [name for name in rows.findall(passed) if name != "family"], rows.findall(refused)
