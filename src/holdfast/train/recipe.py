"""Recipes: everything that makes a training run what it is, typed, from YAML. A key that nobody knows is an error."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.suggest import unknown

SHIPPED = "holdfast.train.recipes"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPart(_Section):
    """A dense Hugging Face model, from its config."""

    family: str  # a dense family that holdfast.sparsify knows
    config: dict[str, Any] = Field(default_factory=dict)  # of the family, as transformers names it


class SparsePart(_Section):
    """What `holdfast.sparsify` makes of it."""

    experts: int = Field(gt=0)
    k: int = Field(default=2, gt=0)
    hidden: int | None = Field(default=None, gt=0)
    layers: str | list[int] = "all"
    init: Literal["copy", "random"] = "random"
    balance: float = 0.01  # coefficient of the balance loss


class DataPart(_Section):
    source: str = "python-docs"  # a name or a path
    tokens: str = "words"  # "words", "bytes", or the folder of a Hugging Face tokenizer
    vocabulary: int = Field(default=2000, gt=1)  # of words
    length: int = Field(default=64, gt=1)  # of a block


class TrainingPart(_Section):
    steps: int = Field(gt=0)
    batch: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    warmup: int = Field(default=0, ge=0)  # steps, linear; constant after
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=1.0, gt=0)  # largest norm of a gradient
    accumulate: int = Field(default=1, gt=0)  # micro-batches a step
    precision: Literal["float32", "bf16"] = "float32"
    save_every: int = Field(default=100, gt=0)  # steps; an interrupted run continues from the last


class AttackPart(_Section):
    """How the trained model is tried."""

    rate: float = Field(default=0.025, ge=0, le=1)  # of words swapped
    token: str = "AAA"


class Recipe(_Section):
    """A run, but for its router and its seed."""

    about: str
    model: ModelPart
    sparse: SparsePart
    data: DataPart = DataPart()
    training: TrainingPart
    attack: AttackPart = AttackPart()


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
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"there is no recipe {path}.") from None
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"{path} cannot be read as text.") from None


def _parse(text: str, name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(f"recipe {name} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {name} holds no keys.")
    for key, value in (changes or {}).items():
        _set(values, key, value)
    try:
        return Recipe.model_validate(values)
    except ValidationError as problem:
        raise ValueError(f"recipe {name}: {_sentence(problem)}") from None


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a key given by its path, `training.steps`."""
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"{key}: {section} is no section of a recipe.")
    values[last] = value


def _sentence(problem: ValidationError) -> str:
    """The first mistake, with the nearest key for one that nobody knows."""
    error = problem.errors()[0]
    *place, key = [str(step) for step in error["loc"]]
    if error["type"] != "extra_forbidden":
        return f"{'.'.join([*place, key])}: {error['msg'].lower()}."
    known: Any = Recipe
    for step in place:
        known = known.model_fields[step].annotation
    return f"{'.'.join([*place, key])}: {unknown('key', key, known.model_fields)}"
