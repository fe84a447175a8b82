"""Rows of public datasets through Hugging Face's `datasets`, which downloads them once and keeps them."""

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.extras import MissingExtra, lacking


def rows(dataset: str, config: str, split: str, *, instead: str, streamed: bool = False) -> Iterable[Mapping[str, Any]]:
    """The rows of a split. Where they cannot be had, the error ends with `instead`: what else the user can do."""
    missing = lacking(f"fetching {dataset}", "datasets")
    if missing is not None:
        raise MissingExtra(f"{missing}; or {instead}.")
    from datasets import load_dataset  # type: ignore[import-untyped]

    try:
        found: Iterable[Mapping[str, Any]] = load_dataset(dataset, config, split=split, streaming=streamed)
    except Exception as error:  # no network, a proxy, a full disk, a moved dataset: each has a type of its own
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{dataset} ({config}) could not be fetched ({reason}); check the network, or {instead}."
        ) from error
    return found
