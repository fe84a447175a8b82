"""A router in a file outside the package, with a certificate and a cost: every command takes it with --plugin."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command

import holdfast
from holdfast import plugins
from holdfast.data import python_topics
from holdfast.routing.presets import REGISTRY

SMALL = ["--seeds=1", "--set", "training.steps=2", "training.batch=2", "data.source=some.txt", "data.length=16"]
SMALL += ["data.vocabulary=200", "model.config.hidden_size=32", "model.config.intermediate_size=32", "sparse.hidden=16"]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the options that load the router, in a folder with a text to train on; the router is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).parent.parent / "outside_router.py", "outside.py")
    Path("some.txt").write_text("\n\n".join(list(python_topics().values())[:4])[:20_000])
    yield ["--plugin", "outside.py"]
    plugins._plugins.clear()
    REGISTRY.remove("distance")


def run(command: Command, *arguments: str) -> str:
    done = command(*arguments, columns=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_router_outside_the_package_works_in_every_command(plugin: list[str], command: Command) -> None:
    assert "distance" in run(command, "routers", *plugin)
    planned = json.loads(run(command, "plan", "llama", "--experts", "4", "--routers", "distance,smoe", "--json", *plugin))
    assert "cost not declared" not in json.dumps(planned) and "distance" in json.dumps(planned)
    run(command, "compare", "--routers", "smoe,distance", *SMALL, "--out", "compared", *plugin)
    home = "compared/cells/distance-seed0"
    certified = run(command, "certify", home, "--source", "some.txt", "--length", "16", "--tokens", "64", *plugin)
    assert "exact" in certified and "no certificate" not in certified
    given = ["--source", "some.txt", "--length", "16", "--tokens", "64", "--perturb", "noise", "--out", "audited"]
    run(command, "audit", home, *given, *plugin)
    (stored,) = Path("audited").rglob("*.json")
    assert json.loads(stored.read_text())["perturbations"]["noise.0.01"]["overall"]["output"]["rest"] >= 0
    run(command, "evaluate", home, "--source", "some.txt", *plugin)
    loaded = holdfast.load(f"{home}/model")
    holdfast.save(loaded, "again")
    assert type(holdfast.load("again")) is type(loaded)
