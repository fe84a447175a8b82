"""Routers of the user's own, from a file that the command line names or from an installed package."""

import json
import os
import sys
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest
from cli.conftest import SMALL, forget
from commands import Command

import holdfast
from holdfast import plugins
from holdfast.plugins import load_plugin, plugins_of, require_plugins
from holdfast.routing.presets import REGISTRY

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
    with pytest.raises(ValueError, match=sentence):
        load_plugin(plugin)
    assert REGISTRY.names() == before


def test_a_plugin_that_is_not_there_or_has_changed_is_refused(plugin: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.py cannot be read"):
        load_plugin(plugin.with_name("nowhere.py"))
    os.mkfifo(plugin.with_name("pipe.py"))
    for endless, kind in ((plugin.with_name("pipe.py"), "a named pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ValueError, match=f"{endless.name} cannot be read: .* is {kind}"):
            load_plugin(endless)
    with pytest.raises(ValueError, match="has changed"):
        load_plugin(plugin, checksum="0" * 64)
    assert "doubled" not in REGISTRY.names()


def test_a_plugin_that_exits_while_it_is_used_does_not_end_a_command_as_if_it_had_worked(
    plugin: Path, command: Command
) -> None:
    plugin.write_text(PLUGIN.replace("self.times = times", "raise SystemExit(0)"))
    done = command("plan", "llama", "--experts", "4", "--routers", "doubled", "--plugin", str(plugin))
    assert (done.returncode, done.stderr) == (2, "holdfast: the plugin own.py failed at line 9: SystemExit: 0\n")


def test_an_unknown_router_is_told_the_nearest_and_of_plugins(command: Command) -> None:
    told = command("plan", "llama", "--experts", "4", "--routers", "smoth").stderr
    assert "did you mean 'smooth'?" in told and "--plugin FILE" in told


def test_commands_build_the_routers_of_a_plugin(plugin: Path, command: Command) -> None:
    both = ["--plugin", str(plugin), "--plugin", str(plugin)]
    assert "twice the linear score" in command("routers", *both, columns=200).stdout
    done = command("plan", "llama", "--experts", "4", "--routers", "doubled[times=3]", *both)
    assert done.returncode == 0 and "doubled" in done.stdout


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
    done = command("compare", "--routers", "doubled", *small, "--out", "compared", *given)
    assert done.returncode == 0, done.stderr
    (entry,) = plugins_of(routers=["doubled"])
    home = "compared/cells/doubled-seed0"
    for record in (Path(home, "task.json"), Path(home, "router.json"), Path(home, "result.json")):
        assert json.loads(record.read_text())["plugins"] == [entry]
    assert json.loads(Path("compared/results.json").read_text())["cells"][0]["plugins"] == [entry]
    for arguments in (["evaluate", home], ["attack", home, "words", "--rate", "0.1"], ["audit", home], ["certify", home]):
        forget(known_names)
        lacking = command(*arguments)
        assert lacking.returncode == 2 and "'doubled' of the plugin own.py" in lacking.stderr
        assert entry["checksum"][:12] in lacking.stderr and "--plugin FILE" in lacking.stderr
    forget(known_names)
    assert command("evaluate", home, "--source", str(text), *given).returncode == 0
    assert "another version of the plugin" not in caplog.text
    forget(known_names)
    plugin.write_text(PLUGIN + "# changed\n")
    assert command("certify", home, "--source", str(text), "--length", "16", "--tokens", "64", *given).returncode == 0
    assert "another version of the plugin own.py" in caplog.text
    other = command("compare", "--routers", "doubled", *small, "--out", "compared", *given)
    assert other.returncode == 2 and "another plugin" in other.stderr


@pytest.mark.slow  # two processes import everything
def test_the_workers_of_a_comparison_load_the_plugin_too(
    plugin: Path, small: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--jobs", "2", "--out", "compared", "--plugin", str(plugin)]
    done = command("compare", "--routers", "doubled,doubled[times=3]", *small, *given)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stored", [{}, [3], [{"name": "own.py"}], [{"name": 1, "routers": [], "checksum": None}]])
def test_a_damaged_list_of_plugins_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="list of plugins of it is damaged"):
        require_plugins(stored, "it")


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
    for registry in plugins._registries:
        registry.discover_with(plugins._load_installed)
    return tmp_path / "own_routers.py"


def test_an_installed_package_with_an_entry_point_is_found_by_name(
    installed: Path, known_names: dict[str, set[str]]
) -> None:
    installed.write_text(PLUGIN)
    assert holdfast.create_router("doubled", dim=4, experts=3).dim == 4
    entry = {"name": "own-routers 1.2", "routers": ["doubled"], "checksum": None}
    assert plugins_of(routers=["doubled"]) == [entry]
    forget(known_names)
    with pytest.raises(ValueError, match=r"'doubled' of the plugin own-routers 1\.2: install that package"):
        require_plugins([entry], "it")


def test_an_installed_package_that_fails_is_a_warning(installed: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed.write_text(PLUGIN + "1 / 0\n")
    assert "doubled" not in holdfast.list_routers() and "smooth" in holdfast.list_routers()
    assert "the plugin own-routers 1.2 could not be loaded" in caplog.text
