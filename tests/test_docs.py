"""What the documents say works: their Python runs, their commands exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from commands import Command
from ranks import on_ranks
from tiers import quick_or_slow
from torch.distributed.run import get_args_parser

import holdfast

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"  # its example opens a model: tests/documentation/test_readme.py
DISTRIBUTED = ROOT / "docs" / "how-to" / "several-gpus.md"
QUESTIONS = ROOT / "docs" / "vision-language.md"  # reads a trained model: tests/train/test_vision_language_task.py
TUTORIALS = ROOT / "docs" / "tutorials"  # tests/documentation/test_tutorials.py runs their Python
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line for document in DOCUMENTS for block in blocks(document, "sh") for line in block.splitlines()]
    return sorted({line.split("#")[0].strip() for line in lines} - {""})


@pytest.mark.slow
def test_the_python_of_the_documents_runs(tmp_path: Path) -> None:
    """Each example in a process of its own, as a newcomer's script: what it registers stays there."""
    scripts = []
    elsewhere = README, DISTRIBUTED, QUESTIONS
    for document in (path for path in DOCUMENTS if path not in elsewhere and path.parent != TUTORIALS):
        for number, block in enumerate(blocks(document, "python"), start=1):
            scripts.append(tmp_path / f"{document.stem}-{number}.py")
            scripts[-1].write_text(block)
    script = Path(__file__).with_name("fresh_processes.py")
    run = subprocess.run([sys.executable, str(script), *map(str, scripts)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_the_script_for_several_processes_runs_on_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(DISTRIBUTED, "python")
    (tmp_path / "train.py").write_text(block)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.chdir(tmp_path)
    on_ranks(tmp_path / "train.py")
    assert isinstance(holdfast.load(tmp_path / "trained"), transformers.LlamaForCausalLM)


# The plugin is tested in tests/integrations; the process that imports it takes seven seconds.
SLOW = {line for line in commands() if line.startswith("pytest ") or line == "holdfast routers --route"}


@pytest.mark.parametrize("line", quick_or_slow(commands(), set(commands()) - SLOW))
def test_a_command_of_the_documents_works(
    line: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write a folder with the default name
    program, *arguments = shlex.split(line)
    if arguments[0] == "compare" and "--help" not in arguments:  # minutes as it stands there
        arguments += ["--steps", "2", *([] if "--seeds" in arguments else ["--seeds", "1"])]
    if program == "holdfast":
        run = command(*arguments)
        assert run.returncode == 0, run.stderr
        assert run.stdout
        if "--help" in arguments:  # that of this command, not of all
            assert f"usage: holdfast {arguments[0]} " in run.stdout
    elif program == "make":  # that the target exists; running it would set up an environment or run these tests again
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "torchrun":
        assert get_args_parser().parse_args(arguments).training_script == "train.py"
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    elif program == "pytest":  # a plugin of ours, in a checkout of somebody else's
        subprocess.run(
            [sys.executable, "-m", "pytest", *arguments[:-1], "--help"], cwd=tmp_path, check=True, capture_output=True
        )
    else:
        assert line in ("pip install .", "pip install '.[lab]'"), f"{line}: nothing here tests this command"


def test_links_between_documents_lead_somewhere() -> None:
    policies = [ROOT / name for name in ("CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")]
    for document in [*DOCUMENTS, *policies]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} points to {target}"
