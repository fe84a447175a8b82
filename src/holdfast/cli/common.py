"""What commands share: terminal output, checks of the files they write, and options for loading models and plugins.

Output files are checked before any work. An existing file is overwritten only with --force. A command locks each of its
files until it ends, so that a second command of this machine that would write the same file is refused at once. These locks
are in the folder for temporary files: a lock file is never removed, and nothing is left beside the output.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import filelock
from tyro.conf import Positional, UseAppendAction, arg

from holdfast.files import no_such_path
from holdfast.progress import bar, quiet

if TYPE_CHECKING:
    from rich.text import Text

    from holdfast.auditing.reports import AtRisk, Jump, Report
    from holdfast.report.tables import Table
    from holdfast.train import Task
    from holdfast.train.saved_model import AuditData


NO_EDGE = 10_000  # columns of a pipe or a file
LONGEST = 24  # characters of a number: longer words with a digit may be wrapped


class ConditionHolds(Exception):
    """A condition of `audit --fail-if` is true: not a user's mistake, so it has an exit code of its own."""


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def show_messages() -> None:
    """Print Holdfast's messages, and not only its warnings, to stderr."""
    logger = logging.getLogger("holdfast")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())


def plain_text(cell: object) -> Text:
    """Return a cell of a table as printable text without markup, because it may contain anything."""
    from rich.text import Text

    controls = {letter for letter in str(cell) if unicodedata.category(letter) == "Cc" and letter != "\n"}
    return Text(str(cell).translate({ord(letter): repr(letter)[1:-1] for letter in controls}))


def show(table: Table) -> None:
    """Print a table without cutting numbers: on a narrow terminal words are wrapped, then lines exceed its width.

    Lines are not wrapped in a pipe or a file, unless COLUMNS is set.
    """
    from rich import box
    from rich import table as rich_table
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = NO_EDGE
    title, caption = (plain_text(text) if text else None for text in (table.title, table.note))
    frame: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    grid = rich_table.Table(title=title, caption=caption, **frame)
    for place, (name, *cells) in enumerate(zip(table.columns, *table.rows, strict=True)):
        if place == 0:  # it is not wrapped
            width = max(console.measure(plain_text(cell)).maximum for cell in (name, *cells))
        else:  # the longest number, or word of the heading
            words = [word for cell in cells for word in str(cell).split() if any(map(str.isdigit, word))]
            width = min(max(map(len, [*words, *name.split()]), default=0), LONGEST)
        grid.add_column(plain_text(name), no_wrap=place == 0, overflow="fold", min_width=width)
    for row in table.rows:
        grid.add_row(*map(plain_text, row))
    needed = sum(column.min_width or 0 for column in grid.columns) + 2 * len(grid.columns) - 1
    console.width = max(console.width, needed)
    console.print(grid, crop=False)


@contextmanager
def forwards(model: Any, what: str, total: int | None) -> Iterator[None]:
    """Show a bar that advances with every input of the model's forward; without `total` it only shows activity."""
    done = 0

    def count(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal done
        done += next((len(one) for one in (*given, *named.values()) if hasattr(one, "shape")), 0)
        tell(done, what)

    with bar(total, leave=False) as tell:
        handle = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


locked_files = ExitStack()  # of the running command; `main` closes it


def require_free(path: Path | None, force: bool) -> None:
    """Lock the file for this command. Raise ValueError if it exists and `force` is False."""
    if path is None:
        return
    require_place(path)
    if path.exists() and not force:
        raise ValueError(f"{path} exists; choose another place with --out, or overwrite it with --force.")
    user = getattr(os, "getuid", int)()  # another user could not open the lock file
    name = hashlib.sha256(f"{user} {path.resolve()}".encode()).hexdigest()[:16]
    try:
        locked_files.enter_context(filelock.FileLock(Path(tempfile.gettempdir(), f"holdfast-{name}.lock"), timeout=0))
    except filelock.Timeout:
        raise ValueError(f"{path} is being written by another process; wait for it, or choose another place.") from None


def require_place(path: Path) -> None:
    """Raise ValueError unless a file can be written to `path`; do not lock it."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; name the file itself.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write to.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file; name another one.")
    require_folder(path.parent)


def require_folder(folder: Path) -> None:
    """Raise ValueError unless files can be written into `folder`, which need not exist yet."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            try:  # permissions are not enough: root may ignore them, and a file system may be read-only or full
                with tempfile.TemporaryFile(dir=place):
                    return
            except OSError as problem:
                why = problem.strerror or problem
                raise ValueError(f"{place} cannot be written to ({why}); choose another place.") from None
        if place.is_symlink() or place.exists():
            raise ValueError(f"{place} is not a folder to write into.")


def require_report(place: Path) -> None:
    """Raise ValueError unless `place` is a folder or a JSON file."""
    if place.suffix in (".html", ".htm"):
        raise ValueError(f"{place} is a page; name its folder, or the JSON file that it was made from.")
    if not place.exists():
        raise ValueError(no_such_path(place))


def router_names(written: str | None) -> list[str]:
    """Return the names of `--routers`, joined by commas; an empty list if the option is not given."""
    from holdfast.routing.grammar import split_routers

    if written is None:
        return []
    names = split_routers(written)
    if not names:
        raise ValueError(f"--routers is {written!r}; name at least one router.")
    if repeated := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"--routers has {repeated[0]!r} twice; name each router only once.")
    return names


