"""The command itself: names it does not know, and readers who have had enough."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from tiers import quick_or_slow
from wording import mentions

import holdfast
from holdfast_command import COMMANDS


def test_the_version_is_said(command: Command) -> None:
    assert command("--version").stdout == f"holdfast {holdfast.__version__}\n"


def test_help_lists_every_command_with_a_line(command: Command) -> None:
    done = command("--help")
    assert done.returncode == 0 and command("-h").stdout == done.stdout
    assert all(f"  {name:<10}{about}" in done.stdout.splitlines() for name, about in COMMANDS.items())


@pytest.mark.every_combination
@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_and_names_arguments_but_no_python_values(name: str, command: Command) -> None:
    shown = command.printed(name, "--help", columns=80)
    about, _, usage = shown.partition("usage:")
    assert f"  holdfast {name}" in shown and usage.startswith(f" holdfast {name} ")
    assert "None" not in usage and "(default: )" not in usage and "default: False" not in usage
    line = usage.splitlines()[0]
    assert not {"STR", "PATH", "[STR]", "[PATH]"} & {*re.sub(r"\[--[^]]*\]", "", line).split()}, line
    assert max(map(len, [*usage.splitlines(), *about.partition("Examples:")[0].splitlines()])) <= 80


# Line by line: the command, and what it says; nothing imports torch.
WRONG = {
    "rooters": "unknown command 'rooters': did you mean 'routers'?",
    "bogus": "unknown command 'bogus': expected one of attack, audit, ",
    "--hlep": "unknown option '--hlep': did you mean '--help'?",
    "compare --router smoe": "unknown option '--router': did you mean '--routers'?",
    "compare --xyzzy": "unknown option '--xyzzy'; holdfast compare --help lists the options.",
    "evaluate model --attak words": "unknown option '--attak'; holdfast evaluate --help lists the options.",
    "compare -x": "unknown option '-x'; holdfast compare --help lists the options.",
    "compare --seeds two": "--seeds is 'two'; expected a whole number.",
    "compare --seeds 1 --seeds=1.5 --jobs 2": "--seeds is '1.5'; expected a whole number.",
    "compare --seeds": "--seeds needs a whole number after it.",
    "compare --take_over=yes": "--take_over takes no value; write --take_over or --no-take-over.",
    "compare smoe": "unexpected argument 'smoe'; holdfast compare --help shows what the command takes.",
    "audit model --dtype fp32": "unknown --dtype 'fp32': did you mean 'float32'?",
    "audit model --dtype double": "unknown --dtype 'double': expected one of bfloat16, float16, float32.",
    "audit model --noise 0.1 much": "--noise is '0.1 much'; expected numbers.",
    "audit model --txt own.txt": "unknown option '--txt': did you mean '--text'?",
    "audit --compare one.json": "--compare is 'one.json'; expected two paths.",
    "audit --model model": "unknown option '--model': MODEL is written without the name of an option.",
    "attack model --atack words": "unknown option '--atack': ATTACK is written without the name of an option.",
    "attack model words --seed": "--seed needs a whole number after it.",
    "attack model": "attack needs ATTACK: the attack to run: ",
    "mismatch model --clip 1": "--clip needs two numbers after it.",
    "plan llama --dtype float32": "unknown --dtype 'float32': did you mean 'fp32'?",
    "run": "run needs PROGRAM: a command, or a Python file.",
    "report geometry.html": "geometry.html is a page; name its folder, or the JSON file that it was made from.",
    "report nowhere": "there is no folder or file nowhere.",
    "evaluate cells/smoe-sed0": "there is no folder or file cells/smoe-sed0: did you mean cells/smoe-seed0?",
    "certify some/owner/model": "there is no folder or file some/owner/model.",
    "geometry own.json": "own.json is a file; name the folder of a model.",
}


@pytest.fixture
def wrong_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beside the paths of `WRONG`."""
    (tmp_path / "cells" / "smoe-seed0").mkdir(parents=True)
    (tmp_path / "own.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.every_combination
@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_option_or_path_is_one_sentence(line: str, command: Command, wrong_places: None) -> None:
    done = command(*line.split())
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"holdfast: {WRONG[line]}") and done.stderr.count("\n") == 1


def test_help_and_wrong_options_do_not_import_torch(wrong_places: None) -> None:
    """All of them in one process, which takes a second; each alone takes as long as its imports."""
    lines = [["--help"], ["--version"], ["comprae"], *([name, "--help"] for name in COMMANDS), *map(str.split, WRONG)]
    code = f"""
import sys
from holdfast_command import main
for line in {lines!r}:
    try:
        main(line)
    except SystemExit:
        pass
    assert not {{"torch", "transformers", "numpy", "datasets"}} & {{*sys.modules}}, line
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.count("\n")) == (0, 1 + len(WRONG)), run.stderr


def test_no_command_at_all_is_a_mistake_that_shows_the_help(command: Command) -> None:
    done = command()
    assert done.returncode == 2 and "usage: holdfast COMMAND" in done.stdout


def test_a_command_without_its_extra_says_which(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert mentions(command.refused("routers"), "holdfast routers needs plotly", "pip install '.[lab]'")


@pytest.mark.parametrize(  # tables are rich's, which has its own code
    ("argument", "code"), quick_or_slow([("--help", 141), ("routers", 1)], [("--help", 141)])
)
def test_a_closed_pipe_is_no_traceback(argument: str, code: int) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "holdfast", argument], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()  # as `head` does
    said = run.stderr.read()
    run.stderr.close()
    assert run.wait() == code and said == ""


LAUNCHERS = [["-m", "holdfast"], ["-c", "import sys, holdfast_command; sys.exit(holdfast_command.main())"]]


@pytest.mark.every_combination
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda words: words[0])
def test_ctrl_c_during_the_imports_is_no_traceback(launcher: list[str], tmp_path: Path) -> None:
    """A torch that interrupts the process when it is imported."""
    handled = "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
    (tmp_path / "torch.py").write_text(f"{handled}os.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    line, environment = [sys.executable, *launcher, "routers"], {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stderr) == (130, "holdfast: stopped.\n")


@pytest.mark.parametrize("arguments", [["train", "tiny"], ["audit", "folder"], ["routers"]], ids=" ".join)
def test_a_seed_that_no_generator_takes_is_refused_by_its_name(arguments: list[str], command: Command) -> None:
    done = command(*arguments, f"--seed={2**70}")
    assert (done.returncode, done.stderr) == (2, f"holdfast: --seed is {2**70}; give a whole number from 0 to 2^32 - 1.\n")
