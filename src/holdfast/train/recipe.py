"""Dataclasses from plain values, every one checked. An unknown key raises an error that names the nearest.

Recipes: everything that makes a training run what it is, typed, from YAML. A key that nobody knows is an error.

Routers as they enter a comparison, written as `smoe,similarity[causal=false,tau=2],symphony+smooth`.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from holdfast.errors import require_extra, unknown
from holdfast.files import MIB, depth_exceeds, read_text
from holdfast.model_size import require_sane_numbers
from holdfast.routing.plugins import plugins_of
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import Limits, check_value, split_routers

Count = Annotated[int, Limits(0, math.inf, "a whole number from 0 up")]
Positive = Annotated[int, Limits(1, math.inf, "a whole number above 0")]
Length = Annotated[int, Limits(1, 2**24, "a whole number from 1 to 16,777,216")]
Pixels = Annotated[int, Limits(1, 2**13, "a whole number from 1 to 8,192")]
Steps = Annotated[int, Limits(1, 100_000, "a whole number from 1 to 100,000")]
Amount = Annotated[float, Limits(0, math.inf, "a number from 0 up")]
Share = Annotated[float, Limits(0, 1, "a number between 0 and 1")]


def typed(kind: Any, values: Any, path: str = "") -> Any:
    """An instance of the dataclass `kind`; a ValueError names the first value that does not fit, by its path."""
    if not isinstance(values, dict):
        raise ValueError(f"{path or 'it'} should be a section with keys, not {values!r}.")
    hints, known = get_type_hints(kind, include_extras=True), {entry.name: entry for entry in fields(kind)}
    for key in values:
        if key not in known:
            raise ValueError(f"{_join(path, key)}: {unknown('key', str(key), known)}")
    for name, entry in known.items():
        if name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{_join(path, name)} is missing.")
    return kind(**{key: _fitting(hints[key], value, _join(path, key)) for key, value in values.items()})


def _fitting(kind: Any, value: Any, path: str) -> Any:
    return typed(kind, value, path) if is_dataclass(kind) else check_value(kind, value, path)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


SHIPPED = "holdfast.train.recipes"
LONGEST_TOKEN = 100  # letters of the word that an attack swaps in


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A dense Hugging Face model, from its config."""

    family: str  # a dense family that holdfast.sparsify knows
    config: dict[str, Any] = field(default_factory=dict)  # of the family, as transformers names it


@dataclass(frozen=True, kw_only=True)
class SparsePart:
    """What `holdfast.sparsify` makes of it."""

    experts: Positive
    k: Positive = 2
    hidden: Positive | None = None
    layers: str | list[Count] = "all"
    init: Literal["copy", "random"] = "random"
    balance: Amount = 0.01  # coefficient of the balance loss

    def __post_init__(self) -> None:
        if self.k > self.experts:
            raise ValueError(f"k is {self.k}; it must be between 1 and the number of experts, {self.experts}.")


@dataclass(frozen=True, kw_only=True)
class DataPart:
    source: str = "python-docs"  # a name or a path
    tokens: str = "words"  # "words", "lines" (WikiText's words), "bytes", or the folder of a Hugging Face tokenizer
    vocabulary: Positive | None = 2000  # of words; empty: every word
    length: Length = 64  # of a block
    test_bytes: Positive | None = None  # only so much of the test text
    size: Pixels | None = None  # pixels a side that pictures from a folder are scaled to


@dataclass(frozen=True, kw_only=True)
class TrainingPart:
    steps: Positive
    batch: Positive
    learning_rate: Amount
    warmup: Count = 0  # steps, linear; constant after
    weight_decay: Amount = 0.0
    clip: Amount = 1.0  # largest norm of a gradient
    accumulate: Positive = 1  # micro-batches a step
    precision: Literal["float32", "bf16"] = "float32"
    save_every: Positive = 100  # steps; an interrupted run continues from the last
    keep: Literal["last", "best"] = "last"  # "best": of the saved ones, by the loss on held-out data


