"""Images of several domains: train on all but one, select the checkpoint on these, and test on the one that is held out.

    train       four fifths of each training domain; a batch has as many images of each
    validation  the other fifth of each, pooled: with `training.keep: best` and `best_by: figure`, it selects the checkpoint
    test        the whole held-out domain, which neither training nor selection reads

The split is drawn by the seed of the run, so intervals over seeds include it. The metric is the error in percent, as of
other images; 100 minus it is the accuracy that `domain_summary` compares.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final

from holdfast.data import DomainSet, ExampleOrder, ImageSet, domain_set
from holdfast.train.image_task import ImageTask
from holdfast.train.recipe import Recipe
from holdfast.train.task import Examples, Measure

HELD_OUT = "data.held_out"  # the key of the recipe


@final
class DomainTask(ImageTask):
    """The domains of a recipe. If `data.held_out` has no value, the held-out domain is a further axis of a comparison."""

    domain_set: DomainSet
    split_seed: int = 0

    def _read_images(self, folder: Path | None) -> ImageSet:
        self.domain_set = domain_set(self.recipe.data.source, size=self.recipe.data.size)
        return self._split()

    def _split(self) -> ImageSet:
        """Return the images as they are split; while no domain is held out, there are no splits."""
        held_out, images = self.recipe.data.held_out, self.domain_set
        if held_out is None:
            return ImageSet(images.name, images.about, images.classes, {}, images.checksum)
        return images.leave_out(held_out, self.split_seed)

    def open_choices(self) -> dict[str, list[Any]]:
        return {HELD_OUT: list(self.domain_set.domains)} if self.recipe.data.held_out is None else {}

    def with_recipe(self, recipe: Recipe) -> Self:
        other = super().with_recipe(recipe)
        other.image_set = other._split()
        return other

    def for_seed(self, seed: int) -> Self:
        other = copy.copy(self)
        other.split_seed = seed
        other.image_set = other._split()
        return other

    @property
    def measure(self) -> Measure:
        long = "share of the images of the held-out domain that are classified wrongly, in percent"
        return replace(super().measure, long=long)

    def describe(self) -> dict[str, Any]:
        """Describe all domains: the data of a comparison are the same, whichever domain is held out."""
        name = next(iter(self.domain_set.domains))
        some = self if self.image_set.splits else self.with_recipe(_holding_out(self.recipe, name))
        described = super(DomainTask, some).describe()
        attack = {**described["attack"], "examples": self.recipe.attack.examples}  # at most
        return {**described, "data": self.domain_set.describe(), "attack": attack}

    def examples(self, seed: int) -> Examples:
        """Return the training examples. All domains are read first: an unreadable image is found before training."""
        self._require_equal_shares()
        self.domain_set.read()
        return super().examples(seed)

    @property
    def _most_validation_images(self) -> int:
        return len(self.image_set.images("valid"))

    def _order(self, size: int, seed: int) -> ExampleOrder:
        assert self.recipe.data.held_out is not None
        # The split that the images have, whatever seed orders them.
        return self.domain_set.order(self.recipe.data.held_out, size, seed, split_seed=self.split_seed)

    def _require_equal_shares(self) -> None:
        batch, domains = self.recipe.training.batch, len(self.domain_set.domains) - 1
        if batch % domains:
            raise ValueError(
                f"training.batch is {batch}; a batch has as many images of each of the {domains} training domains: use a "
                f"multiple of {domains}."
            )


def _holding_out(recipe: Recipe, domain: str) -> Recipe:
    return replace(recipe, data=replace(recipe.data, held_out=domain))
