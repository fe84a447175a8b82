"""A pytest plugin that runs the model tests of transformers on rerouted models.

Run it in a git checkout of transformers of the same version as the installed one. Its tests also need `parameterized`:

    pytest -p holdfast.testing.transformers_plugin --holdfast-router smooth tests/models/mixtral

When a test builds a causal language model from a config, and `holdfast.reroute` supports its family, the plugin reroutes
the model. A model that `from_pretrained` loads from a folder is not changed: if it was rerouted when it was saved, it is
rerouted after loading. Without `--holdfast-router` the plugin changes nothing: use this to get results to compare with.
"""

import functools
from typing import Any

import pytest

# "rerouted": models rerouted so far. "loading": calls of `from_pretrained` with a folder that are running now.
_counts = {"rerouted": 0, "loading": 0}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--holdfast-router`."""
    parser.getgroup("holdfast").addoption(
        "--holdfast-router",
        metavar="NAME",
        help="reroute every causal language model that a test builds to this router: native, smooth, ...",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Patch the causal language models of transformers, so that they are rerouted when they are built."""
    router = config.getoption("--holdfast-router")
    if router is not None:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

        from holdfast.hub.families import MOE_FAMILIES

        for config_class in (CONFIG_MAPPING[name] for name in MOE_FAMILIES if name in CONFIG_MAPPING):
            if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
                _reroute_when_built(MODEL_FOR_CAUSAL_LM_MAPPING[config_class], router)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the line of pytest's header that names the router."""
    router = config.getoption("--holdfast-router")
    return None if router is None else f"holdfast: causal language models are rerouted to {router!r}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number of rerouted models from a pytest-xdist worker to the main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["holdfast_rerouted"] = _counts["rerouted"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the number of rerouted models that a pytest-xdist worker has sent."""
    _counts["rerouted"] += getattr(node, "workeroutput", {}).get("holdfast_rerouted", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report how many models were rerouted; with 0 models, the tests did not test Holdfast."""
    if config.getoption("--holdfast-router") is not None:
        terminalreporter.write_line(f"holdfast: {_counts['rerouted']} models were rerouted")


def _reroute_when_built(model_class: Any, router: str) -> None:
    """Replace `__init__` and `from_pretrained` of a model class: new models are rerouted, loaded models are not."""
    from holdfast.hub.convert import reroute

    build, load = model_class.__init__, model_class.from_pretrained.__func__

    @functools.wraps(build)
    def build_and_reroute(model: Any, *arguments: Any, **options: Any) -> None:
        build(model, *arguments, **options)
        if type(model) is model_class and not _counts["loading"]:
            for parameter in model.parameters():  # `reroute` raises an error for NaN in a gate that is not initialised
                if not parameter.is_meta:
                    parameter.data.nan_to_num_(0.0, 0.0, 0.0)
            reroute(model, router)
            _counts["rerouted"] += 1

    @functools.wraps(load)
    def load_without_reroute(subclass: Any, *arguments: Any, **options: Any) -> Any:
        folder = arguments[0] if arguments else options.get("pretrained_model_name_or_path")
        _counts["loading"] += folder is not None
        try:
            return load(subclass, *arguments, **options)
        finally:
            _counts["loading"] -= folder is not None

    model_class.__init__, model_class.from_pretrained = build_and_reroute, classmethod(load_without_reroute)
