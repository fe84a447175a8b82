"""`holdfast train`: train one model with one router, from a recipe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from holdfast.cli.common import PluginFiles, require_folder, show_messages
from holdfast.errors import unknown_name
from holdfast.locking import take_over
from holdfast.progress import bar, quiet


@dataclass(frozen=True)
class Train:
    """Train one model with one router from a recipe. Run the same command again to resume.

    Examples: `holdfast train tiny --router smooth --out runs/smooth`, `holdfast train switch-small --router
    "similarity[tau=2]" --data ~/data --set data.source=wikitext-2 training.steps=5000 --best --log tensorboard`,
    `torchrun --nproc-per-node 8 -m holdfast train enwik8 --router symphony --data ~/data --bf16`
    """

    recipe: Positional[str]
    """The name of a shipped recipe, or the path of a .yaml file."""
    router: str = "smoe"
    """A router name; a plus sign joins names, brackets contain options, layers follow @: smoe[k=3]@even|ac@odd. Braces
    contain training settings: "smooth{method=pgd,budget=0.01}"."""
    out: Path = Path("trained")
    """The folder for all results."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    set: tuple[str, ...] = ()
    """Changes to the recipe, for example training.steps=50."""
    best: bool = False
    """Keep the checkpoint with the lowest loss on held-out data instead of the last one."""
    bf16: bool = False
    """Compute in bfloat16; routing is computed in float32."""
    log: Annotated[tuple[str, ...], arg(metavar="{tensorboard,wandb}")] = ()
    """Log here too, besides log.jsonl: tensorboard, wandb."""
    take_over: bool = False
    """Write into the folder although a process of another host has left its note there; make sure that it has ended."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.train import load_recipe
        from holdfast.train.recipe import parse_pairs, parse_router
        from holdfast.train.trainer_loop import TRAINER_LOGGERS, is_first_rank, own_process_group, processes
        from holdfast.train.training import SingleRun

        for name in self.log:
            if name not in TRAINER_LOGGERS:
                raise ValueError(unknown_name("logger", name, TRAINER_LOGGERS))
            if find_spec(name) is None and not (name == "tensorboard" and find_spec("tensorboardX")):
                raise ValueError(f"{name} is not installed: pip install {name}.")
        require_folder(self.out)
        if self.take_over and is_first_rank():
            take_over(self.out)
        wanted = parse_pairs(self.set, "training.steps=50")
        wanted |= {"training.keep": "best"} if self.best else {}
        wanted |= {"training.precision": "bf16"} if self.bf16 else {}
        recipe = load_recipe(self.recipe, wanted)
        single = SingleRun(recipe, parse_router(self.router), self.seed, self.out, data=self.data)
        quiet()
        if is_first_rank():
            show_messages()
        with own_process_group():
            if is_first_rank():
                steps = single.task.steps
                with bar(steps) as tell:

                    def note(done: int) -> None:
                        phase = "train" if done < steps else "save"
                        tell(done, f"{single.choice.name}: {phase}", f"step {done} of {steps}")

                    single.run(note, self.log)
            else:
                single.run(report_to=self.log)
        if is_first_rank():
            if processes() > 1:
                print(f"Trained on {processes()} ranks.")
            print(f"Model: {self.out / 'model'}\nLog: {self.out / 'training' / 'log.jsonl'}")
            plugins = "".join(f" --plugin {shlex.quote(str(file))}" for file in self.plugins.plugin)
            print(f"Next: holdfast evaluate {self.out}{source_option(recipe.data.source, self.data)}{plugins}")


def source_option(source: str, data: Path | None) -> str:
    """Return the option that `holdfast evaluate` needs to find the data; embedded data need none."""
    from holdfast.data import corpora, image_sets, question_sets, text_sets
    from holdfast.train.task_record import EMBEDDED

    if source in EMBEDDED:
        return ""
    is_named = data is not None and source in (*corpora(), *image_sets(), *text_sets(), *question_sets())
    return f" --data {shlex.quote(str(data))}" if is_named else f" --source {shlex.quote(source)}"
