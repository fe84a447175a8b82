"""Read and check what `holdfast mismatch` stored. docs/mismatch.md explains every key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, NonNegativeInt, PositiveInt, Tag, ValidationError
from pydantic import model_validator as validator

from holdfast.files import LARGEST, read_bytes
from holdfast.report.page_shell import MISMATCH
from holdfast.report.stored_comparison import Number

SCHEMA = 1


class _StoredModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Estimate(_StoredModel):
    value: Number
    low: Number
    high: Number


class LayerSets(_StoredModel):
    layer: NonNegativeInt
    routers_differ: Estimate
    tokens_differ_so_far: Estimate


class Sets(_StoredModel):
    tokens: PositiveInt
    routers_differ: Estimate
    tokens_differ: Estimate
    layers: list[LayerSets] = Field(min_length=1)


class Change(_StoredModel):
    mean: Estimate
    outside: Estimate


class Logprobs(_StoredModel):
    tokens: PositiveInt
    mean: Estimate
    std: Number
    quantiles: dict[str, Estimate]
    largest: Number
    ratio: Estimate
    outside: Estimate
    tail: list[float]
    change: Change | None


class Row(_StoredModel):
    remedy: str
    rollout: str
    router: str
    skipped: None
    sets: Sets
    logprobs: Logprobs | None
    loss: Number
    experts_per_token: Number

    @property
    def label(self) -> str:
        return self.router if self.remedy == "smooth" else self.remedy


class SkippedRow(_StoredModel):
    remedy: str
    rollout: str
    router: str
    skipped: str


def _kind(found: Any) -> str:
    """Return which of the two a row is, so that an error message is about the right one."""
    skipped = found.get("skipped") if isinstance(found, dict) else getattr(found, "skipped", None)
    return "measured" if skipped is None else "skipped"


StoredRow = Annotated[Annotated[Row, Tag("measured")] | Annotated[SkippedRow, Tag("skipped")], Discriminator(_kind)]


class Settings(_StoredModel):
    rollout_dtype: str
    rollout_batch: PositiveInt
    rollout_decode: bool
    clip: tuple[float, float]
    tail: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)


class Mismatch(_StoredModel):
    status: str
    model: dict[str, Any]
    data: dict[str, Any]
    settings: Settings
    versions: dict[str, str]
    seconds: Number
    rows: list[StoredRow] = Field(min_length=1)

    @validator(mode="after")
    def _fits(self) -> Self:
        for row in self.measured:
            if row.logprobs is not None and len(row.logprobs.tail) != len(self.settings.tail):
                raise ValueError("needs a share for each size in every tail")
        return self

    @property
    def title(self) -> str:
        return str(self.model.get("name") or self.model.get("class") or "a model")

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.rows if isinstance(row, Row)]

    @property
    def skipped(self) -> list[SkippedRow]:
        return [row for row in self.rows if isinstance(row, SkippedRow)]

    @property
    def rollouts(self) -> list[str]:
        """The kinds of rollout that there are rows for, in their order."""
        return list(dict.fromkeys(row.rollout for row in self.measured))


def read_mismatch(path: Path) -> dict[str, Any]:
    """Return the report stored in a file, or in a folder that `holdfast mismatch` wrote to."""
    path = path / MISMATCH if path.is_dir() else path
    try:
        stored = json.loads(read_bytes(path, limit=LARGEST))
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}.") from None
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged: it is not JSON ({problem}); measure the model again.") from None
    parse_mismatch(stored, str(path))
    return dict(stored)


def parse_mismatch(stored: Any, source: str = MISMATCH) -> Mismatch:
    """Return a stored report as typed data. Raise ValueError with a one-line error about the first problem."""
    if not isinstance(stored, Mapping) or stored.get("schema") != SCHEMA:
        found = stored.get("schema") if isinstance(stored, Mapping) else None
        raise ValueError(
            f"{source} is not a mismatch report of schema {SCHEMA} (it says {found!r}); measure the model again."
        )
    try:
        return Mismatch.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        raise ValueError(f"{source} is damaged at {place}: {first['msg'].lower()}; measure the model again.") from None
