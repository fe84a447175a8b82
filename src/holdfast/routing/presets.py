"""The routers that Holdfast registers, and the functions that build, list and register routers by name.

A preset lists only the stages it replaces. Linear scores and top-k are the defaults of the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from holdfast.plugins import watch
from holdfast.routing.balanced import BaseAssignment, ExpertChoice, Sinkhorn
from holdfast.routing.capacity import Capacity
from holdfast.routing.clustering import Clustered
from holdfast.routing.expert_graph import ExpertGraph
from holdfast.routing.fixed import Distilled, EqualWeights, HashedIds
from holdfast.routing.hierarchy import Hierarchical
from holdfast.routing.merging import Merged, SequenceScore
from holdfast.routing.parts import Part
from holdfast.routing.registry import Preset, Registry
from holdfast.routing.router import Router
from holdfast.routing.scores import Cosine, Frozen, ModalityLinear
from holdfast.routing.selection import TopK
from holdfast.routing.slots import Slots, SlotScore
from holdfast.routing.smoothing import SmoothTopK
from holdfast.routing.thresholds import ReLU, Sparsemax, TopP
from holdfast.routing.token_graph import AttentionPosterior, Similarity

PartClass = TypeVar("PartClass", bound=type[Part])

REGISTRY = Registry("router")
watch(REGISTRY)

PRESETS = {  # by the family under which they are listed
    "plain": [
        Preset("smoe", "linear scores, top-k, weights renormalised", "Shazeer et al. 2017"),
        Preset(
            "switch",
            "linear scores, top-1 by default, weights are the raw gates",
            "Fedus et al. 2022",
            {"select": TopK},
            {"k": 1, "weights": "switch"},
        ),
        Preset(
            "xmoe", "cosine scores in a low-dimensional space, learned temperature", "Chi et al. 2022", {"score": Cosine}
        ),
        Preset(
            "smoe-dropout",
            "frozen random scores; k grows to all experts during training",
            "Chen et al. 2023",
            {"score": Frozen, "select": TopK},
            {"k_final": "all"},
        ),
        Preset("random", "frozen random scores, top-k", "Chen et al. 2023; SymphonySMoE, appendix C", {"score": Frozen}),
    ],
    "thresholds": [
        Preset(
            "top-p",
            "every expert whose gate exceeds p, fixed or learned",
            "Guo et al. 2024; Nielsen et al. 2025, C.10",
            {"select": TopP},
        ),
        Preset("remoe", "ReLU gates, an adaptive L1 penalty steers to k experts", "Wang et al. 2025", {"select": ReLU}),
    ],
    "robust": [
        Preset(
            "symphony",
            "experts that are selected together raise each other's gates, by a learned expert graph",
            "SymphonySMoE, algorithm 1",
            {"expert": ExpertGraph},
            {"weights": "switch"},
        ),
        Preset(
            "similarity",
            "similar tokens of a sequence share their gates",
            "Mutual-Inform SMoE, definition 1",
            {"token": Similarity},
            {"weights": "softmax"},
        ),
        Preset(
            "attention",
            "a token takes the gates of those that explain its attention output",
            "Mutual-Inform SMoE, lemma 1",
            {"token": AttentionPosterior},
            {"weights": "softmax"},
        ),
        Preset(
            "ac",
            "features in which a token's cluster is tight count more",
            "ACMoE, Nielsen et al. 2025",
            {"cluster": Clustered},
        ),
        Preset(
            "smooth",
            "experts just below the k-th fade in, so the output is continuous",
            "Geometric and Stochastic Analysis of Discontinuities in SMoE",
            {"select": SmoothTopK},
        ),
    ],
    "balanced": [
        Preset(
            "expert-choice",
            "every expert takes its best tokens in training; top-k in evaluation",
            "Zhou et al. 2022",
            {"select": ExpertChoice},
        ),
        Preset(
            "sinkhorn",
            "top-k after optimal transport has balanced the experts in training",
            "Clark et al. 2022",
            {"select": Sinkhorn},
        ),
        Preset(
            "base",
            "an auction assigns at most ceil(T k / E) tokens to every expert in training",
            "BASE layers, Lewis et al. 2021",
            {"select": BaseAssignment},
            {"k": 1},
        ),
        Preset(
            "capacity",
            "limits the tokens of every expert, after any selector; the rest is dropped or rerouted",
            "Lepikhin et al. 2021; Fedus et al. 2022",
            {"capacity": Capacity},
        ),
    ],
    "fixed": [
        Preset(
            "hash",
            "experts by a fixed random table of token ids, weights 1/k",
            "Roller et al. 2021",
            {"score": HashedIds, "select": EqualWeights},
            {"k": 1},
        ),
        Preset(
            "stablemoe",
            "learns which experts a token id goes to, then freezes the assignment",
            "Dai et al. 2022",
            {"select": Distilled},
            {"k": 1},
        ),
    ],
    "gates": [
        Preset(
            "sparsemax",
            "every expert with a positive sparsemax gate",
            "Martins and Astudillo 2016; survey 6.1",
            {"select": Sparsemax},
        ),
        Preset(
            "hierarchical",
            "the k best experts within the best groups of experts",
            "Jordan and Jacobs 1994; survey 3.5",
            {"select": Hierarchical},
        ),
        Preset("modality", "a linear score for each modality over shared experts", "survey 3.5", {"score": ModalityLinear}),
    ],
    "layers": [
        Preset(
            "softmoe",
            "a layer of its own: experts run on slots, which are weighted means of a sequence's tokens",
            "Puigcerver et al. 2024",
            {"score": SlotScore, "select": Slots},
            k=2,
        ),
        Preset(
            "smear",
            "a layer of its own: all experts are merged into one for each sequence",
            "Muqeeth et al. 2024",
            {"score": SequenceScore, "select": Merged},
            k=2,
        ),
    ],
}
for _family, _presets in PRESETS.items():
    for _preset in _presets:
        REGISTRY.add(replace(_preset, family=_family))


def create_router(name: str, *, dim: int, experts: int, k: int | None = None, **options: Any) -> Router:
    """Build a router by name, for tokens of width `dim`: `create_router("xmoe+top-p", dim=512, experts=16, p=0.1)`.

    `+` joins names that replace different stages. `options` are those of `Router` (losses, layer, check_finite) and of the
    parts that the names bring; an unknown option raises ValueError.
    """
    return REGISTRY.build(name, dim=dim, experts=experts, k=k, **options)


def list_routers() -> dict[str, str]:
    """Return every registered name with one line of help."""
    return {preset.name: f"{preset.about} ({preset.paper})" for preset in REGISTRY}


def register(
    name: str,
    *,
    stage: str,
    about: str,
    paper: str,
    defaults: Mapping[str, Any] | None = None,
    also: Mapping[str, type[Part]] | None = None,
) -> Callable[[PartClass], PartClass]:
    """Return a class decorator that makes a part available to `create_router` under `name`.

    stage       what the part fills: "score", "cluster", "expert", "token", "select" or "capacity"
    about       one line of help
    paper       the source of the method
    defaults    default values of its options
    also        other stages that the name replaces, stage to the class of its part: `also={"select": TopK},
                defaults={"k_final": "all"}` on a score makes `smoe-dropout`
    """

    def add(part: PartClass) -> PartClass:
        others = also or {}
        if stage in others:
            raise ValueError(f"{name!r} replaces the stage {stage!r} with {part.__name__} and again in `also`; remove one.")
        REGISTRY.add(Preset(name, about, paper, {stage: part, **others}, defaults or {}))
        return part

    return add
