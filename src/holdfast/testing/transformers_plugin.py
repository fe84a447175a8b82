"""A pytest plugin that runs the model tests of transformers on rerouted models.

In a checkout of transformers whose version is the installed one (its tests also need `parameterized`):

    pytest -p holdfast.testing.transformers_plugin --holdfast-router smooth tests/models/mixtral

Every causal language model of a family that `holdfast.reroute` knows is rerouted as soon as a test has built it from a
config. What `from_pretrained` reads from a folder is left as that says: where such a model was saved, it opens rerouted.
Without the option nothing is changed, so that the same command gives the result to compare with.
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
    """Change the causal language models of transformers."""
    router = config.getoption("--holdfast-router")
    if router is not None:
        for kind in _causal_models():
            _reroute_what_is_built(kind, router)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which router the models have."""
    router = config.getoption("--holdfast-router")
    return None if router is None else f"holdfast: causal language models are rerouted to {router!r}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the number of rerouted models from a worker of pytest-xdist to the process that reports it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["holdfast_rerouted"] = _counts["rerouted"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add a worker's number."""
    _counts["rerouted"] += getattr(node, "workeroutput", {}).get("holdfast_rerouted", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report how many models were rerouted: none means that the tests showed nothing about Holdfast."""
    if config.getoption("--holdfast-router") is not None:
        terminalreporter.write_line(f"holdfast: {_counts['rerouted']} models were rerouted")


def _causal_models() -> list[Any]:
    """The class of causal language models of each MoE family, as far as this transformers has them."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    from holdfast.hub.families import MOE_FAMILIES

    known = [CONFIG_MAPPING[name] for name in MOE_FAMILIES if name in CONFIG_MAPPING]
    return [MODEL_FOR_CAUSAL_LM_MAPPING[config] for config in known if config in MODEL_FOR_CAUSAL_LM_MAPPING]


def _replace_garbage(model: Any) -> None:
    """Set to 0 what a test has left uninitialised: it may be NaN, which `reroute` refuses in a gate."""
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
