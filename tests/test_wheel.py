"""The wheel: built from this source, unpacked into an empty folder, imported and run from there."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

# Blocks the packages of the extra `lab`, so that an import of one of them fails as where they are not installed.
# transformers itself needs yaml, pydantic and rich for its own work, and torch needs jinja2: these stay.
WITHOUT_LAB = """
import sys
import torch
LAB = ("PIL", "accelerate", "datasets", "jinja2", "plotly", "pydantic", "rich", "sklearn", "scipy", "tyro", "yaml")
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with nothing but what the wheel brings."""
    place = tmp_path_factory.mktemp("wheel")
    copy = place / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(SOURCE, copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(place), str(copy)], check=True, capture_output=True)
    (wheel,) = place.glob("holdfast-*.whl")
    target = place / "installed"
    line = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(line, check=True, capture_output=True)
    assert "holdfast = holdfast_command:main" in _metadata(wheel, "entry_points.txt")
    required = [line for line in _metadata(wheel, "METADATA").splitlines() if line.startswith("Requires-Dist: ")]
    needed = {line.split()[1].split(">")[0] for line in required if "extra ==" not in line}
    assert needed == {"numpy", "safetensors", "torch", "transformers"}
    return target


def _metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def run(installed: Path, folder: Path, *arguments: str) -> str:
    """Run this Python with the installed wheel before everything else, and the packages of the tests behind it."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, *arguments]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_source(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        return {
            str(path.relative_to(root))
            for top in ("holdfast", "holdfast_command.py")
            for path in [root / top, *(root / top).rglob("*")]
            if path.is_file() and "__pycache__" not in path.parts
        }

    assert files(installed) == files(SOURCE)


@pytest.mark.slow
def test_the_library_works_from_the_wheel_without_the_extra(installed: Path, tmp_path: Path) -> None:
    said = dict(line.partition(" ")[::2] for line in run(installed, tmp_path, "-c", WITHOUT_LAB).splitlines())
    assert said["imported"] == ""
    assert said["from"] == str(installed / "holdfast" / "__init__.py")
    assert said["worked"] == "1 complete complete 2"
    assert "holdfast.compare needs accelerate and plotly" in said["missing"]
    assert "pip install 'holdfast[lab]'" in said["missing"]


@pytest.mark.slow
def test_commands_pages_and_recipes_work_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "compare" in run(installed, tmp_path, "-m", "holdfast_command", "--help")
    assert "smooth" in run(installed, tmp_path, "-m", "holdfast", "routers")
    steps = ["--set", "training.steps=2", "--seeds", "1", "--routers", "smoe", "--out", "compared"]
    assert "Report: compared/report.html" in run(installed, tmp_path, "-m", "holdfast", "compare", *steps)
    assert "</html>" in (tmp_path / "compared" / "report.html").read_text()
    (tmp_path / "own.py").write_text("import sys, transformers; print('holdfast' in sys.modules)\n")
    assert run(installed, tmp_path, "-m", "holdfast", "run", "own.py") == "True\n"
