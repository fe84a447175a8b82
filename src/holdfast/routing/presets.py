"""The routers that Holdfast registers, and the functions that build, list and register routers by name.

A preset lists only the stages it replaces. Linear scores and top-k are the defaults of the others.

**Names with layers**: `ac@1,3,5`, `similarity@even|attention@odd`, `xmoe+symphony@last:2|smoe`.

    router@layers   the router is only for these MoE layers: indices, counted from 0 (`1,3,5`), `even` (0, 2, ...),
                    `odd` (1, 3, ...), `first:n`, `last:n` or `all`. @ follows the whole router, with its options
    one|another     routers for different layers. One of them may have no @: it is for the layers that no other names

The layers that @ chooses from are the MoE layers of a model, or those of them that an argument `layers` has chosen. What a
layer gets that no router is for depends on the function: `sparsify` gives it `smoe`, `reroute` does not change it.

`k` is an option of every router whose scores do not decide how many experts a token uses: `smoe[k=3]`. An argument `k`
beside it is an error, unless the name has layers: there it is for the layers whose router gives no k of its own.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from holdfast.errors import unknown_name
from holdfast.plugins import watch
from holdfast.routing.balanced import BaseAssignment, ExpertChoice, Sinkhorn
from holdfast.routing.capacity import Capacity
from holdfast.routing.clustering import Clustered
from holdfast.routing.expert_graph import ExpertGraph
from holdfast.routing.fixed import Distilled, EqualWeights, HashedIds
from holdfast.routing.grammar import NAMES_LAYERS, split_options, written_option
from holdfast.routing.hierarchy import Grouped, Hierarchical, TwoLevelLinear
from holdfast.routing.parts import Part
from holdfast.routing.registry import Preset, Registry
from holdfast.routing.router import Router
from holdfast.routing.scores import Cosine, Frozen, ModalityLinear, TwoLayer
from holdfast.routing.selection import TopK
from holdfast.routing.smoothing import SmoothTopK
from holdfast.routing.soft import Merged, SequenceScore, Slots, SlotScore
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
            "grouped",
            "the k best experts within the groups of experts with the largest sums of gates",
            "group-limited top-k, DeepSeek-AI 2024",
            {"select": Grouped},
        ),
        Preset(
            "hierarchical",
            "a gate over groups of experts times a gate within each group",
            "Jordan and Jacobs 1994; survey 3.5",
            {"score": TwoLevelLinear, "select": Hierarchical},
            {"weights": "switch"},
        ),
        Preset("mlp", "scores of a network with one hidden layer, top-k", "survey 2.2", {"score": TwoLayer}),
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
NATIVE = "native"  # in a model that has routers: the family's own rule
_BAR = re.compile(r"\|(?![^\[]*\])")  # outside brackets
_AT = re.compile(r"@(?![^\[]*\])")
_INDICES = re.compile(r"\d+(\s*,\s*\d+)*")


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
        REGISTRY.register(Preset(name, about, paper, {stage: part, **others}, defaults or {}))
        return part

    return add


@dataclass(frozen=True)
class LayerRouter:
    """One router of a name, and the layers it is for."""

    router: str  # without brackets and layers
    options: dict[str, Any] = field(default_factory=dict)
    k: int | None = None
    layers: str | None = None  # as written; None: the layers that no other router of the name is for


def has_layers(written: str) -> bool:
    """Return whether a router name contains @ or |."""
    return NAMES_LAYERS.search(written) is not None


def resolve_layers(
    written: str, options: Mapping[str, Any] | None = None, *, k: int | None = None, native: bool = False
) -> list[LayerRouter]:
    """Return the routers of a name with their options; raise ValueError if a name, an option or a choice of layers is wrong.

    options   those that are not in brackets; in a name with layers, each goes to the routers that have it
    k         experts per token; in a name with layers, of the routers that give no k of their own
    native    whether `native`, the rule of the model's family, may be one of the routers
    """
    given = dict(options or {})
    if native and written == NATIVE:
        return [LayerRouter(NATIVE, given, k)]
    if not isinstance(written, str) or not has_layers(written):
        name, given = REGISTRY.resolve(written, given if k is None else {**given, "k": k})
        if k is not None:
            REGISTRY.require_k(name)
        return [LayerRouter(name, given, given.pop("k", None))]
    pairs = [_split_layers(part, written) for part in _BAR.split(written)]
    if sum(layers is None for _, layers in pairs) > 1:
        raise ValueError(f"{written!r} has two routers without @; only one can be for the remaining layers.")
    known = {router: {*REGISTRY.options(router), "k"} for router, _ in pairs if not (native and router == NATIVE)}
    for option in given:
        if not any(option in options for options in known.values()):
            raise ValueError(f"router {written!r}: {unknown_name('option', option, set().union(*known.values()))}")
    found = []
    for router, layers in pairs:
        name, own = router, dict[str, Any]()
        if router in known:
            name, own = REGISTRY.resolve(router, {key: value for key, value in given.items() if key in known[router]})
        own_k = own.pop("k", None)
        found.append(LayerRouter(name, own, k if own_k is None and name != NATIVE else own_k, layers))
    return found


def shared_k(written: str, k: int | None) -> int | None:
    """Return the k that the routers of a plan or a recipe share, for one of them: None if it uses none, or has its own."""
    if written == NATIVE or has_layers(written):
        return k
    name, own = REGISTRY.resolve(written, {})
    return k if "k" not in own and REGISTRY.uses_k(name) else None


def _split_layers(part: str, written: str) -> tuple[str, str | None]:
    """Return the router of one part of a name, and its layers as `1,3,5`, `even`, `first:2` and the like."""
    router, *rest = _AT.split(part)
    if not rest:
        return router.strip(), None
    layers = "@".join(rest).strip()
    kind, sign, number = layers.partition(":")
    if _INDICES.fullmatch(layers):
        return router.strip(), ",".join(sorted((index.strip() for index in layers.split(",")), key=int))
    if (sign and kind in ("first", "last") and number.isdecimal()) or (not sign and kind in ("all", "even", "odd")):
        return router.strip(), layers
    raise ValueError(
        f"@{layers} in {written!r} is no choice of layers: write indices such as @1,3,5, or @even, @odd, @first:2, @last:2 "
        "or @all, after the whole router and its options."
    )


def routers_by_layer(routers: list[LayerRouter], count: int) -> list[LayerRouter | None]:
    """Return the router for each of `count` layers, None for a layer that none is for.

    Raise ValueError if two routers are for one layer, or if a layer does not exist.
    """
    found: list[LayerRouter | None] = [None] * count
    for router in routers:
        for index in [] if router.layers is None else _indices(router, count):
            other = found[index]
            if other is not None:
                raise ValueError(
                    f"layer {index} is named twice, by {_layers_of(other)} and by {_layers_of(router)}; name it once "
                    f"(layers are counted from 0 to {count - 1})."
                )
            found[index] = router
    rest = next((router for router in routers if router.layers is None), None)
    return [rest if router is None else router for router in found]


def _indices(router: LayerRouter, count: int) -> list[int]:
    layers = str(router.layers)
    kind, sign, number = layers.partition(":")
    if sign:
        if not 1 <= int(number) <= count:
            raise ValueError(f"{_layers_of(router)} needs {number} layers; there are {count}, so 1 to {count} can be named.")
        return list(range(int(number))) if kind == "first" else list(range(count - int(number), count))
    if kind in ("all", "even", "odd"):
        chosen = list(range(int(kind == "odd"), count, 1 if kind == "all" else 2))
        if not chosen:
            raise ValueError(f"{_layers_of(router)} names no layer: there is only layer 0.")
        return chosen
    indices = [int(index) for index in layers.split(",")]
    for index in indices:
        if index >= count:
            raise ValueError(f"{_layers_of(router)}: there is no layer {index}; layers are counted from 0 to {count - 1}.")
    return indices


def _layers_of(router: LayerRouter) -> str:
    return f"'{router.router}@{router.layers}'"


def written_name(routers: list[LayerRouter]) -> str:
    """Return the name that `resolve_layers` reads as these routers: equal routers have equal names, however spelt."""
    names = []
    for router in routers:
        options = {**({} if router.k is None else {"k": router.k}), **dict(sorted(router.options.items()))}
        brackets = ",".join(f"{name}={written_option(value)}" for name, value in options.items())
        layers = "" if router.layers is None else f"@{router.layers}"
        names.append(f"{router.router}{f'[{brackets}]' if brackets else ''}{layers}")
    return "|".join(names)


def preset_names(written: str) -> list[str]:
    """Return all names that `+` and `|` join, without `native`."""
    if not has_layers(written):
        return split_options(written)[0]
    routers = (_split_layers(part, written)[0] for part in _BAR.split(written))
    return [name for router in routers for name in split_options(router)[0] if name != NATIVE]
