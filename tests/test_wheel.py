"""A release: the archive and the wheel of this source, and the wheel in an empty virtual environment."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from readme_model import write_what_the_readme_opens

from holdfast.version import VERSION

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

# Blocks the packages of the extra `lab`, so that an import of one of them fails as where they are not installed.
# transformers itself needs yaml and rich for its own work, and torch needs jinja2: these stay.
WITHOUT_LAB = """
import sys
import torch
LAB = ("PIL", "accelerate", "datasets", "jinja2", "plotly", "rich", "sklearn", "scipy", "tyro", "yaml")
OWN = {"PIL", "accelerate", "datasets", "plotly", "sklearn", "scipy", "tyro"}
for name in OWN:
    sys.modules[name] = None
before = set(sys.modules)
import holdfast
print("imported", *(name for name in sorted(set(sys.modules) - before) if name in LAB))
print("from", holdfast.__file__)
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = holdfast.sparsify(LlamaForCausalLM(config), experts=4, k=2, router="similarity[tau=2]")
holdfast.reroute(model, "smooth[budget=0.5]")
batches = [{"input_ids": torch.randint(50, (2, 8))}]
with holdfast.trace(model) as routes:
    model(**batches[0])
holdfast.save(model, "saved")
model = holdfast.load("saved")
report = holdfast.audit(model, batches)
found = holdfast.certify(model, batches)
plan = holdfast.plan("llama", ["smoe", "smooth"], experts=4)
print("worked", len(routes), report.status, found.status, len(plan.columns))
try:
    holdfast.compare("smoe")
except ImportError as missing:
    print("missing", missing)
"""


@dataclass(frozen=True)
class Release:
    """What `make dist` makes, and an empty virtual environment with the wheel in it."""

    archive: Path
    wheel: Path
    environment: Path

    @property
    def packages(self) -> Path:
        (folder,) = self.environment.glob("lib/python*/site-packages")
        return folder

    def run(self, folder: Path, program: str, *arguments: str) -> str:
        """Run a program of the environment in `folder`, and return what it printed."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        line = [str(self.environment / "bin" / program), *arguments]
        done = subprocess.run(line, cwd=folder, env={**variables, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def metadata(self, name: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(f"holdfast-{VERSION}.dist-info/{name}").decode()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Build the archive, the wheel from the archive, and install the wheel where nothing else is installed.

    The packages that Holdfast needs are those of the tests. A path in a .pth file brings them: .pth files in that path, such
    as that of an editable install of Holdfast, are not read.
    """
    place = tmp_path_factory.mktemp("release")
    source, made, environment = place / "source", place / "made", place / "environment"
    source.mkdir()
    for file in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(file, source)
    for folder in ("src", "tests", "docs"):  # of which only the first belongs into a release
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(source)]
    subprocess.run(line, check=True, capture_output=True)
    (archive,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    release = Release(archive, wheel, environment)
    (release.packages / "packages_of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    return release


@pytest.mark.slow
def test_the_release_passes_the_check_before_an_upload(release: Release) -> None:
    line = [sys.executable, "-m", "twine", "check", "--strict", str(release.archive), str(release.wheel)]
    checked = subprocess.run(line, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout + checked.stderr


@pytest.mark.slow
def test_the_metadata_names_the_version_the_command_and_few_requirements(release: Release) -> None:
    assert release.wheel.name == f"holdfast-{VERSION}-py3-none-any.whl"
    assert release.archive.name == f"holdfast-{VERSION}.tar.gz"
    assert "holdfast = holdfast_command:main" in release.metadata("entry_points.txt")
    required = [line for line in release.metadata("METADATA").splitlines() if line.startswith("Requires-Dist: ")]
    needed = {line.split()[1].split(">")[0] for line in required if "extra ==" not in line}
    assert needed == {"filelock", "numpy", "safetensors", "torch", "transformers"}


@pytest.mark.slow
def test_the_archive_holds_no_tests_and_what_explains_the_release(release: Release) -> None:
    with tarfile.open(release.archive) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "src/holdfast/py.typed"} <= names
    assert {name.partition("/")[0] for name in names if "/" in name} == {"src"}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_source_and_nothing_else(release: Release) -> None:
    described = f"holdfast-{VERSION}.dist-info"
    with zipfile.ZipFile(release.wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith(f"{described}/")}
    source = [SOURCE / "holdfast_command.py", *(SOURCE / "holdfast").rglob("*")]
    assert packed == {
        path.relative_to(SOURCE).as_posix() for path in source if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"holdfast/py.typed", "holdfast/train/recipes/tiny.yaml", "holdfast/report/page/report.html"} <= packed


@pytest.mark.slow
def test_the_library_works_from_the_wheel_without_the_extra(release: Release, tmp_path: Path) -> None:
    said = dict(line.partition(" ")[::2] for line in release.run(tmp_path, "python", "-c", WITHOUT_LAB).splitlines())
    assert said["imported"] == ""
    assert said["from"] == str(release.packages / "holdfast" / "__init__.py")
    assert said["worked"] == "1 complete complete 2"
    assert "holdfast.compare needs accelerate and plotly" in said["missing"]
    assert "pip install '.[lab]'" in said["missing"]


@pytest.mark.slow
def test_the_first_example_of_the_readme_runs_from_the_wheel(release: Release, tmp_path: Path) -> None:
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert "holdfast.audit" in first and "holdfast.reroute" in first
    (tmp_path / "first.py").write_text(first)
    write_what_the_readme_opens(tmp_path)
    printed = dict(line.split(maxsplit=1) for line in release.run(tmp_path, "python", "first.py").splitlines())
    before, after = map(float, printed["output.noise.0.01.flip"].split())
    assert 0 < after < before


@pytest.mark.slow
def test_commands_pages_and_recipes_work_from_the_wheel(release: Release, tmp_path: Path) -> None:
    assert release.run(tmp_path, "holdfast", "--version").startswith(f"holdfast {VERSION}")
    assert "compare" in release.run(tmp_path, "holdfast", "--help")
    assert "smooth" in release.run(tmp_path, "python", "-m", "holdfast", "routers")
    steps = ["--set", "training.steps=2", "--seeds", "1", "--routers", "smoe", "--out", "compared"]
    assert "Report: compared/report.html" in release.run(tmp_path, "holdfast", "compare", *steps)
    assert "</html>" in (tmp_path / "compared" / "report.html").read_text()
    (tmp_path / "own.py").write_text("import sys, transformers; print('holdfast' in sys.modules)\n")
    assert release.run(tmp_path, "holdfast", "run", "own.py") == "True\n"
