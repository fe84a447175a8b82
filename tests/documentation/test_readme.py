"""The README: short, its example runs as printed, and it claims only what was measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from readme_model import write_what_the_readme_opens

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return README.split(f"## {heading}\n")[1].split("\n## ")[0]


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return str(block)


@pytest.mark.slow
def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    write_what_the_readme_opens(tmp_path)
    (tmp_path / "example.py").write_text(example())
    line = [sys.executable, "example.py"]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    printed = {name: (float(before), float(after)) for name, before, after in map(str.split, run.stdout.splitlines())}
    assert len(printed) == 4
    before, after = printed["output.noise.0.01.flip"]
    assert 0 < after < before
    before, after = printed["experts_per_token"]
    assert before < after


def test_the_costs_are_in_the_performance_page() -> None:
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\b\d\.\d+\b", section("What it costs"))
    assert len(numbers) >= 8
    assert [number for number in numbers if number not in performance] == []
