"""`holdfast COMMAND`: finds the command, and turns a user's mistake into one sentence instead of a traceback."""

import sys
from collections.abc import Callable

from holdfast.cli.attack import Attack
from holdfast.cli.audit import Audit, ConditionHolds
from holdfast.cli.certify import Certify
from holdfast.cli.compare import Compare
from holdfast.cli.evaluate import Evaluate
from holdfast.cli.plan import Plan
from holdfast.cli.report import Report
from holdfast.cli.routers import Routers
from holdfast.cli.train import Train

Command = Attack | Audit | Certify | Compare | Evaluate | Plan | Report | Routers | Train

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
}


def main(arguments: list[str] | None = None) -> int:
    import tyro

    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="holdfast",
        description="Mixture-of-experts routing that holds. Start with: holdfast compare",
        args=arguments,
    )
    try:
        command.run()
    except (ValueError, OSError) as mistake:
        print(f"holdfast: {mistake}", file=sys.stderr)
        return 2
    except ConditionHolds as condition:
        print(f"holdfast: {condition}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("holdfast: stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
