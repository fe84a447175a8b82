"""A router in a file outside the package, with a certificate and a cost: every command takes it with --plugin."""

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import SMALL
from commands import Command

import holdfast


@pytest.fixture
def plugin(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the options that load the router, in a folder with a text to train on."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).parent.parent / "outside_router.py", "outside.py")
    shutil.copy(text, "some.txt")
    return ["--plugin", "outside.py"]


def test_a_router_outside_the_package_works_in_every_command(plugin: list[str], command: Command) -> None:
    assert "distance" in command.printed("routers", *plugin)
    planned = json.loads(command.printed("plan", "llama", "--experts", "4", "--routers", "distance,smoe", "--json", *plugin))
    assert "cost not declared" not in json.dumps(planned) and "distance" in json.dumps(planned)
    small = ["--seeds=1", "--set", *SMALL, "training.steps=2", "data.source=some.txt"]
    command.printed("compare", "--routers", "smoe,distance", *small, "--out", "compared", *plugin)
    home = "compared/cells/distance-seed0"
    certified = command.printed("certify", home, "--source", "some.txt", "--length", "16", "--tokens", "64", *plugin)
    assert "exact" in certified and "no certificate" not in certified
    given = ["--source", "some.txt", "--length", "16", "--tokens", "64", "--perturb", "noise", "--out", "audited"]
    command.printed("audit", home, *given, *plugin)
    (stored,) = Path("audited").rglob("*.json")
    assert json.loads(stored.read_text())["perturbations"]["noise.0.01"]["overall"]["output"]["rest"] >= 0
    command.printed("evaluate", home, "--source", "some.txt", *plugin)
    loaded = holdfast.load(f"{home}/model")
    holdfast.save(loaded, "again")
    assert type(holdfast.load("again")) is type(loaded)
