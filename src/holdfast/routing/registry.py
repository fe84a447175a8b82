"""Router names: which parts a name stands for, and how names joined by `+` become one pipeline.

    "similarity[tau=2]+smooth[budget=0.5]"

This grammar is used everywhere: by `create_router`, `reroute` and `sparsify`, by commands and by comparisons. A name is a
`Preset`, which replaces one stage of the pipeline or more. Options in brackets go to the parts that have them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.checked import check_value, type_hints
from holdfast.errors import require_known, unknown_name
from holdfast.plugins import Registry as NamedEntries
from holdfast.routing.declarations import LayerKind
from holdfast.routing.dropout import create_dropout
from holdfast.routing.grammar import option_name, split_options
from holdfast.routing.noise import create_noise
from holdfast.routing.parts import Informer, Part, Score, Selector
from holdfast.routing.router import LossTerms, Router
from holdfast.routing.rules import Rule
from holdfast.routing.scores import Linear
from holdfast.routing.selection import TopK, check_k

# What a part can fill, in the order of the pipeline. "cluster" wraps the score and "capacity" the selector; "expert" and
# "token" are the two sides of the stage inform.
STAGES: dict[str, type[Part]] = {
    "score": Score,
    "cluster": Score,
    "expert": Informer,
    "token": Informer,
    "select": Selector,
    "capacity": Selector,
}
WRAPPERS = {"cluster": "score", "capacity": "select"}  # a part of the first stage gets the part of the second as `base`
DEFAULT_PARTS: dict[str, type[Part]] = {"score": Linear, "select": TopK}
RESERVED = "+[],=@|"  # characters of the grammar, which no name may contain
FAMILIES = {  # headings under which routers are listed, in this order
    "plain": "scores of each token by itself, and a fixed number of experts",
    "thresholds": "every expert above a threshold, so tokens use different numbers of experts",
    "robust": "the routers of the robustness papers",
    "balanced": "experts take equal shares of the batch, or at most their capacity",
    "fixed": "experts that are fixed before training, or frozen during it",
    "gates": "other rules for the gates of a token",
    "layers": "layers that mix tokens or experts instead of selecting them",
    "plugins": "routers of yours, and of installed packages",
}
NOISE = ("noise", "noise_std", "noise_temperature")  # the options of `create_noise`, for every selector
DROPOUT = ("drop", "per")  # those of `create_dropout`
SCALING = "gradient_scaling"  # of `Router`, for every selector
GIVEN = (
    "dim",
    "experts",
    "k",
    "base",
    "rule",
    "layer",
)  # parameters of parts that are not options: `Registry.build` passes them


@dataclass(frozen=True)
class Preset:
    """A named router: the parts it brings, one for each stage it replaces, and defaults for their options.

    Stages that no name replaces have the default parts: linear scores and top-k. If two names have defaults for one option,
    the name with the later stage wins.
    """

    name: str
    about: str
    paper: str
    parts: Mapping[str, type[Part]] = field(default_factory=dict)  # by stage
    defaults: Mapping[str, Any] = field(default_factory=dict)
    family: str = "plugins"  # the heading under which it is listed
    k: int | None = None  # the k of its parts, whatever k is asked for; for layers in which a token has no k experts

    def __post_init__(self) -> None:
        if not self.name or set(self.name) & set(RESERVED) or self.name != self.name.strip():
            raise ValueError(
                f"{self.name!r} cannot be the name of a router: a name is not empty, has no spaces around it, and contains "
                f"none of {RESERVED}"
            )
        for stage in self.parts:
            require_known("stage", stage, STAGES)
        require_known("family of routers", self.family, FAMILIES)


@dataclass(frozen=True)
class HostModel:
    """What a model brings to the router that is built for one of its layers, so that it starts from the model's outputs."""

    pretrained: bool = False  # parts start with their `pretrained_defaults`
    score: Score | None = None  # the model's own score, used if no name replaces that stage
    rule: Rule | None = None  # the model's own rule, used if neither a name nor an option sets the weights
    scale: float = 1.0  # `Router.scale`
    options: Mapping[str, Any] = field(default_factory=dict)  # facts about the model (heads, depth, ...) for parts' options