@dataclass(frozen=True, kw_only=True)
class AttackPart:
    """How the trained model is tried: texts by swapped words, pictures by PGD (and FGSM, SPSA and corruptions)."""

    rate: Share = 0.025  # of words swapped
    token: str | None = None  # what they are swapped for; empty: each for another word of the vocabulary. The papers': AAA
    budget: Share = 1 / 255  # l_inf, of pixels between 0 and 1
    steps: Steps = 20
    examples: Positive = 512  # test pictures that are attacked, evenly spread

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) > LONGEST_TOKEN:
            raise ValueError(f"attack.token has {len(self.token):,} letters; at most {LONGEST_TOKEN} are swapped in.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, but for its router and its seed."""

    about: str
    model: ModelPart
    sparse: SparsePart
    training: TrainingPart
    task: Literal["text", "pictures"] = "text"
    data: DataPart = DataPart()
    attack: AttackPart = AttackPart()

    def __post_init__(self) -> None:
        require_sane_numbers({**self.model.config, "experts": self.sparse.experts}, "model.config")

    def describe(self) -> dict[str, Any]:
        """As it would be written to YAML."""
        return asdict(self)


def recipes() -> dict[str, str]:
    """Every shipped recipe with one line of help."""
    return {name: _parse(_shipped(name), name).about for name in _names()}


def load_recipe(name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """A shipped recipe by name, or one from a file, with `changes` such as {"training.steps": 50}."""
    path = Path(name)
    if name in _names():
        text = _shipped(name)
    elif path.suffix in (".yaml", ".yml"):
        text = _read(path)
    else:
        raise ValueError(f"{unknown('recipe', name, _names())} The path of a .yaml file works too.")
    return _parse(text, name, changes)


def _names() -> list[str]:
    return sorted(
        file.name.removesuffix(".yaml") for file in resources.files(SHIPPED).iterdir() if file.name.endswith(".yaml")
    )


def _shipped(name: str) -> str:
    return resources.files(SHIPPED).joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _read(path: Path) -> str:
    try:
        return read_text(path, limit=MIB)
    except FileNotFoundError:
        raise ValueError(f"there is no recipe {path}.") from None


def _parse(text: str, name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    values = _from_yaml(text, name)
    if not isinstance(values, dict):
        raise ValueError(f"recipe {name} holds no keys.")
    for key, value in (changes or {}).items():
        _set(values, key, value)
    try:
        recipe: Recipe = typed(Recipe, values)
    except ValueError as mistake:
        raise ValueError(f"recipe {name}: {mistake}") from None
    return recipe


def _from_yaml(text: str, name: str) -> Any:
    """The values of a YAML text without aliases: a few lines of these stand for more values than fit into memory."""
    require_extra("reading a recipe", "yaml")
    import yaml

    class PlainLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                alias = self.peek_event()
                raise ValueError(f"line {alias.start_mark.line + 1} has an alias (*{alias.anchor}); write its value out")
            return super().compose_node(parent, index)

    try:
        values = yaml.load(text, PlainLoader)  # a SafeLoader
    except RecursionError:
        raise ValueError(f"recipe {name} is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as problem:
        raise ValueError(f"recipe {name} is not YAML that a recipe may hold: {' '.join(str(problem).split())}.") from None
    if depth_exceeds(values, 16):
        raise ValueError(f"recipe {name} is nested too deeply.")
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a key given by its path, `training.steps`."""
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{key}: {section} is no section of a recipe.")
    values[last] = value


@dataclass(frozen=True)
class Contender:
    """A router as it enters a comparison."""

    name: str  # for people
    router: str
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int | None = None  # another number of experts than the recipe's

    def describe(self) -> dict[str, Any]:
        """Return what must agree for results to be of this router: the code of its plugins too, where it has any."""
        plugins = plugins_of(self.router)
        return {**asdict(self), **({"plugins": plugins} if plugins else {})}


def contenders(written: str) -> list[Contender]:
    """Return the routers that commas separate; names and options are checked here."""
    return [contender(part) for part in split_routers(written)]


def contender(written: str) -> Contender:
    """Return one router, under the name it is written as."""
    return Contender(written, *REGISTRY.resolve(written))
