"""Routers from outside the package: Python files that the user passes, and installed packages with an entry point.

A plugin file is code that Holdfast runs. Only the user can name one, on the command line or with `load_plugin`; a checkpoint
or a recipe cannot. What is trained with a plugin stores its checksum, so that a later command can name the missing file.

A package that registers routers on import declares an entry point of the group `holdfast.routers`:

    [project.entry-points."holdfast.routers"]
    mine = "my_package.routers"
"""

import hashlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.routing.layer_names import preset_names
from holdfast.routing.presets import REGISTRY

say = logging.getLogger("holdfast")
GROUP = "holdfast.routers"
SHOWN = 12  # characters of a checksum in messages and module names


@dataclass(frozen=True)
class Plugin:
    """Code that registered routers: a file with its checksum, or an installed package."""

    name: str  # the name of the file, or the package with its version
    routers: tuple[str, ...]
    checksum: str | None = None
    path: Path | None = None


_plugins: list[Plugin] = []  # loaded by this process


def load_plugin(path: str | os.PathLike[str], *, checksum: str | None = None) -> Plugin:
    """Run a Python file that registers routers with `holdfast.register`, and return its description.

    A file that this process has loaded before is not run again.

    checksum    the SHA-256 that the file must have; None accepts any
    """
    file = Path(path).absolute()
    try:
        source = file.read_bytes()
    except OSError as problem:
        raise ValueError(f"the plugin {path} cannot be read ({problem.strerror or problem}).") from None
    found = hashlib.sha256(source).hexdigest()
    if checksum not in (None, found):
        raise ValueError(f"the plugin {path} has changed since this command started; start it again.")
    for plugin in _plugins:
        if plugin.checksum == found:
            return plugin
    module = ModuleType(f"holdfast_plugin_{found[:SHOWN]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # type hints and pickle look up the module of a class

    def run() -> None:
        exec(compile(source, str(file), "exec"), module.__dict__)

    try:
        names = _registered_by(run)
    except Exception as problem:  # the file may raise anything
        del sys.modules[module.__name__]
        raise ValueError(f"the plugin {path} failed: {type(problem).__name__}: {problem}") from problem
    if not names:
        raise ValueError(f"the plugin {path} registers no router; use holdfast.register in it.")
    _plugins.append(Plugin(file.name, names, found, file))
    return _plugins[-1]


def plugin_files() -> list[tuple[Path, str]]:
    """Return the plugin files of this process, with their checksums, for a process that it starts to load."""
    return [(plugin.path, plugin.checksum) for plugin in _plugins if plugin.path is not None and plugin.checksum is not None]


def plugins_of(router: str) -> list[dict[str, Any]]:
    """Return descriptions of the plugins that registered the names of `router`, to be stored with a trained model."""
    names = preset_names(router)
    found = [(plugin, [name for name in plugin.routers if name in names]) for plugin in _plugins]
    return [{"name": plugin.name, "routers": used, "checksum": plugin.checksum} for plugin, used in found if used]


def require_plugins(stored: Any, what: str) -> None:
    """Raise ValueError if routers of a stored plugin are not registered; log a warning if a plugin file has changed.

    stored  what `plugins_of` returned, read from a file; it is checked
    what    what was trained with these plugins, for the message
    """
    fields = {"name": str, "routers": list, "checksum": str | None}
    for entry in stored if isinstance(stored, list) else [stored]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), kind) for key, kind in fields.items()):
            raise ValueError("its list of plugins is damaged.")
        known = {preset.name for preset in REGISTRY}
        checksum = entry["checksum"]
        stamp = "" if checksum is None else f" (SHA-256 {checksum[:SHOWN]}...)"
        missing = [str(name) for name in entry["routers"] if name not in known]
        if missing:
            how = "install that package" if checksum is None else "name the file with --plugin FILE"
            raise ValueError(f"{what} needs router {missing[0]!r} of the plugin {entry['name']}{stamp}: {how}.")
        if checksum is not None and checksum not in [plugin.checksum for plugin in _plugins]:
            say.warning("%s was trained with another version of the plugin %s%s.", what, entry["name"], stamp)


def _registered_by(run: Callable[[], Any]) -> tuple[str, ...]:
    """Return the names of the routers that `run` registers; if it raises an error, unregister them."""
    before = set(REGISTRY.names())
    try:
        run()
    except Exception:
        for name in set(REGISTRY.names()) - before:
            REGISTRY.remove(name)
        raise
    return tuple(name for name in REGISTRY.names() if name not in before)


def _load_installed() -> None:
    """Import the installed packages that have an entry point; log a warning for each that fails."""
    for entry in entry_points(group=GROUP):
        package = entry.name if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        try:
            names = _registered_by(entry.load)
        except Exception as problem:  # a package may raise anything
            say.warning("the routers of %s could not be loaded: %s", package, problem)
        else:
            _plugins.append(Plugin(package, names))


REGISTRY.discover_with(_load_installed)
