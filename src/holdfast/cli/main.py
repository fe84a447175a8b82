"""`holdfast COMMAND`: finds the command, and turns a user's mistake into one sentence instead of a traceback."""

import os
import sys
from collections.abc import Callable

from holdfast.cli.attack import Attack
from holdfast.cli.audit import Audit, ConditionHolds
from holdfast.cli.certify import Certify
from holdfast.cli.compare import Compare
from holdfast.cli.evaluate import Evaluate
from holdfast.cli.files import release_files
from holdfast.cli.plan import Plan
from holdfast.cli.report import Report
from holdfast.cli.routers import Routers
from holdfast.cli.run import Run, given
from holdfast.cli.terminal import one_line
from holdfast.cli.train import Train
from holdfast.suggest import unknown
from holdfast.version import VERSION

Command = Attack | Audit | Certify | Compare | Evaluate | Plan | Report | Routers | Run | Train

COMMANDS: dict[str, Callable[..., Command]] = {
    "compare": Compare,
    "train": Train,
    "evaluate": Evaluate,
    "attack": Attack,
    "audit": Audit,
    "certify": Certify,
    "plan": Plan,
    "report": Report,
    "routers": Routers,
    "run": Run,
}


def main(arguments: list[str] | None = None) -> int:
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: list[str]) -> int:
    import tyro

    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        print(f"holdfast: {unknown('command', arguments[0], COMMANDS)}", file=sys.stderr)
        return 2
    if arguments == ["--version"]:
        print(f"holdfast {VERSION}")
        return 0
    program = given(arguments) if arguments[:1] == ["run"] else None  # its options are not ours
    command = program or tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="holdfast",
        description=f"Mixture-of-experts routing that holds, version {VERSION}. Start with: holdfast compare",
        args=arguments,
    )
    try:
        command.run()
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as mistake:
        print(f"holdfast: {one_line(mistake)}", file=sys.stderr)
        return 2
    except ConditionHolds as condition:
        print(f"holdfast: {condition}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("holdfast: stopped.", file=sys.stderr)
        return 130
    finally:
        release_files()
    return 0


if __name__ == "__main__":
    sys.exit(main())
