"""Registries of names, and code from outside the package that registers more: the user's Python files, installed packages.

A plugin registers routers (`holdfast.register`), datasets, attacks and metrics (`register_dataset`, `register_attack`,
`register_metric`). What the package ships is in the same registries.

A plugin file is code that Holdfast runs. Only the user can name one, on the command line or with `load_plugin`; a checkpoint
or a recipe cannot. What is trained with a plugin stores its checksum, so that a later command can name the missing file.

A package that registers something on import declares an entry point of the group `holdfast.plugins`:

    [project.entry-points."holdfast.plugins"]
    mine = "my_package.for_holdfast"
"""

import hashlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from holdfast.errors import unknown_name
from holdfast.files import read_bytes

say = logging.getLogger("holdfast")
GROUP = "holdfast.plugins"
SHOWN = 12  # characters of a checksum in messages and module names
# Code of a plugin may raise anything, and must not end a command as if it had worked.
PLUGIN_ERRORS = (Exception, SystemExit)


class Named(Protocol):
    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)


class Registry(Generic[Entry]):
    """Entries by name.

    A name that is registered twice raises an error. A misspelt name raises an error that suggests the closest match.

    kind   what an entry is, in errors: "dataset". Its plural is the key of a plugin's names in stored files
    """

    is_searched: ClassVar[bool] = False  # whether installed packages have been imported, which may register more

    def __init__(self, kind: str) -> None:
        self.kind, self.plural = kind, f"{kind}s"
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        self._search()
        return iter(list(self._entries.values()))

    def names(self) -> list[str]:
        """Return the names registered so far, without those of installed packages that nothing has asked for yet."""
        return list(self._entries)

    def add(self, entry: Entry) -> Entry:
        if entry.name in self._entries:
            raise ValueError(f"there is already {self._a} named {entry.name!r}; choose another name.")
        self._entries[entry.name] = entry
        return entry

    def register(self, entry: Entry) -> None:
        """Add an entry from outside the package; what the package ships is added with `add`."""
        self.add(entry)
        _registered.append((self, entry.name))

    def remove(self, name: str) -> None:
        del self._entries[self[name].name]

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            self._search()
        if name not in self._entries:
            raise ValueError(self.unknown(name, self._entries))
        return self._entries[name]

    def unknown(self, name: object, known: Iterable[str]) -> str:
        """Return the error for a name that is not in `known`."""
        return (
            f"{unknown_name(self.kind, name, known)} {self._a.capitalize()} of your own is loaded with --plugin FILE, by "
            'holdfast.load_plugin("FILE"), or by importing the module that registers it.'
        )

    def _search(self) -> None:
        """Import installed plugins, which may register more; not if this is no registry of the library."""
        if _registries.get(self.plural) is self:
            _load_installed()

    @property
    def _a(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"


def check_name(name: object, kind: str) -> None:
    """Raise ValueError unless `name` can be written on a command line and in a file name as it is."""
    if not isinstance(name, str) or not name or not all(letter.isalnum() or letter in "-_" for letter in name):
        raise ValueError(f"{name!r} cannot be the name of {kind}: use letters, digits, hyphens and underscores.")


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Plugin:
    """Code that registered something: a file with its checksum, or an installed package."""

    name: str  # the name of the file, or the package with its version
    provides: dict[str, tuple[str, ...]] = field(default_factory=dict)  # {"routers": ("distance",)}
    checksum: str | None = None
    path: Path | None = None  # of a file
    package: Path | None = None  # the file or the folder of an installed package


KINDS = ("routers", "datasets", "attacks", "metrics")  # what plugins provide
_registries: dict[str, Registry[Any]] = {}  # by plural kind; each is there once its module is imported
_registered: list[tuple[Registry[Any], str]] = []  # by code from outside the package
_plugins: list[Plugin] = []  # loaded by this process


def watch(registry: Registry[Entry]) -> Registry[Entry]:
    """Let plugins add to this registry, and return it."""
    _registries[registry.plural] = registry
    return registry


def load_plugin(path: str | os.PathLike[str], *, checksum: str | None = None) -> Plugin:
    """Run a Python file that registers routers, datasets, attacks or metrics, and return its description.

    A file that this process has loaded before is not run again.

    checksum    the SHA-256 that the file must have; None accepts any
    """
    file = Path(path).absolute()
    try:
        source = read_bytes(file)
    except OSError as problem:
        raise ValueError(f"the plugin {path} cannot be read ({problem.strerror or problem}).") from None
    except ValueError as problem:  # a pipe or a device, which never ends
        raise ValueError(f"the plugin {path} cannot be read: {problem}") from None
    found = hashlib.sha256(source).hexdigest()
    if checksum not in (None, found):
        raise ValueError(f"the plugin {path} has changed since this command started; start it again.")
    for plugin in _plugins:
        if plugin.checksum == found:
            return plugin
    module = ModuleType(f"holdfast_plugin_{found[:SHOWN]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # type hints and pickle look up the module of a class
    try:
        provides = _registered_by(lambda: exec(compile(source, str(file), "exec"), module.__dict__))
    except PLUGIN_ERRORS as problem:
        del sys.modules[module.__name__]
        line = _line_of(problem, file)
        where = "" if line is None else f" at line {line}"
        raise ValueError(f"the plugin {path} failed{where}: {type(problem).__name__}: {problem}") from problem
    if not provides:
        raise ValueError(
            f"the plugin {path} registers nothing; use holdfast.register, register_dataset, register_attack or "
            "register_metric in it."
        )
    _plugins.append(Plugin(file.name, provides, found, file))
    return _plugins[-1]


def plugin_files() -> list[tuple[Path, str]]:
    """Return the plugin files of this process, with their checksums, for a process that it starts to load."""
    return [(plugin.path, plugin.checksum) for plugin in _plugins if plugin.path is not None and plugin.checksum is not None]


def is_from_file(kind: str, name: str) -> bool:
    """Return whether a plugin file, which the user has named in this process, registered this name."""
    return any(plugin.path is not None and name in plugin.provides.get(kind, ()) for plugin in _plugins)


def plugins_of(**names: Iterable[str]) -> list[dict[str, Any]]:
    """Return descriptions of the plugins that registered these names, to be stored with a trained model.

    names   by plural kind: `plugins_of(routers=["distance"], datasets=["haiku"])`
    """
    wanted = {kind: set(some) for kind, some in names.items()}
    described = []
    for plugin in _plugins:
        used = {kind: [name for name in own if name in wanted.get(kind, ())] for kind, own in plugin.provides.items()}
        if any(used.values()):
            kept = {kind: some for kind, some in used.items() if some}
            described.append({"name": plugin.name, **kept, "checksum": plugin.checksum})
    return described


def registered_without_plugin(kind: str, names: Iterable[str]) -> list[str]:
    """Return those of these names that a script or an imported module registered: neither the package nor a plugin."""
    outside = {name for registry, name in _registered if registry.plural == kind}
    provided = {name for plugin in _plugins for name in plugin.provides.get(kind, ())}
    return [name for name in names if name in outside - provided]


def require_plugins(stored: Any, what: str, *, without: Iterable[str] = (), warn: bool = True) -> None:
    """Raise ValueError if names of a stored plugin are not registered; log a warning if a plugin file has changed.

    stored    what `plugins_of` returned, read from a file; it is checked
    what      what was trained with these plugins, for the message
    without   plural kinds that are not needed now: "datasets" if the user names other data
    warn      whether to log that warning
    """
    _load_installed()
    known = {kind: _registries[kind].names() if kind in _registries else [] for kind in KINDS}
    for entry in stored if isinstance(stored, list | tuple) else [stored]:
        if not _is_description(entry):
            raise ValueError(f"the list of plugins of {what} is damaged.")
        checksum = entry["checksum"]
        stamp = "" if checksum is None else f" (SHA-256 {checksum[:SHOWN]}...)"
        missing = {kind: [str(name) for name in entry[kind] if name not in known[kind]] for kind in KINDS if kind in entry}
        for kind, names in missing.items():
            if names and kind not in without:
                how = (
                    "install that package"
                    if checksum is None
                    else 'name the file with --plugin FILE or holdfast.load_plugin("FILE")'
                )
                needed = f"{kind.removesuffix('s')} {names[0]!r}"
                raise ValueError(f"{what} needs {needed} of the plugin {entry['name']}{stamp}: {how}.")
        is_loaded = not any(missing.values())
        if warn and is_loaded and checksum is not None and checksum not in [plugin.checksum for plugin in _plugins]:
            say.warning("%s was trained with another version of the plugin %s%s.", what, entry["name"], stamp)


def _is_description(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    named = [entry[kind] for kind in KINDS if kind in entry]
    is_complete = "checksum" in entry and isinstance(entry["checksum"], str | None) and bool(named)
    return is_complete and all(isinstance(names, list) and all(isinstance(one, str) for one in names) for names in named)


def failure_in_plugin(problem: BaseException) -> str | None:
    """Return one sentence with the plugin and the line in which an error was raised; None if no plugin was running."""
    for plugin in reversed(_plugins):
        place = plugin.path or plugin.package
        line = None if place is None else _line_of(problem, place)
        if line is not None:
            return f"the plugin {plugin.name} failed at line {line}: {type(problem).__name__}: {problem}"
    return None


def _line_of(problem: BaseException, place: Path) -> str | None:
    """Return the innermost line of the file `place` that was running when the error was raised; with the file in a package.

    An error that was raised while another was handled is searched too: a function may turn one error into another.
    """
    if isinstance(problem, SyntaxError) and problem.filename == str(place):
        return str(problem.lineno)
    found: str | None = None
    for frame, number in traceback.walk_tb(problem.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file == place:
            found = str(number)
        elif place in file.parents:
            found = f"{number} of {file.relative_to(place)}"
    if found is None and problem.__cause__ is not None:
        return _line_of(problem.__cause__, place)
    return found


def _registered_by(run: Callable[[], Any]) -> dict[str, tuple[str, ...]]:
    """Return the names that `run` registers, by plural kind; if it raises an error, unregister them."""
    before = len(_registered)
    try:
        run()
    except BaseException:
        for registry, name in _registered[before:]:
            registry.remove(name)
        del _registered[before:]
        raise
    found = {kind: tuple(name for registry, name in _registered[before:] if registry.plural == kind) for kind in KINDS}
    return {kind: names for kind, names in found.items() if names}


def _load_installed() -> None:
    """Import the installed packages that have an entry point, once; log a warning for each that fails."""
    if Registry.is_searched:
        return
    Registry.is_searched = True  # first: a package may ask for names while it is imported
    for entry in entry_points(group=GROUP):
        package = entry.name if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        try:
            provides = _registered_by(entry.load)
        except PLUGIN_ERRORS as problem:
            say.warning("the plugin %s could not be loaded: %s", package, problem)
        else:
            _plugins.append(Plugin(package, provides, package=_package_place(entry.module)))


def _package_place(module: str) -> Path | None:
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    if file is None:
        return None
    return Path(file).parent if Path(file).name == "__init__.py" else Path(file)
