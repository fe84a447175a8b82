"""Routers of the user's own, from a file that the command line names or from an installed package."""

import json
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import pytest
from changed_models import words
from cli.conftest import SMALL, forget
from commands import Command
from tiny import tiny
from wording import assert_refused, mentions

import holdfast
from holdfast import plugins
from holdfast.plugins import load_plugin, plugins_of, require_plugins
from holdfast.routing.presets import REGISTRY
from holdfast.routing.selection import TopK

PLUGIN = """
import holdfast
from holdfast.routing import Linear

@holdfast.register("doubled", stage="score", about="twice the linear score", paper="none")
class Doubled(Linear):
    def __init__(self, dim: int, experts: int, *, times: float = 2.0) -> None:
        super().__init__(dim, experts)
        self.times = times
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(PLUGIN)
    return tmp_path / "own.py"


@pytest.fixture
def small(text: Path) -> list[str]:
    return ["--seeds=1", "--set", f"data.source={text}", "training.steps=2", *SMALL]


def test_a_plugin_joins_the_grammar_with_its_options(plugin: Path) -> None:
    loaded = load_plugin(plugin)
    assert loaded.provides == {"routers": ("doubled",)} and loaded.name == "own.py" and len(loaded.checksum or "") == 64
    assert holdfast.create_router("doubled[times=3]+smooth", dim=4, experts=3).score.times == 3.0
    assert "doubled" in holdfast.list_routers()
    assert load_plugin(plugin) is loaded  # it would clash with itself if it were run twice
    assert plugins_of(routers=["doubled", "smooth"]) == [
        {"name": "own.py", "routers": ["doubled"], "checksum": loaded.checksum}
    ]
    assert plugins_of(routers=["smooth"]) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\n1 / 0", "own.py failed at line 2: ZeroDivisionError"),
        ("def", "own.py failed at line 1: SyntaxError"),
        (PLUGIN + "raise KeyError('late')", "own.py failed at line 10: KeyError"),
        (PLUGIN + "raise SystemExit(0)", "own.py failed at line 10: SystemExit: 0"),
        ("", "own.py registers nothing"),
        (
            PLUGIN.replace('"doubled"', '"smooth"'),
            "own.py failed at line 5: ValueError: there is already a router named 'smooth'",
        ),
    ],
    ids=["raises", "is no Python", "raises late", "exits", "registers nothing", "clashes"],
)
def test_a_plugin_that_does_not_work_is_one_sentence_and_leaves_nothing(text: str, sentence: str, plugin: Path) -> None:
    plugin.write_text(text)
    before = REGISTRY.names()
    assert_refused(sentence, load_plugin, plugin)
    assert REGISTRY.names() == before


def test_a_plugin_that_is_not_there_or_has_changed_is_refused(plugin: Path) -> None:
    assert_refused(r"nowhere.py cannot be read", load_plugin, plugin.with_name("nowhere.py"))
    os.mkfifo(plugin.with_name("pipe.py"))
    for endless, kind in ((plugin.with_name("pipe.py"), "a named pipe"), (Path("/dev/zero"), "a device")):
        assert_refused(f"{endless.name} cannot be read: .* is {kind}", load_plugin, endless)
    assert_refused("has changed", load_plugin, plugin, checksum="0" * 64)
    assert "doubled" not in REGISTRY.names()


def test_a_plugin_that_exits_while_it_is_used_does_not_end_a_command_as_if_it_had_worked(
    plugin: Path, command: Command
) -> None:
    plugin.write_text(PLUGIN.replace("self.times = times", "raise SystemExit(0)"))
    told = command.refused("plan", "llama", "--experts", "4", "--routers", "doubled", "--plugin", plugin)
    assert told == "holdfast: the plugin own.py failed at line 9: SystemExit: 0"


def test_an_unknown_router_is_told_the_nearest_and_of_plugins(command: Command) -> None:
    told = command.refused("plan", "llama", "--experts", "4", "--routers", "smoth")
    assert mentions(told, "did you mean 'smooth'?", "--plugin FILE")


def test_commands_build_the_routers_of_a_plugin(plugin: Path, command: Command) -> None:
    both = ["--plugin", str(plugin), "--plugin", str(plugin)]
    assert "twice the linear score" in command.printed("routers", *both)
    assert "doubled" in command.printed("plan", "llama", "--experts", "4", "--routers", "doubled[times=3]", *both)


def test_what_was_trained_with_a_plugin_says_which_one_it_needs(
    plugin: Path,
    small: list[str],
    text: Path,
    known_names: dict[str, set[str]],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--plugin", str(plugin)]
    command.printed("compare", "--routers", "doubled", *small, "--out", "compared", *given)
    (entry,) = plugins_of(routers=["doubled"])
    home = "compared/cells/doubled-seed0"
    for record in (Path(home, "task.json"), Path(home, "router.json"), Path(home, "result.json")):
        assert json.loads(record.read_text())["plugins"] == [entry]
    assert json.loads(Path("compared/results.json").read_text())["cells"][0]["plugins"] == [entry]
    for arguments in (["evaluate", home], ["attack", home, "words", "--rate", "0.1"], ["audit", home], ["certify", home]):
        forget(known_names)
        lacking = command.refused(*arguments)
        assert mentions(lacking, "'doubled' of the plugin own.py", entry["checksum"][:12], "--plugin FILE")
    forget(known_names)
    command.printed("evaluate", home, "--source", text, *given)
    assert "another version of the plugin" not in caplog.text
    forget(known_names)
    plugin.write_text(PLUGIN + "# changed\n")
    command.printed("certify", home, "--source", text, "--length", "16", "--tokens", "64", *given)
    assert "another version of the plugin own.py" in caplog.text
    assert "another plugin" in command.refused("compare", "--routers", "doubled", *small, "--out", "compared", *given)


@pytest.mark.slow  # two processes import everything
def test_the_workers_of_a_comparison_load_the_plugin_too(
    plugin: Path, small: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--jobs", "2", "--out", "compared", "--plugin", str(plugin)]
    command.printed("compare", "--routers", "doubled,doubled[times=3]", *small, *given)


@pytest.mark.parametrize("stored", [{}, [3], [{"name": "own.py"}], [{"name": 1, "routers": [], "checksum": None}]])
def test_a_damaged_list_of_plugins_is_refused(stored: object) -> None:
    assert_refused("list of plugins of it is damaged", require_plugins, stored, "it")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a package that has an entry point, as if it were installed."""

    class Installed(Distribution):
        def read_text(self, filename: str) -> str | None:
            return "Name: own-routers\nVersion: 1.2\n" if filename == "METADATA" else None

        def locate_file(self, path: object) -> Path:
            return tmp_path / str(path)

    entry = EntryPoint("own", "own_routers", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry._for(Installed())] if group == entry.group else [])  # type: ignore[attr-defined]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_routers", raising=False)
    monkeypatch.setattr(plugins.Registry, "is_searched", False)
    return tmp_path / "own_routers.py"


