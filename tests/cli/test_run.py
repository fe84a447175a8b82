"""`holdfast run`: programs that do not import Holdfast open what it saved, and are otherwise as they were."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny

import holdfast
from holdfast.hub.specs import FORMAT

OPENS = """
import sys
assert "holdfast" not in sys.modules
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sys.argv[0], sys.argv[2:], __name__, model.config.holdfast["format"])
"""
ECHO = "import sys; print(sys.argv[1:], 'holdfast' in sys.modules, 'torch' in sys.modules); sys.exit(3)"


def started(*arguments: object, **settings: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "holdfast", "run", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, **settings})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return holdfast.save(holdfast.reroute(tiny("mixtral"), "smoe"), tmp_path_factory.mktemp("run") / "out")


@pytest.mark.slow
def test_a_file_opens_a_saved_folder_and_gets_its_own_arguments(saved: Path, tmp_path: Path) -> None:
    script = tmp_path / "opens.py"
    script.write_text(OPENS)
    done = started("--", script, saved, "--model", "hf", "--", "--help")
    assert done.stdout == f"{script} ['--model', 'hf', '--', '--help'] __main__ {FORMAT}\n", done.stderr
    assert done.returncode == 0
    alone = subprocess.run([sys.executable, script, saved], capture_output=True, text=True)
    assert alone.returncode == 1 and "holdfast" in alone.stderr  # the folder is refused without


@pytest.mark.slow
def test_processes_that_the_program_starts_open_it_too(saved: Path, tmp_path: Path) -> None:
    """As `accelerate launch`, and so `trl`, does."""
    (tmp_path / "opens.py").write_text(OPENS)
    program = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    done = started("--", "python", "-c", program, tmp_path / "opens.py", saved)
    assert done.stdout.endswith(f"__main__ {FORMAT}\n") and done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_program_that_uses_no_transformers_imports_nothing_and_keeps_its_exit_code() -> None:
    done = started("python", "-c", ECHO, "--flag", "run")
    assert done.stdout == "['--flag', 'run'] False False\n" and done.returncode == 3


@pytest.mark.slow
def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = started("--", "python", "-m", "some_module", "5", PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    assert done.stdout == "__main__ ['5']\n", done.stderr


@pytest.mark.slow
def test_the_machines_own_sitecustomize_is_still_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("HERE = 'mine'")
    program = "import sitecustomize; print(sitecustomize.HERE)"
    done = started("--", "python", "-c", program, PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    assert done.stdout == "mine\n", done.stderr


@pytest.mark.slow
def test_a_program_opens_a_folder_with_the_router_of_a_plugin(tmp_path: Path) -> None:
    """The router is registered in another process, so that this one does not know its name."""
    shutil.copy(Path(__file__).parent.parent / "outside_router.py", tmp_path / "outside.py")
    make = "import sys, holdfast, transformers; holdfast.load_plugin(sys.argv[1])\n"
    make += "config = transformers.MixtralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64)\n"
    make += "holdfast.save(holdfast.reroute(transformers.MixtralForCausalLM(config), 'distance'), sys.argv[2])"
    subprocess.run([sys.executable, "-c", make, tmp_path / "outside.py", tmp_path / "out"], check=True, capture_output=True)
    (tmp_path / "opens.py").write_text(OPENS)
    done = started("--plugin", tmp_path / "outside.py", "--", tmp_path / "opens.py", tmp_path / "out")
    assert done.stdout.endswith(f"__main__ {FORMAT}\n") and done.returncode == 0, done.stderr
