"""What `holdfast compare` stored, read back and checked. Keys that the report does not show are passed over."""

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

NAME = "results.json"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]  # None where a run broke: JSON knows no NaN


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Difference(_Part):
    mean: Number
    low: Number
    high: Number
    seeds: int
    words: str


class Row(_Part):
    router: str
    seeds: list[int]
    parameters: int
    experts_per_token: Number
    clean: Number
    attacked: Number
    clean_difference: Difference | None = Field(None, alias="clean, difference")
    attacked_difference: Difference | None = Field(None, alias="attacked, difference")


class Load(_Part):
    percent: list[float]
    cv: Number
    dead: list[int]


class Strip(_Part):
    width: float
    share: Number


class NearTies(_Part):
    strips: list[Strip]


class Layer(_Part):
    layer: int
    experts: int
    entropy: Number
    load: Load
    near_ties: NearTies
    instability: Number = None


class Routing(_Part):
    layers: list[Layer]


class Score(_Part):
    perplexity: Number
    bits_per_byte: Number
    perplexity_of_clean_targets: Number = None
    routing: Routing


class Entry(_Part):
    step: int
    loss: Number = None


class Cell(_Part):
    router: str
    seed: int
    first_batch: str = ""
    last_batch: str = ""
    log: list[Entry]
    clean: Score
    attacked: Score


class Run(_Part):
    holdfast: str
    recipe: dict[str, Any]
    text: dict[str, Any]
    attack: dict[str, Any]


class Results(_Part):
    """A comparison. The first row is the baseline's."""

    run: Run
    versions: dict[str, str] = {}
    rows: list[Row] = Field(min_length=1)
    cells: list[Cell]
    checksum: str = ""  # of the file, where it was read from one

    def cells_of(self, router: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.router == router]


def read_results(folder: Path) -> Results:
    """The results of a comparison in its folder."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the folder of a comparison, which holds {NAME}.")
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no {NAME}; give the folder that a finished `holdfast compare` wrote to.")
    content = path.read_bytes()
    try:
        stored = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged and no JSON ({error}); run the same `holdfast compare` again.") from None
    if isinstance(stored, dict):
        stored["checksum"] = hashlib.sha256(content).hexdigest()
    return parse(stored, str(path))


def parse(stored: Any, source: str = NAME) -> Results:
    """Checked, with one sentence about the first thing that is wrong. `source` is what the sentence calls it."""
    try:
        return Results.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(
            f"{source} is damaged or of another version, at {place}: {first['msg'].lower()}; "
            "run the same `holdfast compare` again."
        ) from None
