"""`holdfast train`: one model with one router, from a recipe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from holdfast.cli.common import PluginFiles, require_folder
from holdfast.cli.compare import changes

if TYPE_CHECKING:
    from holdfast.train.training import Single


@dataclass(frozen=True)
class Train:
    """Train a model with a router as a recipe says, on the Hugging Face Trainer. Interrupted, the same command goes on.

    Examples: `holdfast train tiny --router smooth --out runs/smooth`, `holdfast train switch-small --router
    "similarity[tau=2]" --data ~/data --set data.source=wikitext-2 training.steps=5000 --best --log tensorboard`,
    `torchrun --nproc-per-node 8 -m holdfast train enwik8 --router symphony --data ~/data --bf16`
    """

    recipe: Positional[str]
    """A shipped recipe, or the path of a .yaml file."""
    router: str = "smoe"
    """A name; a plus sign joins parts, brackets hold options."""
    out: Path = Path("trained")
    """The folder for everything that is written."""
    seed: int = 0
    """Of the first weights and the order of the data."""
    data: Path | None = None
    """Where named sources lie, if they are not to be fetched."""
    set: tuple[str, ...] = ()
    """Changes to the recipe, as training.steps=50."""
    best: bool = False
    """Keep the checkpoint that does best on held-out data instead of the last."""
    bf16: bool = False
    """Compute in bfloat16; routing stays in float32."""
    log: Annotated[tuple[str, ...], arg(metavar="{tensorboard,wandb}")] = ()
    """Besides log.jsonl: tensorboard, wandb."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.train import load_recipe
        from holdfast.train.recipe import contender
        from holdfast.train.training import Single, is_first, own_process_group, processes, quiet

        self.plugins.load()
        _check_loggers(self.log)
        require_folder(self.out)
        wanted = changes(self.set)
        wanted |= {"training.keep": "best"} if self.best else {}
        wanted |= {"training.precision": "bf16"} if self.bf16 else {}
        single = Single(
            load_recipe(self.recipe, wanted),
            contender(self.router),
            self.seed,
            self.out,
            data=self.data,
        )
        quiet()
        with own_process_group():
            if is_first():
                _with_progress(single, self.log)
            else:
                single.run(None, self.log)
        if is_first():
            if processes() > 1:
                print(f"Trained by a group of {processes()} processes.")
            print(f"Model: {self.out / 'model'}\nLog: {self.out / 'training' / 'log.jsonl'}")
            print(f"Try it: holdfast evaluate {self.out}{_source_option(single)}")


def _source_option(single: Single) -> str:
    """Return the option that `evaluate` needs to find the data; embedded data need none."""
    from holdfast.train.saved_model import EMBEDDED

    source = single.recipe.data.source
    return "" if source in EMBEDDED else f" --source {shlex.quote(source)}"


def _with_progress(single: Single, log: tuple[str, ...]) -> None:
    from holdfast.cli.common import bar

    steps = single.recipe.training.steps
    with bar(steps) as tell:
        single.run(lambda done: tell(done, f"{single.contender.name}: step {done} of {steps}"), log)


def _check_loggers(names: tuple[str, ...]) -> None:
    from importlib.util import find_spec

    from holdfast.errors import unknown
    from holdfast.train.training import LOGGERS

    for name in names:
        if name not in LOGGERS:
            raise ValueError(unknown("logger", name, LOGGERS))
        if find_spec(name) is None and not (name == "tensorboard" and find_spec("tensorboardX")):
            raise ValueError(f"{name} is not installed: pip install {name}.")
