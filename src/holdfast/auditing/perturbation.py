"""What every perturbation has: a name, a line about it, a reason where it cannot be run, and how it is run."""

from abc import ABC, abstractmethod
from typing import ClassVar

from holdfast.auditing.comparing import Tally
from holdfast.auditing.observing import Observation
from holdfast.auditing.samples import Sample
from holdfast.auditing.subject import Audited


class Perturbation(ABC):
    """Compares a perturbed forward with the clean one on the same tokens (abstract)."""

    name: str  # in the report
    about: str
    harmless: ClassVar[bool] = False  # it asks for the same numbers: any change at all is a fault

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        """Why it cannot be run on this model and these inputs; None where it can."""
        return None

    @abstractmethod
    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        """One batch. Whatever it changes in the model is back as it was when it returns or raises."""
