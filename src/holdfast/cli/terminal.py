"""What commands show on a terminal: signs of life while they work, and tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

LONGEST_MESSAGE = 2000  # characters
NO_EDGE = 10_000  # columns
LONGEST = 24  # characters of a number: longer words that hold a digit may fold

Tell = Callable[[float, str], None]  # how much is done, and what is being done


def one_line(problem: Exception) -> str:
    """Return the message of an error for a terminal: it may quote any file, with line ends and control characters."""
    text = " ".join(str(problem).split())
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return shown if len(shown) <= LONGEST_MESSAGE else f"{shown[:LONGEST_MESSAGE]} ..."


@contextmanager
def bar(total: float | None, *, leave: bool = True) -> Iterator[Tell]:
    """A progress bar with the time that is left, as long as it is known how much there is to do."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=not leave), transient=not leave) as bars:
        task = bars.add_task("", total=total)
        yield lambda done, what: bars.update(task, completed=done, description=what)


def slim_table(title: str, *columns: str, caption: str | None = None) -> Table:
    """Many narrow columns: no frame, one space between them."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=place == 0)
    return table


def screen() -> Console:
    """Where results are printed. A pipe and a file have no edge, unless COLUMNS gives them one."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = NO_EDGE
    return console


def show(table: Table) -> None:
    """A table with all its numbers: in little room words fold, and lines run over the edge before a number is cut."""
    console = screen()
    for column in table.columns:
        column.overflow = "fold"
        column.min_width = max(column.min_width or 0, _needed(console, column))
    frame = table.padding[1] + table.padding[3] + 1  # around a cell
    console.width = max(console.width, 1 + sum(column.min_width + frame for column in table.columns if column.min_width))
    console.print(table, crop=False)


def _needed(console: Console, column: Column) -> int:
    """The longest number of a column; of one that is not to be wrapped, its longest cell."""
    cells = list(column.cells)
    if column.no_wrap:
        return max((console.measure(cell).maximum for cell in cells), default=0)
    words = (word for cell in cells for word in str(cell).split() if any(map(str.isdigit, word)))
    return min(max(map(len, words), default=0), LONGEST)


@contextmanager
def forwards(model: Any, what: str, total: int | None) -> Iterator[None]:
    """A bar that moves on with every input that the model is given; it only shows life where nobody knows the `total`."""
    done = 0

    def count(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal done
        done += next((len(one) for one in (*given, *named.values()) if hasattr(one, "shape")), 0)
        tell(done, what)

    with bar(total, leave=False) as tell:
        tell(0, what)
        handle = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
