"""`holdfast COMMAND`: run the command, and print a user's mistake as a one-line error instead of a traceback."""

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.cli.common import ConditionHolds, MeasuredText, PluginFiles, TestedModel, locked_files, require_report
from holdfast.cli.parsing import parse
from holdfast.cli.run import program_of
from holdfast.errors import one_line
from holdfast.files import recover_folder, require_possible_model
from holdfast.plugins import PLUGIN_ERRORS, failure_in_plugin, load_plugin


def command_class(name: str) -> type[Any]:
    """Return the class of a command: `Compare`, in the module `holdfast.cli.compare`, for `compare`."""
    return getattr(import_module(f"holdfast.cli.{name}"), name.capitalize())


def _check(name: str, command: Any) -> None:
    """Raise ValueError for a wrong seed or a wrong path, before torch is imported."""
    seed, model = getattr(command, "seed", 0), getattr(command, "model", None)
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed is {seed}; give a whole number from 0 to 2^32 - 1.")
    if isinstance(command, TestedModel | MeasuredText) and model is not None and not recover_folder(Path(model)):
        require_possible_model(model)
    if name == "report":
        for place in command.folders:
            require_report(place)


def main(arguments: list[str]) -> int:
    """Run the command in the first argument, and return its exit code."""
    name, *rest = arguments
    try:
        program = program_of(rest) if name == "run" else None  # options after `run` belong to the other program
        command = program or parse(command_class(name), f"holdfast {name}", rest)
        if program is None:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
            logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of each of its own libraries that does not load
        _check(name, command)
        for file in getattr(command, "plugins", PluginFiles()).plugin:
            load_plugin(file)
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
