"""Router names as people write them, `similarity[tau=2]+smooth[budget=0.5]`, and the values of their options.

This grammar holds everywhere: in `create_router`, `reroute` and `sparsify`, in commands and in comparisons.


Routers by name: which slots a name claims, and how names joined by `+` become one pipeline.
"""

import contextlib
import importlib
import inspect
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from holdfast.errors import unknown
from holdfast.routing.parts import Informer, Part, Score, Selector
from holdfast.routing.router import LossTerms, Router
from holdfast.routing.selection import Rule, check_k

_NAME = re.compile(r"(?P<name>[^\[\]]+)(\[(?P<options>[^\[\]]*)\])?")  # a name, and its options in brackets
_COMMA = re.compile(r",(?![^\[]*\])")  # a comma outside brackets
_PLUS = re.compile(r"\+(?![^\[]*\])")  # a plus sign outside brackets
_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_TEXT = re.compile(r"[\w./~-]([\w ./:+~-]*[\w./+~-])?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("", "null", "none", "~"), None),
}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "empty"}


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest value of a number, for `Annotated[int, Limits(...)]`, and how an error names them."""

    low: float
    high: float
    words: str


def split_routers(written: str) -> list[str]:
    """Return the routers of `smoe,similarity[causal=false,tau=2]`, which commas outside brackets separate."""
    return [part.strip() for part in _COMMA.split(written) if part.strip()]


def split_options(written: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names that `+` joins, without brackets, and the options of all brackets, their types not checked yet.

    An option may stand in the brackets of any name: it goes to the part that has it.
    """
    if not isinstance(written, str):
        raise ValueError(
            f"a router is named by a string, such as 'smooth' or 'ac+symphony', not by a {type(written).__name__}."
        )
    names: list[str] = []
    options: dict[str, Any] = {}
    for part in _PLUS.split(written):
        found = _NAME.fullmatch(part.strip())
        if found is None and part.strip():
            raise ValueError(
                f"{written!r} is not a router: write a name, or a name with its options in brackets, as in "
                "similarity[causal=false]."
            )
        names.append("" if found is None else found["name"].strip())
        for pair in filter(None, map(str.strip, ((found and found["options"]) or "").split(","))):
            key, sign, value = pair.partition("=")
            key = key.strip()
            if not sign or not key:
                raise ValueError(f"{pair!r} in {written!r} is not an option: write option=value.")
            if key in options:
                raise ValueError(f"{written!r} gives the option {key} twice.")
            options[key] = _read_value(value.strip(), pair, written)
    return names, options


def _read_value(text: str, pair: str, written: str) -> Any:
    """Return a truth value, a number, None or a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    if not _TEXT.fullmatch(text) or ": " in text:
        raise ValueError(f"{pair!r} in {written!r} has a value that cannot be read: write a number, true, false or a word.")
    return text


def check_value(kind: Any, value: Any, what: str) -> Any:
    """Return `value` as the type `kind`; where it does not fit, raise a ValueError that says what `what` must be."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, str) and str not in kinds and any(_plain(each) is float for each in kinds):
        with contextlib.suppress(ValueError):  # YAML reads 1e-3 as a text
            value = float(value)
    if not any(_fits(each, value) for each in kinds):
        raise ValueError(f"{what} is {value!r}, not {' or '.join(map(_words, kinds))}.")
    return float(value) if _plain(kind) is float else value


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _limits(kind: Any) -> Limits | None:
    found = kind.__metadata__ if get_origin(kind) is Annotated else ()
    return next((entry for entry in found if isinstance(entry, Limits)), None)


def _fits(kind: Any, value: Any) -> bool:
    limits = _limits(kind)
    if limits is not None:
        return _fits(_plain(kind), value) and limits.low <= value <= limits.high
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inside
    if origin is list:
        return isinstance(value, list) and all(_fits(inside[0], entry) for entry in value)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind not in TYPE_NAMES:
        return True  # a part may declare any other type, which is not checked here
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _words(kind: Any) -> str:
    limits = _limits(kind)
    if limits is not None:
        return limits.words
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(repr(option) for option in inside)
    if origin is list:
        return "a list of whole numbers" if _plain(inside[0]) is int else "a list"
    return TYPE_NAMES.get(kind, "a section")