def write_out(path: Path | None, stored: dict[str, Any]) -> None:
    """Write the numbers of a command to its JSON file, if it has one."""
    from holdfast.train.run_folder import write_json

    if path is not None:
        write_json(path, stored)
        print(f"All numbers: {path}")


@dataclass(frozen=True)
class Loading:
    device_map: str | None = None
    """The device of the weights: cuda, cpu, or auto (all devices, then the disk). By default one GPU if there is one."""
    offload: Path | None = None
    """The folder for weights that auto puts on disk."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the weights; by default as saved."""

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for `from_pretrained`."""
        import torch

        where = self.device_map or ("cuda" if torch.cuda.is_available() else None)
        given = {"device_map": where, "dtype": self.dtype, "offload_folder": self.offload and str(self.offload)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class TestData:
    source: str | None = None
    """Use this text or image set instead of the one the model was trained on: a name or a path."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    length: int | None = None
    """Tokens per block of text."""
    class_index: Path | None = None
    """For folders of images that are named by WordNet id, if the model's classes have names: ImageNet's folder of class
    folders, LOC_synset_mapping.txt or imagenet_class_index.json."""

    @property
    def where(self) -> dict[str, Any]:
        return {"source": self.source, "data": self.data, "class_index": self.class_index}

    def load(self, model: str, loading: Loading) -> tuple[Any, Task]:
        """Return the saved model, and the task with the data to evaluate it on."""
        from holdfast.train.saved_model import load_model_and_task

        return load_model_and_task(model, length=self.length, loading=loading.options(), **self.where)


@dataclass(frozen=True)
class PluginFiles:
    plugin: UseAppendAction[tuple[Path, ...]] = ()
    """A Python file that registers routers, datasets, attacks or metrics of yours; the file is executed. You may repeat this
    option."""


@dataclass(frozen=True, kw_only=True)
class TestedModel:
    """Options of the commands that score a saved model on its test data."""

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    out: Path | None = None
    """Write all numbers to this JSON file."""
    force: bool = False
    """Overwrite the files of this command if they exist."""
    test_data: Annotated[TestData, arg(name="")] = field(default_factory=TestData)
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)


@dataclass(frozen=True, kw_only=True)
class MeasuredText:
    """Options of all commands that measure a saved model on a text."""

    source: Annotated[str | None, arg(aliases=["--text"])] = None
    """Use this text or image set instead of the one the model was trained on: a name or a path."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    tokens: int = 4096
    """How many tokens of the text to read, rounded to whole batches."""
    length: int = 128
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per batch."""
    seed: int = 0
    """Seed of all random numbers."""
    force: bool = False
    """Overwrite the files of --out if they exist."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def read_model(self, model: str, **where: Any) -> tuple[Any, AuditData]:
        """Return the saved model, and the data to measure it on; `where` overrides the source of the data."""
        from holdfast.hub.tracing import require_positions
        from holdfast.train.saved_model import AuditData, load_model_and_task

        quiet()
        where = {"source": self.source, "data": self.data, **where}
        loaded, task = load_model_and_task(model, **where, loading=self.loading.options())
        material = AuditData(task, self.tokens)
        if material.tokenizer is not None:
            require_positions(loaded, self.length)
        return loaded, material


@dataclass(frozen=True, kw_only=True)
class MeasuredData(MeasuredText):
    """Options of all commands that measure a saved model on a text or on images."""

    class_index: Path | None = None
    """For folders of images that are named by WordNet id, if the model's classes have names: ImageNet's folder of class
    folders, LOC_synset_mapping.txt or imagenet_class_index.json."""

    def read_model(self, model: str, **where: Any) -> tuple[Any, AuditData]:
        return super().read_model(model, class_index=self.class_index, **where)


def token_row(entry: AtRisk | Jump, layer: int, numbers: Mapping[str, str]) -> dict[str, object]:
    """Return the row of a token, with the experts that change places; texts are as Python writes them: any may occur."""
    text = {"token": repr(entry.text), "in": repr(entry.context), "layer": layer}
    return {**text, **numbers, "from": entry.leaves, "to": entry.enters}


def free_files(folder: Path | None, *names: str, force: bool) -> list[Path]:
    """Return the files to write into the folder of --out, locked for this command; none if there is no folder."""
    files = [] if folder is None else [folder / name for name in names]
    for file in files:
        require_free(file, force)
    return files


def write_report_files(report: Report, files: list[Path], write_page: Callable[..., Path]) -> None:
    """Write a report and its page to the first two files, if there are any. Raise KeyboardInterrupt if it is interrupted."""
    if files:
        print(f"All numbers: {report.save(files[0])}")
        print(f"Report: {write_page(report, files[1], force=True)}")
    if report.status == "interrupted":
        raise KeyboardInterrupt
