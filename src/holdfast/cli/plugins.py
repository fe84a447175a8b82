"""Plugin files, for the commands that build routers or load a model that has some."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import UseAppendAction


@dataclass(frozen=True)
class PluginFiles:
    plugin: UseAppendAction[tuple[Path, ...]] = ()
    """A Python file that registers routers of your own; it is run. The option may be given several times."""

    def load(self) -> None:
        from holdfast.routing.plugins import load_plugin

        for path in self.plugin:
            load_plugin(path)