def test_an_installed_package_with_an_entry_point_is_found_by_name(
    installed: Path, known_names: dict[str, set[str]]
) -> None:
    installed.write_text(PLUGIN)
    assert holdfast.create_router("doubled", dim=4, experts=3).dim == 4
    entry = {"name": "own-routers 1.2", "routers": ["doubled"], "checksum": None}
    assert plugins_of(routers=["doubled"]) == [entry]
    forget(known_names)
    assert_refused(r"'doubled' of the plugin own-routers 1\.2: install that package", require_plugins, [entry], "it")


def test_an_installed_package_that_fails_is_a_warning(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed.write_text(PLUGIN + "1 / 0\n")
    assert "doubled" not in holdfast.list_routers() and "smooth" in holdfast.list_routers()
    assert "the plugin own-routers 1.2 could not be loaded" in caplog.text


# Model cards of folders whose routers are not of Holdfast

HOSTILE = 'a"]\n```\n<b>`x` {0} %s \u00e9\U0001f600\\.py'


def saved(folder: Path, router: str = "doubled") -> Path:
    return holdfast.save(holdfast.reroute(tiny("mixtral"), router), folder, tokenizer=words())


def assert_card_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]) -> None:
    """Each block of its code opens the model where nothing has been loaded; `new_process` forgets what was."""
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 3  # Holdfast's function, an Auto class, a pipeline
    for code in blocks:
        new_process()
        namespace: dict[str, Any] = {}
        exec(code, namespace)
        model = namespace["run"].model if "run" in namespace else namespace["model"]
        routers = [module for module in model.modules() if isinstance(module, holdfast.Router)]
        assert routers and all(type(router.score).__name__ == "Doubled" for router in routers)


@pytest.mark.parametrize("name", ["own.py", HOSTILE], ids=["plain", "hostile"])
def test_a_card_names_the_plugin_file_and_its_code_runs_with_that_file_in_the_folder(
    name: str, plugin: Path, known_names: dict[str, set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = plugin.rename(tmp_path / name)
    checksum = load_plugin(plugin).checksum
    folder = saved(tmp_path / "out", "doubled+smooth")
    card = (folder / "README.md").read_text()
    assert mentions(card, f"(SHA-256 {checksum}) for `doubled`", "`holdfast run --plugin FILE -- PROGRAM`")
    assert ("the plugin `own.py`" in card) == (name == "own.py")
    assert card.isascii() and card.count("```") == 6 and not any(part in card for part in ('a"', "`x`"))
    forget(known_names)
    assert_refused("unknown router 'doubled'", holdfast.load, folder)
    plugin.rename(folder / name)
    assert_card_runs(folder, monkeypatch, lambda: forget(known_names))
    again = holdfast.save(holdfast.load(folder), tmp_path / "again", tokenizer=words())
    assert (again / "README.md").read_text() == card


def test_a_card_names_the_installed_package_which_its_code_need_not_import(
    installed: Path, known_names: dict[str, set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write_text(PLUGIN)
    folder = saved(tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert mentions(card, "the package `own-routers 1.2` for `doubled`", "`holdfast run -- PROGRAM`")

    def new_process() -> None:
        forget(known_names)
        sys.modules.pop("own_routers", None)
        plugins.Registry.is_searched = False  # `installed` restores it

    assert_card_runs(folder, monkeypatch, new_process)


def test_a_card_says_that_a_router_of_no_plugin_must_be_registered_first(tmp_path: Path) -> None:
    ours = (saved(tmp_path / "ours", "smooth") / "README.md").read_text()
    assert not any(word in ours for word in ("plugin", "package `", "import the module"))
    holdfast.register("sharper", stage="select", about="top-k", paper="none")(TopK)  # a part of Holdfast, another name
    card = (saved(tmp_path / "out", "sharper") / "README.md").read_text()
    assert mentions(card, "nor a plugin registers `sharper`: import the module that does so before you load the model")
