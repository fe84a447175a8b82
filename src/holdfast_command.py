"""The command `holdfast`, without torch where possible: importing the library takes seconds.

This module is outside the package because `import holdfast` imports torch. It prints the list of commands and the version,
suggests the closest name for a misspelt command, and imports the library only to run a command.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

COMMANDS = {
    "compare": "train routers under equal conditions, attack them, and write a report",
    "train": "train one model with one router, from a recipe",
    "evaluate": "score a saved model on clean and on attacked data",
    "attack": "attack a saved model with a budget of your choice",
    "audit": "measure how much of a model depends on near-ties",
    "certify": "print radii up to which no perturbation flips a token",
    "geometry": "draw where routing jumps, and how near a model's tokens are to it",
    "mismatch": "measure how far training is from a rollout, and what replay changes",
    "papers": "list the papers' experiments, with their published figures",
    "plan": "count what a model with each router would cost, from its config",
    "report": "render the HTML report of one of these again, from its JSON",
    "routers": "list the routers, and show how each one routes text",
    "run": "run another program with Holdfast imported",
}
# The packages of the extra `lab` that every command needs.
NEEDED = ("accelerate", "jinja2", "plotly", "rich", "tyro", "yaml")


def main(arguments: list[str] | None = None) -> int:
    """Run `holdfast` with these arguments, those of this process by default, and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return _answer(given)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("holdfast: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _answer(arguments: list[str]) -> int:
    """Print the help, the version or an error, or run the command; return the exit code."""
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        print(help_text())
        return 0 if arguments else 2
    if name == "--version":
        print(f"holdfast {_load_module('version').VERSION}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        known = ("--help", "--version") if kind == "option" else COMMANDS
        print(f"holdfast: {_load_module('errors').unknown_name(kind, name, known)}", file=sys.stderr)
        return 2
    message = _load_module("errors").missing_extra_message(f"holdfast {name}", *NEEDED)
    if message is not None:
        print(f"holdfast: {message}", file=sys.stderr)
        return 2
    from holdfast.cli.main import main as run

    return run(arguments)


def help_text() -> str:
    """Return what `holdfast --help` prints."""
    lines = [f"  {name:<10}{about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            f"holdfast {_load_module('version').VERSION}: mixture-of-experts routing that holds.",
            "",
            "usage: holdfast COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "Options of a command: holdfast COMMAND --help. Start with: holdfast compare",
        ]
    )


def _load_module(name: str) -> types.ModuleType:
    """Return a module of the package without importing the package; the module may import only the standard library."""
    package = importlib.util.find_spec("holdfast")
    assert package is not None and package.submodule_search_locations
    spec = importlib.util.spec_from_file_location(name, Path(package.submodule_search_locations[0], f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
