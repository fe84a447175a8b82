"""The type of the fixture that runs `holdfast` with arguments, in a terminal of some width."""

from subprocess import CompletedProcess
from typing import Protocol


class Command(Protocol):
    def __call__(self, *arguments: str, columns: int = 80) -> CompletedProcess[str]: ...