# In the order of the pipeline. "cluster" wraps the score; "expert" and "token" are the two sides an informer acts on.
SLOTS: dict[str, type[Part]] = {
    "score": Score,
    "cluster": Score,
    "expert": Informer,
    "token": Informer,
    "select": Selector,
}
DEFAULT_PARTS = {"score": "holdfast.routing.scores:Linear", "select": "holdfast.routing.selection:TopK"}
RESERVED = "+[],=@"  # characters of the grammar, which no name holds
GIVEN = ("dim", "experts", "k", "base", "rule")  # what every part may ask for; all else is an option


@dataclass(frozen=True)
class Preset:
    """A named router: the parts it puts into the slots it claims, and defaults for their options.

    What a name does not claim stays free for another name, and falls back to linear scores and top-k. Where two names have
    defaults for one option, the later slot's holds.
    """

    name: str
    about: str
    paper: str
    claims: Mapping[str, type[Part] | str] = field(default_factory=dict)  # slot -> class, or "module:Class" to import late
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or set(self.name) & set(RESERVED) or self.name != self.name.strip():
            raise ValueError(
                f"{self.name!r} cannot name a router: a name is not empty, has no spaces around it, and holds none of "
                f"{RESERVED}"
            )
        for slot in self.claims:
            if slot not in SLOTS:
                raise ValueError(unknown("slot", slot, SLOTS))


@dataclass(frozen=True)
class Host:
    """The model that a router enters: what it brings along, so that the router starts from what the model does."""

    pretrained: bool = False  # parts start with the defaults they declare under `entering`
    score: Score | None = None  # the model's own scores, where no name claims that slot
    rule: Rule | None = None  # the model's own convention, unless a name or an option says how to weigh
    scale: float = 1.0
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # what only the model knows (heads, depth, ...), for parts that ask


