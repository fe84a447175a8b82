"""`holdfast COMMAND`: finds the command, and turns a user's mistake into one sentence instead of a traceback."""

import sys
from collections.abc import Callable

from holdfast.cli.compare import Compare
from holdfast.cli.report import Report
from holdfast.cli.routers import Routers

COMMANDS: dict[str, Callable[..., Compare | Report | Routers]] = {"compare": Compare, "report": Report, "routers": Routers}


def main(arguments: list[str] | None = None) -> int:
    import tyro

    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="holdfast",
        description="Mixture-of-experts routing that holds. Start with: holdfast routers --route",
        args=arguments,
    )
    try:
        command.run()
    except (ValueError, OSError) as mistake:
        print(f"holdfast: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("holdfast: stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
