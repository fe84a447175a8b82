"""One model trained in a folder, on one process or on many: resumable, with what is needed to try it again."""

from functools import partial
from pathlib import Path
from typing import Any

from holdfast.locking import locked, require_unlocked
from holdfast.train.contenders import Contender
from holdfast.train.loop import Tick, require_trainable, train
from holdfast.train.ownership import claim, prepare, require_own
from holdfast.train.processes import is_first
from holdfast.train.recipe import Recipe
from holdfast.train.start import start
from holdfast.train.trained import MODEL, TASK, make_task, save_trained
from holdfast.version import VERSION

LOGGERS = ("tensorboard", "wandb")


class Single:
    """A recipe, a router and a seed. Interrupted, the same run goes on where it was."""

    def __init__(self, recipe: Recipe, contender: Contender, seed: int, folder: Path, *, data: Path | None = None) -> None:
        self.recipe, self.contender, self.seed, self.folder = recipe, contender, seed, folder
        self.task = make_task(recipe, data)
        require_own(folder, self.identity())

    def identity(self) -> dict[str, Any]:
        router = {"router": self.contender.describe(), "seed": self.seed}
        return {"holdfast": VERSION, **router, "recipe": self.recipe.describe(), "data": self.task.describe()["data"]}

    def run(self, tick: Tick | None = None, report_to: tuple[str, ...] = ()) -> list[dict[str, float]]:
        """The log; the trained model is saved in the folder."""
        if is_first():
            require_unlocked(self.folder)
        k = self.contender.k or self.recipe.sparse.k
        model = start(self.task, self.contender.router, self.contender.options, seed=self.seed, k=k)
        require_trainable(self.task, self.seed)
        place = self.folder / "training"
        how: dict[str, Any] = {"seed": self.seed, "k": k, "report_to": report_to}
        if not is_first():  # the processes of one job are one writer: the first one
            return train(model, self.task, place, tick=tick, **how)
        with locked(self.folder, wait=False) as lock:
            claim(self.folder, self.identity())
            prepare(self.folder, self.folder)
            log = train(model, self.task, place, tick=tick, guard=partial(lock.require, place), **how)
            lock.require(self.folder / MODEL, self.folder / TASK)
            save_trained(model, self.task, self.folder)
        return log
