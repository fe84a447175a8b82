"""What commands show on a terminal: signs of life while they work, and tables.

Files that commands write: checked before any work, and never over a file that is there already unless forced.

A command locks each file before its work and until it ends: a second one that is to write the same file is refused at once.

Where a model's weights go, for the commands that load one.

Plugin files, for the commands that build routers or load a model that has some.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import UseAppendAction

from holdfast.locking import Lock, locked

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


_stack, _locks = ExitStack(), list[Lock]()  # of the command that runs; `main` calls `release_files`


def require_free(path: Path | None, force: bool) -> None:
    """Lock the file for this command. A file that is there already is overwritten only on request."""
    if path is None:
        return
    require_place(path)
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another place with --out, or overwrite it with --force.")
    _locks.append(_stack.enter_context(locked(path.parent, path.name, wait=False)))


def check_files() -> None:
    """Raise an error where another process has taken a file over; called before files are written."""
    for lock in _locks:
        lock.check()


def release_files() -> None:
    _locks.clear()
    _stack.close()


def require_place(path: Path) -> None:
    """Raise unless `path` is a place for a file that can be written; do not lock it."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; name the file itself.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write to.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no ordinary file; name another one to write to.")
    require_folder(path.parent)


def require_folder(folder: Path) -> None:
    """Raise unless files can be written into `folder`, which is made later if it is not there."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            try:  # permissions do not tell: root may ignore them, and a file system may be read-only or full
                with tempfile.TemporaryFile(dir=place):
                    return
            except OSError as problem:
                why = problem.strerror or problem
                raise ValueError(f"{place} cannot be written to ({why}); choose another place with --out.") from None
        if place.is_symlink() or place.exists():
            raise ValueError(f"{place} is not a folder to write into.")


def write_out(path: Path | None, stored: dict[str, Any]) -> None:
    from holdfast.train.run_folder import write_json

    if path is not None:
        check_files()
        write_json(path, stored)
        print(f"All figures: {path}")


@dataclass(frozen=True)
class Loading:
    device_map: str | None = None
    """Where the weights go, for example cuda, cpu, or auto: over all that is there, the rest on disk. By default one GPU, if
    there is one."""
    offload: Path | None = None
    """A folder for what auto puts on disk."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; by default that of the folder."""

    def options(self) -> dict[str, Any]:
        """As `from_pretrained` takes them."""
        import torch

        where = self.device_map or ("cuda" if torch.cuda.is_available() else None)
        given = {
            "device_map": where,
            "dtype": self.dtype,
            "offload_folder": None if self.offload is None else str(self.offload),
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class PluginFiles:
    plugin: UseAppendAction[tuple[Path, ...]] = ()
    """A Python file that registers routers of your own; it is run. The option may be given several times."""

    def load(self) -> None:
        from holdfast.routing.plugins import load_plugin

        for path in self.plugin:
            load_plugin(path)
