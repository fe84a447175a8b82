"""Read and check what `holdfast mismatch` stored. docs/mismatch.md explains every key."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Discriminator, Field, NonNegativeInt, PositiveInt, Tag
from pydantic import model_validator as validator

from holdfast.report.page_shell import MISMATCH
from holdfast.report.stored_reports import Number, ReportFile, StoredModel


class Estimate(StoredModel):
    value: Number
    low: Number
    high: Number


class LayerSets(StoredModel):
    layer: NonNegativeInt
    routers_differ: Estimate
    tokens_differ_so_far: Estimate


class Sets(StoredModel):
    tokens: PositiveInt
    routers_differ: Estimate
    tokens_differ: Estimate
    layers: list[LayerSets] = Field(min_length=1)


class Change(StoredModel):
    mean: Estimate
    outside: Estimate


class Logprobs(StoredModel):
    tokens: PositiveInt
    mean: Estimate
    std: Number
    quantiles: dict[str, Estimate]
    largest: Number
    ratio: Estimate
    outside: Estimate
    tail: list[float]
    change: Change | None


class Row(StoredModel):
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


class SkippedRow(StoredModel):
    remedy: str
    rollout: str
    router: str
    skipped: str


def _kind(found: Any) -> str:
    """Return which of the two a row is, so that an error message is about the right one."""
    skipped = found.get("skipped") if isinstance(found, dict) else getattr(found, "skipped", None)
    return "measured" if skipped is None else "skipped"


StoredRow = Annotated[Annotated[Row, Tag("measured")] | Annotated[SkippedRow, Tag("skipped")], Discriminator(_kind)]


class Settings(StoredModel):
    rollout_dtype: str
    rollout_batch: PositiveInt
    rollout_decode: bool
    clip: tuple[float, float]
    tail: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)


class Mismatch(ReportFile):
    file_name: ClassVar[str] = MISMATCH
    kind: ClassVar[str] = "a mismatch report"
    remedy: ClassVar[str] = "measure the model again"

    settings: Settings  # type: ignore[assignment]
    rows: list[StoredRow] = Field(min_length=1)

    @validator(mode="after")
    def _fits(self) -> Self:
        for row in self.measured:
            if row.logprobs is not None and len(row.logprobs.tail) != len(self.settings.tail):
                raise ValueError("needs a share for each size in every tail")
        return self

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