class Registry(NamedEntries[Preset]):
    """Presets by name."""

    def parse(self, name: str) -> list[Preset]:
        """Return the presets that `name` joins with `+`; raise ValueError if one is unknown or two replace one stage."""
        presets = [self[part] for part in split_options(name)[0]]
        _merged_parts(presets)
        return presets

    def resolve(self, written: str, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return the name without brackets, and all options: those in brackets, with checked types, and `options`.

        `k` is an argument of every router, and an option in brackets if a part uses it. A name with layers is an error:
        `presets.resolve_layers` reads those.
        Raise ValueError if an option is unknown, or if it is given both in brackets and in `options`.
        """
        names, bracketed = split_options(written)
        name, given = "+".join(names), {option_name(option): value for option, value in (options or {}).items()}
        presets, parts, known = self.parse(name), self.part_classes(name), sorted({"k", *self.options(name)})
        for option in (*bracketed, *given):
            if option not in known:
                raise ValueError(f"router {name!r}: {unknown_name('option', option, known)}")
            if option in bracketed and option in given:
                raise ValueError(f"the option {option} is given twice, in {written!r} and by keyword; give it once.")
            owners = [preset.name for preset in presets if any(option in _options(part) for part in preset.parts.values())]
            if len(owners) > 1:
                raise ValueError(f"{' and '.join(owners)} both have an option {option}, so {name!r} cannot set it for one.")
        if "k" in bracketed:
            self.require_k(name)
        kinds: dict[str, Any] = {}
        for function in (create_noise, create_dropout, *(part.__init__ for part in parts)):
            kinds |= {option_name(parameter): kind for parameter, kind in type_hints(function).items()}
        kinds |= {"k": int, SCALING: float | None}
        checked = {
            option: check_value(kinds.get(option, Any), value, f"the option {option}")
            for option, value in {**bracketed, **given}.items()
        }
        return name, checked

    def uses_k(self, name: str) -> bool:
        """Return whether a part of the router `name` uses k."""
        fixed = any(preset.k is not None for preset in self.parse(name))
        return not fixed and any("k" in _parameters(part) for part in self.part_classes(name))

    def require_k(self, name: str) -> None:
        """Raise ValueError if no part of the router `name` uses k."""
        if not self.uses_k(name):
            raise ValueError(f"router {name!r} has no k: it does not select a fixed number of experts; leave k out.")

    def part_classes(self, name: str) -> list[type[Part]]:
        """Return the classes of all parts of the router `name`, default parts included."""
        return list((DEFAULT_PARTS | _merged_parts(self.parse(name))).values())

    def name_of(self, part: Part) -> str:
        """Return the name under which the class of a part is registered; the name of the class if it is not."""
        kind = type(part)
        return next((preset.name for preset in self if kind in preset.parts.values()), kind.__name__)

    def layer_kind(self, name: str) -> LayerKind:
        """Return the kind of layer that the router `name` is for."""
        kinds = [part.layer_kind for part in self.part_classes(name) if issubclass(part, Selector)]
        return next((kind for kind in kinds if kind != "moe"), "moe")

    def options(self, name: str) -> list[str]:
        """Return the names of the options of the router `name`, in alphabetical order."""
        owners: list[Callable[..., Any]] = [create_noise, create_dropout, *self.part_classes(name)]
        return sorted({SCALING, *(option for owner in owners for option in _options(owner))})

    def build(
        self,
        name: str,
        *,
        dim: int,
        experts: int,
        k: int | None = None,
        losses: LossTerms | None = None,
        layer: str = "router",
        check_finite: bool = True,
        host: HostModel | None = None,
        **options: Any,
    ) -> Router:
        """Build the router `name` for tokens of width `dim`. Other arguments are those of `Router` and of its parts."""
        host = host or HostModel()
        name, options = self.resolve(name, options if k is None else {**options, "k": k})
        presets = self.parse(name)
        replaced = _merged_parts(presets)
        classes = DEFAULT_PARTS | replaced
        defaults: dict[str, Any] = {"k": 2}
        stages = list(STAGES)
        # In the order of the pipeline, not of the names.
        for preset in sorted(presets, key=lambda preset: max(map(stages.index, preset.parts), default=-1)):
            defaults |= preset.defaults
        default_k = min(defaults.pop("k"), experts)
        sizes = {"dim": dim, "experts": experts, "k": options.pop("k", default_k)}
        for fixed in (preset.k for preset in presets if preset.k is not None):
            sizes["k"] = min(fixed, experts)
        for size in ("dim", "experts"):
            if sizes[size] < 1:
                raise ValueError(f"{size} is {sizes[size]}; a router needs at least 1.")
        check_k(sizes["k"], experts)
        if host.pretrained:
            for part in classes.values():
                defaults |= part.pretrained_defaults
        known = self.options(name)
        from_host = {option: value for option, value in host.options.items() if option in known}
        values = sizes | defaults | from_host | options
        sets_weights = any("select" in preset.parts and "weights" in preset.defaults for preset in presets)
        if host.rule is not None and "weights" not in options and not sets_weights:
            values["rule"] = host.rule
        built: dict[str, Any] = {}
        if host.score is not None and "score" not in replaced:
            built["score"] = host.score
        # An option that a part of a name has is not also for the parts that no name brings.
        of_names = {option for part in replaced.values() for option in _options(part)} & options.keys()
        for stage in STAGES:
            if stage in classes and stage not in built:
                base = {"base": built[WRAPPERS[stage]]} if stage in WRAPPERS else {}
                given = {key: value for key, value in values.items() if stage in replaced or key not in of_names}
                built[stage] = _construct(classes[stage], given | base, name)
        return Router(
            score=built.get("cluster", built["score"]),
            select=built.get("capacity", built["select"]),
            inform=[built[side] for side in ("expert", "token") if side in built],
            noise=create_noise(dim, experts, **{key: values[key] for key in NOISE if key in values}),
            dropout=create_dropout(experts, sizes["k"], layer, **{key: values[key] for key in DROPOUT if key in values}),
            gradient_scaling=values.get(SCALING),
            losses=losses,
            layer=layer,
            check_finite=check_finite,
            scale=host.scale,
        )


def _construct(part: type[Part], values: Mapping[str, Any], name: str) -> Part:
    """Return the part, built with those of the values that its constructor takes."""
    parameters = {option_name(key): parameter for key, parameter in _parameters(part).items()}
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in values:
            raise ValueError(f"router {name!r} needs the option {option}.")
    return part(**{parameter.name: values[option] for option, parameter in parameters.items() if option in values})


def _merged_parts(presets: list[Preset]) -> dict[str, type[Part]]:
    """Return the parts of all presets by stage; raise ValueError if two presets replace the same stage."""
    merged: dict[str, type[Part]] = {}
    replaced_by: dict[str, str] = {}
    for preset in presets:
        for stage, part in preset.parts.items():
            if stage in merged:
                what = f"the {stage}-side informer" if stage in ("expert", "token") else f"the stage {stage!r}"
                raise ValueError(f"{replaced_by[stage]!r} and {preset.name!r} both replace {what}; use one of them.")
            replaced_by[stage], merged[stage] = preset.name, part
    return merged


# A model builds a router for each layer, and reading signatures took most of the time of building one.
@functools.cache
def _parameters(part: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(part).parameters
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # of a part without a constructor of its own
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in packed}


def _options(part: Callable[..., Any]) -> list[str]:
    return [option_name(name) for name in _parameters(part) if name not in GIVEN]
