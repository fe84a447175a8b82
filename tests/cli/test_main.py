"""The command itself: names it does not know, and readers who have had enough."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from tiers import quick_or_slow
from wording import mentions

import holdfast
import holdfast_command
from holdfast.cli.main import COMMANDS, main


@pytest.mark.parametrize("more", [[], ["--help"]], ids=["alone", "with help"])
def test_an_unknown_command_is_told_the_nearest(more: list[str], command: Command) -> None:
    done = command("rooters", *more)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and mentions(done.stderr, "holdfast: ", "'rooters'", "'routers'")


def test_a_command_that_nothing_is_near_gets_them_all(command: Command) -> None:
    told = command("bogus").stderr
    assert "did you mean" not in told and "attack, audit" in told


def test_the_version_is_said(command: Command) -> None:
    assert command("--version").stdout == f"holdfast {holdfast.__version__}\n"


def test_help_lists_every_command_with_a_line(command: Command) -> None:
    done = command("--help")
    assert done.returncode == 0 and command("-h").stdout == done.stdout
    assert all(f"  {name:<10}{about}" in done.stdout.splitlines() for name, about in holdfast_command.COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and f"holdfast {name} " in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_no_command_at_all_is_a_mistake_that_shows_the_help(command: Command) -> None:
    done = command()
    assert done.returncode == 2 and "usage: holdfast COMMAND" in done.stdout


def test_the_launcher_lists_the_commands_that_there_are() -> None:
    assert list(holdfast_command.COMMANDS) == list(COMMANDS)


def test_an_unknown_option_is_told_the_nearest(command: Command) -> None:
    assert command("--hlep").stderr == "holdfast: unknown option '--hlep': did you mean '--help'?\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["comprae"]], ids=" ".join)
def test_an_answer_without_a_command_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        f"import sys, holdfast_command; code = holdfast_command.main({arguments!r}); "
        "print(*(name for name in ('torch', 'holdfast', 'numpy', 'tyro') if name in sys.modules), 'end', code)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == f"end {2 if arguments == ['comprae'] else 0}"


def test_a_command_without_its_extra_says_which(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = command("routers")
    assert done.returncode == 2 and done.stdout == ""
    assert "holdfast routers needs plotly" in done.stderr and "pip install '.[lab]'" in done.stderr


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


@pytest.mark.slow
def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    """A package that every command imports interrupts the process itself."""
    (tmp_path / "tyro.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    handled = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore it
    code = f"{handled}; import sys, holdfast_command; sys.exit(holdfast_command.main(['routers']))"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (run.returncode, run.stderr.splitlines()[-1:], "Traceback" in run.stderr) == (130, ["holdfast: stopped."], False)


@pytest.mark.parametrize("arguments", [["train", "tiny"], ["audit", "folder"], ["routers"]], ids=" ".join)
def test_a_seed_that_no_generator_takes_is_refused_by_its_name(arguments: list[str], command: Command) -> None:
    done = command(*arguments, f"--seed={2**70}")
    assert (done.returncode, done.stderr) == (2, f"holdfast: --seed is {2**70}; give a whole number from 0 to 2^32 - 1.\n")
