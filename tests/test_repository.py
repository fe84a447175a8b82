"""The files around the package: versions, links and the public CI."""

import re
from pathlib import Path
from typing import Any

import yaml

import holdfast
from holdfast.version import VERSION

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_the_same_everywhere() -> None:
    assert holdfast.__version__ == VERSION
    assert read(ROOT / "CITATION.cff")["version"] == VERSION
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0].rstrip(",") == VERSION


def test_the_public_ci_runs_what_our_own_runs() -> None:
    own = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    workflow = read(GITHUB / "workflows" / "ci.yml")
    quick, weekly = workflow["jobs"]["quick"], workflow["jobs"]["everything"]
    targets = quick["strategy"]["matrix"]["target"]
    assert set(own) == {"lint", "test", "test-all"} and {"lint", "test"} <= set(targets)
    assert [step["run"] for step in quick["steps"] if "run" in step] == ["make ${{ matrix.target }}"]
    assert [step["run"] for step in weekly["steps"] if "run" in step] == [".ci/run"]
    assert "schedule" in workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE) for target in [*targets, *own])


def test_the_public_ci_may_only_read() -> None:
    workflow = read(GITHUB / "workflows" / "ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow[True]
