"""`holdfast COMMAND`: run the command, and print a user's mistake as a one-line error instead of a traceback."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from holdfast.cli.attack import Attack
from holdfast.cli.audit import Audit, ConditionHolds
from holdfast.cli.certify import Certify
from holdfast.cli.common import locked_files, one_line
from holdfast.cli.compare import Compare
from holdfast.cli.evaluate import Evaluate
from holdfast.cli.geometry import Geometry
from holdfast.cli.mismatch import Mismatch
from holdfast.cli.papers import Papers
from holdfast.cli.plan import Plan
from holdfast.cli.report import Report
from holdfast.cli.routers import Routers
from holdfast.cli.run import Run, program_of
from holdfast.cli.train import Train
from holdfast.plugins import PLUGIN_ERRORS, failure_in_plugin

KINDS = (Compare, Train, Evaluate, Attack, Audit, Certify, Geometry, Mismatch, Papers, Plan, Report, Routers, Run)
COMMANDS: dict[str, Callable[..., Any]] = {kind.__name__.lower(): kind for kind in KINDS}


def main(arguments: list[str]) -> int:
    """Run the command in the first argument, one of `COMMANDS`, and return its exit code."""
    program = program_of(arguments) if arguments[0] == "run" else None  # options after `run` belong to the other program
    command = program or tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="holdfast", args=arguments)
    try:
        seed = getattr(command, "seed", 0)
        if not 0 <= seed < 2**32:
            raise ValueError(f"--seed is {seed}; give a whole number from 0 to 2^32 - 1.")
        command.run()
    except BrokenPipeError:
        raise
    except ConditionHolds as condition:
        print(f"holdfast: {condition}", file=sys.stderr)
        return 1
    except PLUGIN_ERRORS as problem:
        failure = failure_in_plugin(problem)
        if failure is None and not isinstance(problem, ValueError | OSError):
            raise
        print(f"holdfast: {one_line(problem if failure is None else failure)}", file=sys.stderr)
        return 2
    finally:
        locked_files.close()
    return 0
