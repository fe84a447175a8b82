"""What is trained before routers are put into a model: the stages of a task, each with its own steps, in one folder.

A stage is a run of the training loop on the dense model. All routers of a comparison with the same seed start from the model
that the stages have trained, so they differ only by what is trained after upcycling. An interrupted stage resumes from its
newest checkpoint; a finished one is only read.

    FOLDER/stages/CHECKSUM-seed0/vision/    checkpoints and log of a stage; CHECKSUM is of all that the stages depend on
"""

import hashlib
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.locking import locked
from holdfast.train.loop import TrainingLoop
from holdfast.train.run_folder import claim
from holdfast.train.start import checkpoint_identity
from holdfast.train.task import Task, require_trainable
from holdfast.train.trainer_loop import processes
from holdfast.version import VERSION

STAGES = "stages"

logger = logging.getLogger("holdfast")


def after_stages(task: Task, folder: Path, seed: int, identity: dict[str, Any]) -> Task:
    """Train the stages of a task in the folder of a run, and return the task whose model starts from what they have trained.

    identity    of the run, which the folder is claimed for; a task without stages is returned as it is, and claims nothing
    """
    stages = task.stages()
    if not stages:
        return task
    require_trainable(task, seed)
    with locked(folder, wait=True):
        claim(folder, identity)
    if processes() > 1:
        raise ValueError("the stages before the experts run on one rank: run the command once without torchrun.")
    recipe = task.recipe.describe()
    same = {"holdfast": VERSION, "seed": seed, **{key: recipe[key] for key in ("model", "stages", "data")}}
    same |= {"data of": task.describe()["data"], "training": [stage.task.recipe.describe()["training"] for stage in stages]}
    same |= checkpoint_identity(task.recipe.model)
    digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:12]
    place = folder / STAGES / f"{digest}-seed{seed}"
    torch.manual_seed(seed)
    model = task.initial_model()
    with locked(place, wait=True) as lock:
        for stage in stages:
            with stage.prepare(model):
                own = place / stage.name
                guard = partial(lock.require, own)
                loop = TrainingLoop(model, stage.task, own, seed=seed, k=[], tick=lambda finished: None, guard=guard)
                if (left := loop.steps - loop.state.global_step) > 0:
                    logger.info("Stage %s: %s steps.", stage.name, f"{left:,}")
                loop.run()
    return task.starting_from({name: tensor.cpu() for name, tensor in model.state_dict().items()})
