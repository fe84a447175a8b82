"""The command `holdfast`. It prints the list of commands and the version, suggests the closest name for a misspelt command,
and hands the rest to `holdfast.cli`. None of this imports torch; a command does when it runs.

This module is outside the package, so that Ctrl-C while the package is imported is caught here too.
"""

import os
import sys

COMMANDS = {
    "compare": "train routers under equal conditions, attack them, and write a report",
    "search": "find the routers and settings that are best for their FLOPs",
    "train": "train one model with one router, from a recipe",
    "evaluate": "score a saved model on clean and on attacked data",
    "attack": "attack a saved model with a budget of your choice",
    "audit": "measure how much of a model depends on near-ties",
    "certify": "print radii up to which no perturbation flips a token",
    "geometry": "draw where routing jumps, and how near a model's tokens are to it",
    "mismatch": "measure how far training is from a rollout, and what replay changes",
    "papers": "list the papers' experiments, with their published figures",
    "plan": "count what a model with each router would cost, from its config",
    "recipes": "list the recipes to train, and print their keys",
    "report": "render HTML reports again, put several on one page, or save their numbers",
    "board": "merge ledgers of results into a leaderboard",
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
    from holdfast.errors import missing_extra_message, unknown_name
    from holdfast.version import VERSION

    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        print(help_text())
        return 0 if arguments else 2
    if name == "--version":
        print(f"holdfast {VERSION}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        known = ("--help", "--version") if kind == "option" else COMMANDS
        print(f"holdfast: {unknown_name(kind, name, known)}", file=sys.stderr)
        return 2
    message = missing_extra_message(f"holdfast {name}", *NEEDED)
    if message is not None:
        print(f"holdfast: {message}", file=sys.stderr)
        return 2
    from holdfast.cli.main import main as run

    return run(arguments)


def help_text() -> str:
    """Return what `holdfast --help` prints."""
    from holdfast.version import VERSION

    commands = "\n".join(f"  {name:<10}{about}" for name, about in COMMANDS.items())
    return (
        f"holdfast {VERSION}: mixture-of-experts routing that holds.\n\nusage: holdfast COMMAND [OPTIONS]\n\n{commands}\n\n"
        "Options of a command: holdfast COMMAND --help. Start with: holdfast compare"
    )


if __name__ == "__main__":
    sys.exit(main())
