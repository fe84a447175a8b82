"""What commands show while they work: signs of life on the terminal, and nothing of what libraries would say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

Tell = Callable[[float, str], None]  # how much is done, and what is being done


@contextmanager
def bar(total: float | None, *, leave: bool = True) -> Iterator[Tell]:
    """A progress bar with the time that is left, as long as it is known how much there is to do."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=not leave), transient=not leave) as bars:
        task = bars.add_task("", total=total)
        yield lambda done, what: bars.update(task, completed=done, description=what)


def working(what: str) -> Status:
    """Where nobody knows how much there is to do."""
    from rich.console import Console

    return Console(stderr=True).status(what)
