"""A pytest plugin that runs the model tests of transformers on rerouted models.

In a checkout of transformers whose version is the installed one (its tests also need `parameterized`):

    pytest -p holdfast.testing.transformers_plugin --holdfast-router smooth tests/models/mixtral

Every causal language model of a family that `holdfast.reroute` supports is rerouted when a test has built it from a config.
A model that `from_pretrained` loads from a folder is not changed: if it was saved rerouted, it is loaded rerouted. Without
the option nothing is changed, so that the same command gives the result to compare with.
"""

import functools
from typing import Any

import pytest

_counts = {"rerouted": 0, "loading": 0}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--holdfast-router`."""
    parser.getgroup("holdfast").addoption(
        "--holdfast-router",
        metavar="NAME",
        help="reroute every causal language model that a test builds: native, smooth, ...",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Reroute the causal language models of transformers when they are built."""
    router = config.getoption("--holdfast-router")
    if router is not None:
        for kind in _causal_models():
            _reroute_what_is_built(kind, router)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line of the header that names the router."""
    router = config.getoption("--holdfast-router")
    return None if router is None else f"holdfast: causal language models are rerouted to {router!r}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number of rerouted models from a pytest-xdist worker to the main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["holdfast_rerouted"] = _counts["rerouted"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the number of a worker."""
    _counts["rerouted"] += getattr(node, "workeroutput", {}).get("holdfast_rerouted", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report how many models were rerouted; with 0 models, the tests did not test Holdfast."""
    if config.getoption("--holdfast-router") is not None:
        terminalreporter.write_line(f"holdfast: {_counts['rerouted']} models were rerouted")


def _causal_models() -> list[Any]:
    """Return the causal language model class of each MoE family that this version of transformers has."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    from holdfast.hub.families import MOE_FAMILIES

    known = [CONFIG_MAPPING[name] for name in MOE_FAMILIES if name in CONFIG_MAPPING]
    return [MODEL_FOR_CAUSAL_LM_MAPPING[config] for config in known if config in MODEL_FOR_CAUSAL_LM_MAPPING]


def _replace_garbage(model: Any) -> None:
    """Replace NaN and infinity in uninitialised parameters by 0: `reroute` raises an error for NaN in a gate."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data.nan_to_num_(0.0, 0.0, 0.0)


def _reroute_what_is_built(kind: Any, router: str) -> None:
    from holdfast.hub.convert import reroute

    build, load = kind.__init__, kind.from_pretrained.__func__

    @functools.wraps(build)
    def build_and_reroute(model: Any, *arguments: Any, **options: Any) -> None:
        build(model, *arguments, **options)
        if type(model) is kind and not _counts["loading"]:
            _replace_garbage(model)
            reroute(model, router)
            _counts["rerouted"] += 1

    @functools.wraps(load)
    def load_unchanged(own: Any, *arguments: Any, **options: Any) -> Any:
        folder = arguments[0] if arguments else options.get("pretrained_model_name_or_path")
        _counts["loading"] += folder is not None
        try:
            return load(own, *arguments, **options)
        finally:
            _counts["loading"] -= folder is not None

    kind.__init__, kind.from_pretrained = build_and_reroute, classmethod(load_unchanged)