class Registry:
    """Presets by name. A clash raises, a typo gets the nearest name, classes are imported when first built."""

    def __init__(self) -> None:
        self._presets: dict[str, Preset] = {}
        self._discover: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Preset]:
        self._find_more()
        return iter(list(self._presets.values()))

    def names(self) -> list[str]:
        """Return the names that are registered by now, without looking for more."""
        return list(self._presets)

    def discover_with(self, find: Callable[[], None]) -> None:
        """Call `find`, which registers more presets, once: when presets are listed, or a name is not known."""
        self._discover = find

    def _find_more(self) -> None:
        find, self._discover = self._discover, None
        if find is not None:
            find()

    def add(self, preset: Preset) -> Preset:
        if preset.name in self._presets:
            raise ValueError(f"there is already a router named {preset.name!r}; choose another name.")
        self._presets[preset.name] = preset
        return preset

    def remove(self, name: str) -> None:
        del self._presets[self[name].name]

    def __getitem__(self, name: str) -> Preset:
        if name not in self._presets:
            self._find_more()
        if name not in self._presets:
            raise ValueError(
                f"{unknown('router', name, self._presets)} A router of your own is loaded with --plugin FILE, or by "
                "importing the module that registers it."
            )
        return self._presets[name]

    def parse(self, name: str) -> list[Preset]:
        """Return the presets that `name` joins with `+`; raise an error if one is unknown or two claim one slot."""
        presets = [self[part] for part in split_options(name)[0]]
        _claims(presets)
        return presets

    def resolve(self, written: str, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return the name without brackets, and the options in brackets, their types checked, joined with `options`.

        An option that is unknown, or that is given both in brackets and in `options`, is an error.
        """
        names, bracketed = split_options(written)
        name, given = "+".join(names), dict(options or {})
        parts = self.parts(name)
        known = sorted({option for part in parts for option in _options(part)})
        for option in (*bracketed, *given):
            if option not in known:
                raise ValueError(f"{unknown('option', option, known)[:-1]} for router {name!r}.")
            if option in bracketed and option in given:
                raise ValueError(f"the option {option} is given twice, in {written!r} and by keyword; give it once.")
        kinds = {option: kind for part in parts for option, kind in get_type_hints(part.__init__).items()}
        checked = {
            option: check_value(kinds.get(option, Any), value, f"the option {option}") for option, value in bracketed.items()
        }
        return name, checked | given

    def parts(self, name: str) -> list[type[Part]]:
        """The classes that a router of this name is made of."""
        return [_load(part) for part in (DEFAULT_PARTS | _claims(self.parse(name))).values()]

    def options(self, name: str) -> list[str]:
        """What `build` takes for this router beyond its sizes, in alphabetical order."""
        return sorted({option for part in self.parts(name) for option in _options(part)})

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
        host: Host | None = None,
        **options: Any,
    ) -> Router:
        host = host or Host()
        name, options = self.resolve(name, options)
        presets = self.parse(name)
        parts = DEFAULT_PARTS | _claims(presets)
        defaults: dict[str, Any] = {"k": 2}
        for preset in sorted(presets, key=_last_slot):  # in the order of the pipeline, not of the names
            defaults |= preset.defaults
        usual_k = min(defaults.pop("k"), experts)
        given = {"dim": dim, "experts": experts, "k": usual_k if k is None else k}
        _check_sizes(**given)
        classes = {slot: _load(part) for slot, part in parts.items()}
        known = self.options(name)
        if host.pretrained:
            for part in classes.values():
                defaults |= part.entering
        brought = {option: value for option, value in host.options.items() if option in known}
        values = given | defaults | brought | options
        if host.rule is not None and "weights" not in options and not _weighs(presets):
            values["rule"] = host.rule
        built: dict[str, Any] = {}
        if host.score is not None and "score" not in _claims(presets):
            built["score"] = host.score
        for slot in SLOTS:
            if slot in classes and slot not in built:
                base = {"base": built["score"]} if slot == "cluster" else {}
                built[slot] = _construct(classes[slot], values | base, name)
        return Router(
            score=built.get("cluster", built["score"]),
            select=built["select"],
            inform=[built[side] for side in ("expert", "token") if side in built],
            losses=losses,
            layer=layer,
            check_finite=check_finite,
            scale=host.scale,
        )


def _weighs(presets: list[Preset]) -> bool:
    """Does a name say itself how chosen experts are weighted?"""
    return any("select" in preset.claims and "weights" in preset.defaults for preset in presets)


def _last_slot(preset: Preset) -> int:
    return max((list(SLOTS).index(slot) for slot in preset.claims), default=-1)


def _construct(part: type[Part], values: Mapping[str, Any], name: str) -> Part:
    """The part with those of the values that it takes."""
    parameters = inspect.signature(part).parameters
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in values:
            raise ValueError(f"router {name!r} needs the option {parameter.name}.")
    return part(**{key: value for key, value in values.items() if key in parameters})


def _claims(presets: list[Preset]) -> dict[str, type[Part] | str]:
    claimed: dict[str, type[Part] | str] = {}
    owner: dict[str, str] = {}
    for preset in presets:
        for slot, part in preset.claims.items():
            if slot in owner:
                where = f"the {slot}-side informer" if slot in ("expert", "token") else f"the {slot} slot"
                raise ValueError(f"{owner[slot]!r} and {preset.name!r} both claim {where}; a router has room for one.")
            owner[slot], claimed[slot] = preset.name, part
    return claimed


def _check_sizes(dim: int, experts: int, k: int) -> None:
    if dim < 1:
        raise ValueError(f"dim is {dim}; tokens have a width of at least 1.")
    if experts < 1:
        raise ValueError(f"experts is {experts}; a router needs at least 1.")
    check_k(k, experts)


def _load(part: type[Part] | str) -> type[Part]:
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    loaded: type[Part] = getattr(importlib.import_module(module), name)
    return loaded


def _options(part: type[Part]) -> list[str]:
    return [name for name in inspect.signature(part).parameters if name not in GIVEN]
