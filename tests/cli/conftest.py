"""A recipe so small that a command takes seconds, and a text for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import plugins
from holdfast.data import python_topics

SMALL = ["training.batch=4", "data.length=16", "data.vocabulary=200", "sparse.hidden=16"]
SMALL += ["model.config.hidden_size=32", "model.config.intermediate_size=32"]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n\n".join(list(python_topics().values())[:12])[:30_000])
    return path


def forget(known: dict[str, set[str]]) -> None:
    """Unregister all names but the known ones, as in a process that has loaded no plugin."""
    for registry in plugins._registries.values():
        for name in set(registry.names()) - known[registry.plural]:
            registry.remove(name)
    plugins._plugins.clear()


@pytest.fixture(autouse=True)
def known_names() -> Iterator[dict[str, set[str]]]:
    """Unregister what a test has registered, with a plugin or without."""
    import holdfast.public  # noqa: F401  (so that every registry is there)

    known = {registry.plural: set(registry.names()) for registry in plugins._registries.values()}
    yield known
    forget(known)
