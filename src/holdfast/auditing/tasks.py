"""What a saved model is audited on: the test data of its own task."""

from collections.abc import Iterator
from typing import Any, final

from holdfast.train.picture_task import PictureTask, normalised, spread
from holdfast.train.task import Task
from holdfast.train.text_task import TextTask

PICTURES, BATCH = 64, 16
LETTERS = 64  # of a token at most, about: so much of a long document is read, and no more


@final
class Material:
    """Texts or batches, to be read as often as wanted, with their tokenizer and where they are from."""

    def __init__(self, task: Task, tokens: int) -> None:
        self.task, self.tokens = task, tokens
        self.tokenizer: Any = task.tokenizer if isinstance(task, TextTask) else None

    @property
    def source(self) -> dict[str, Any]:
        if isinstance(self.task, TextTask):
            return self.task.corpus.describe()
        assert isinstance(self.task, PictureTask)
        return self.task.pictures.describe()

    def __iter__(self) -> Iterator[Any]:
        return self._texts(self.task) if isinstance(self.task, TextTask) else self._pictures(self.task)

    def _texts(self, task: TextTask) -> Iterator[str]:
        left = LETTERS * self.tokens
        for document in task.corpus.documents("test"):
            text = document.text[:left]
            left -= len(text)
            yield text
            if left <= 0:
                return

    def _pictures(self, task: Task) -> Iterator[dict[str, Any]]:
        assert isinstance(task, PictureTask)
        images = task.pictures.images("test")
        numbers = spread(len(images), PICTURES)
        for start in range(0, len(numbers), BATCH):
            some = numbers[start : start + BATCH]
            yield {"pixel_values": normalised(images.pixels(some)), "labels": images.labels[some]}
