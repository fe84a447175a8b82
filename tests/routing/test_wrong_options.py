"""A wrong option of a router is an error of one sentence that names it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from wording import assert_refused

from holdfast import create_router
from holdfast.routing import SmoothTopK, TopK
from holdfast.routing.noise import create_noise

IDS = {"vocabulary": 50}
GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"groups": 0}, "groups is 0"),
    ({"groups": 10}, "groups is 10"),
    ({"groups": 3, "top_groups": 4}, "top_groups is 4"),
    ({"groups": 2, "top_groups": 1, "k": 4}, "use at least 2 groups"),
]
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "smoe": [
        ({"weights": "softmx"}, "'softmax'"),
        ({"noise": "gumbel", "noise_std": 0.5}, "noise_std is 0.5, but the noise is gumbel"),
    ],
    "smoe-dropout": [({"k_final": 9}, "k_final is 9.* 1")],
    "mlp": [({"hidden": 0}, "hidden is 0")],
    "xmoe": [({"width": 0}, "width is 0"), ({"temperature": -1.0}, "temperature is -1")],
    "top-p": [
        ({"p": 1.5}, "p is 1.5.* 0 and 1"),
        ({"softness": 0.0}, "softness is 0.0"),
        ({"noise_std": 0.5}, "noise_std is 0.5, but the noise is None.*noise='gaussian'"),
    ],
    "remoe": [
        ({"l1": -1.0}, "l1 is -1.0.*negative"),
        ({"l1_rate": 0.5}, "at least 1"),
        ({"warmup": 1.0}, "warmup is 1.0.*below 1"),
        ({"noise": "gaussian", "noise_temperature": 2.0}, "noise_temperature is 2.0.*noise='gumbel'"),
        ({"noise": "gumbel", "noise_temperature": 0.0}, "noise_temperature is 0.0.*positive"),
    ],
    "symphony": [
        ({"beta": 1.0}, "beta is 1.0"),
        ({"threshold": -0.1}, "threshold is -0.1"),
        ({"normalize": "sinkhorn", "init": "zero"}, "identity"),
    ],
    "similarity": [
        ({"tau": 0.0}, "tau is 0.0"),
        ({"rank": 99}, "rank is 99"),
        ({"strength": 2.0}, "strength is 2.0"),
        ({"strength": "learnt"}, "strength is 'learnt'"),
        ({"tau": "root"}, "tau is 'root'"),
        ({"form": "bilinear"}, "give a rank"),
        ({"from": "confidant"}, "'confidant'.*confident"),
    ],
    "similarity[from=confidant]": [({}, "option from is 'confidant'.*'confident'")],
    "similarity[from=all]": [({"from_": "all"}, "from is given twice")],
    "attention": [
        ({"heads": "every"}, "heads is 'every'"),
        ({}, "'attention'.*heads"),
        ({"heads": 0}, "heads is 0"),
        ({"heads": 2, "sigma": -1.0}, "sigma is -1.0"),
    ],
    "attention[heads=all]": [({"stats": "batch"}, "stats='batch' would have no effect")],
    "similarity+attention": [({"heads": 2}, "'similarity' and 'attention'")],
    "ac": [
        ({"mix": 9}, "mix is 9.* 4"),
        ({"skip": -1}, "skip is -1"),
        ({"features": "random", "spread": "iqr"}, "features='random' uses no spreads, so spread would"),
    ],
    "smooth": [
        ({"control": "quantil"}, "'quantile'"),
        ({"budget": -1.0}, "budget is -1.0"),
        ({"eps": -0.1}, "eps is -0.1"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"most": 1}, r"most is 1\b.* 2\b.* 4\b"),
        ({"most": 9}, r"most is 9\b.* 2\b.* 4\b"),
        ({"a": 0.0}, "a is 0.0; an exponent"),
        ({"b": -1.0}, "b is -1.0; an exponent"),
        ({"a": math.inf}, "a is inf"),
        ({"eta": -3.0}, "eta is -3.0; expected control='loss'"),
        ({"eta": math.nan, "control": "loss"}, "eta is nan, not a number"),
        ({"noise": "gausian"}, "'gaussian'"),
        ({"noise": "uniform", "noise_std": -1.0}, "noise_std is -1.0.*not negative"),
    ],
    "expert-choice": [({"factor": 0.0}, "factor is 0.0"), ({"evaluate": "sane"}, "same")],
    "sinkhorn": [
        ({"sparsity": 1}, "sparsity is 1; it must be between 2"),
        ({"sparsity": 2, "gamma": 0.0}, "gamma is 0.0.*positive"),
        ({"gamma": 0.5}, "gamma is 0.5.*add sparsity"),
    ],
    "base": [({"k": 9}, "k is 9")],
    "capacity": [({"factor": 0}, "factor is 0"), ({"policy": "drp"}, "drop"), ({"order": "x"}, "gate")],
    "hash": [
        ({}, "needs the option vocabulary"),
        ({"vocabulary": 0}, "vocabulary is 0"),
        ({**IDS, "frequencies": [1.0] * 50}, "add balanced=True"),
        ({**IDS, "frequencies": [1.0], "balanced": True}, r"shape \(1,\)"),
    ],
    "stablemoe": [
        ({**IDS, "stage": 1.5}, "stage is 1.5"),
        ({**IDS, "width": 0}, "width is 0"),
        ({**IDS, "distill": -1.0}, "distill is -1"),
    ],
    "grouped": GROUPS,
    "hierarchical": GROUPS,
    "hierarchical[by=modality]": [
        ({"modalities": 3}, "modalities is 3; it must be between 1 and the number of groups, 2"),
        ({"k": 3}, "k is 3, and the groups of a modality may have only 2 experts"),
        ({"top_groups": 2}, "top_groups is 2; it must be between 1 and the number of groups, 1"),
        ({"by": "modalty"}, "given twice"),
    ],
    "hierarchical[weights=softmax]": [({"top_groups": 1}, "weights is 'softmax' and top_groups 1.*use weights='switch'")],
    "symphony+hierarchical[by=modality]": [({}, "Hierarchical takes no ExpertGraph: it keeps a token in the groups of")],
}
CASES = [(name, options, says) for name, cases in WRONG.items() for options, says in cases]


@pytest.mark.parametrize(("name", "options", "says"), CASES, ids=str)
def test_a_wrong_option_is_one_clear_sentence(name: str, options: dict[str, Any], says: str) -> None:
    assert_refused(says, create_router, name, dim=8, experts=4, **options)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: TopK(3, 1, weights="softmx"), "'softmax'"),  # type: ignore[arg-type]
        (lambda: SmoothTopK(3, 1, control="quantil"), "'quantile'"),  # type: ignore[arg-type]
        (lambda: create_noise(4, 3, noise="gausian"), "'gaussian'"),  # type: ignore[arg-type]
    ],
)
def test_constructors_check_what_no_name_has_checked(build: Callable[[], object], says: str) -> None:
    assert_refused(says, build)
