"""The files around the package: citation, policies, templates and the public CI say what is true."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast
from holdfast.version import VERSION

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"

# Everything that belongs into the top folder of the repository. What commands write there does not.
TOP = {
    ".ci",
    ".github",
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "constraints.txt",
    "docs",
    "examples",
    "mkdocs.yml",
    "pyproject.toml",
    "src",
    "tests",
}

# The required fields of the Citation File Format 1.2.0, and the optional ones that are in use, with their types.
REQUIRED = {"cff-version": str, "message": str, "title": str, "authors": list}
OPTIONAL = {"abstract": str, "keywords": list, "license": str, "type": str, "version": str}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_top_folder_holds_nothing_that_a_command_wrote() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a git repository")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {path.partition("/")[0] for path in listed} <= TOP


def test_the_version_is_the_same_everywhere() -> None:
    assert holdfast.__version__ == VERSION
    assert read(ROOT / "CITATION.cff")["version"] == VERSION
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0].rstrip(",") == VERSION


def test_the_citation_file_follows_its_format() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert REQUIRED.keys() <= citation.keys() <= REQUIRED.keys() | OPTIONAL.keys()
    for field, kind in {**REQUIRED, **OPTIONAL}.items():
        assert field not in citation or (isinstance(citation[field], kind) and citation[field]), field
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    for author in citation["authors"]:  # an entity has a name, a person a family name or given names
        assert author.keys() <= {"name"} or author.keys() <= {"family-names", "given-names", "orcid"}
    assert len(set(citation["keywords"])) == len(citation["keywords"])
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_the_policies_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), f"{name} points to {target}"


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_a_policy_says_how_to_report_and_fits_a_page(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "rivate report" in text and len(text.splitlines()) <= 60


@pytest.mark.parametrize("form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda form: form.stem)
def test_an_issue_form_has_what_github_requires(form: Path) -> None:
    content = read(form)
    assert content.keys() == {"name", "description", "body"}
    questions = [part for part in content["body"] if part["type"] != "markdown"]
    assert questions and len({part["id"] for part in questions}) == len(questions)
    for part in questions:
        assert part["type"] in ("input", "textarea") and part["attributes"]["label"]
    assert any(part.get("validations", {}).get("required") for part in questions)


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
