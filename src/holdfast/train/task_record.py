"""The record of a trained model: the `task.json` beside its `model/`.

A folder of `holdfast train`, or of a cell of a comparison, contains `model/` (the Hugging Face model) and `task.json` (the
recipe, and the tokeniser or the classes). Such a folder is untrusted: its `task.json` may refer only to data that are inside
the folder or embedded in Holdfast; other data are read only if the user names them.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from holdfast.checked import from_mapping
from holdfast.data import Tokenizer, corpora, image_sets, question_sets, text_sets, tokenizer_from
from holdfast.files import LARGE, is_inside, read_json, recover_folder
from holdfast.plugins import is_from_file, require_plugins
from holdfast.train.recipe import Recipe

MODEL, TASK, PLUGINS = "model", "task.json", "plugins"
# Holdfast finds these itself; a folder cannot redirect them.
EMBEDDED = ("python-docs", "python-topics", "digits", "fashion-mnist", "scenes")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@final
@dataclass(frozen=True)
class TaskRecord:
    """The `task.json` of a folder. It is untrusted: what it refers to is read only if it is inside the folder."""

    home: Path
    recipe: Recipe
    state: dict[str, Any]  # of its task
    plugins: Any = ()  # what `plugins_of` returned

    def source(self, named: str | None = None, data: Path | None = None) -> str:
        """Return the data to evaluate the model on: what the user `named`, or the folder's own source if it may be read.

        data        the folder in which the user has named sources
        """
        source = self.recipe.data.source
        if named is not None:
            return named
        require_plugins(self.plugins, str(self.home), warn=False)  # `read_record` has warned
        if (
            source in EMBEDDED
            or is_from_file("datasets", source)
            or (data is not None and source in (*corpora(), *image_sets(), *text_sets(), *question_sets()))
        ):
            return source
        if source in (*image_sets(), *text_sets(), *question_sets()):
            raise ValueError(f"{self.home} was trained on {source}: add --data FOLDER to say where its files are.")
        if source in corpora():
            raise ValueError(
                f"{self.home} was trained on {source}, which would be fetched from a hub; add --source {source} to fetch "
                "it, or --data FOLDER to say where it is."
            )
        inside = self.home / source
        if inside.exists() and is_inside(inside, self.home):
            places = (Path(place, name) for place, folders, files in os.walk(inside) for name in (*folders, *files))
            if all(is_inside(path, self.home) for path in places):  # no link leads out
                return str(inside)
        raise ValueError(
            f"{self.home} was trained on {source!r}, which is not in it; add --source {shlex.quote(source)} to use "
            "that, or name another source."
        )

    def tokenizer(self) -> Tokenizer:
        """Return the model's own tokeniser, from its folder."""
        model = self.home / MODEL
        try:
            described = self.state["tokenizer"]
            if described.get("kind") == "hub" and not any((model / name).exists() for name in TOKENIZER_FILES):
                place = str(described["place"])
                raise ValueError(
                    f"{model} does not contain its tokeniser, which was read from {place!r}; save it into the folder: "
                    f"AutoTokenizer.from_pretrained({place!r}).save_pretrained({str(model)!r})."
                )
            return tokenizer_from(described, folder=model)
        except (AttributeError, KeyError, TypeError) as problem:
            raise ValueError(f"the {TASK} of this model is damaged: it describes no tokeniser ({problem}).") from None


def read_record(folder: Path) -> TaskRecord:
    """Return what `save_trained` wrote next to the model."""
    home = _home(folder)
    if home is None:
        raise ValueError(f"{folder} contains no trained model: there is no {TASK} with a folder {MODEL} next to it.")
    if not is_inside(home / MODEL, home):
        raise ValueError(f"{home / MODEL} is a link to a folder outside of {home}; name that folder instead.")
    try:
        stored = read_json(home / TASK, limit=LARGE)
        described, plugins = stored.pop("recipe"), stored.pop(PLUGINS, [])
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{home / TASK} is damaged: {problem}") from None
    require_plugins(plugins, str(home), without=["datasets"])  # the user may name other data
    try:
        recipe = from_mapping(Recipe, described)
    except (AttributeError, TypeError, ValueError) as problem:
        raise ValueError(f"{home / TASK} is damaged: {problem}") from None
    return TaskRecord(home, recipe, stored, plugins)


def is_trained(folder: Path) -> bool:
    """Return whether `load_trained` finds a model and its task here."""
    return _home(folder) is not None


def _home(folder: Path) -> Path | None:
    places = (folder, Path(os.path.realpath(folder)).parent)
    return next((place for place in places if (place / TASK).exists() and recover_folder(place / MODEL)), None)
