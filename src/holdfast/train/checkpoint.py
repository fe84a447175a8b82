"""The checkpoints of the training loop: what a run needs to continue with the same numbers.

    model.safetensors, config.json, ...   the model with its routers, as `save_pretrained` writes it
    optimizer.tensors                     moments and step count of every parameter that has been updated
    random.tensors                        the states of all random number generators
    training.json                         step, best step and log
    checkpoint.json                       the manifest, written last (`run_folder`)

All of them are safetensors or JSON: reading a checkpoint runs nothing that is in it. Two are not named *.safetensors,
because in the folder of a model every file of that name is a part of its weights (`hub.folder_files`).
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from holdfast.files import LARGE, read_json, remove_folder, require_no_links, write_atomically
from holdfast.hub.folder_files import check_folder
from holdfast.train.run_folder import (
    KEPT_CHECKPOINTS,
    LOOP_STATE,
    delete_old_checkpoints,
    reading_checkpoint,
    write_checkpoint_manifest,
    writing_checkpoint,
)

OPTIMIZER, RANDOM = "optimizer.tensors", "random.tensors"
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # what AdamW keeps for each parameter that it has updated
WORDS = 624  # of a Mersenne Twister's state


@final
@dataclass
class TrainingState:
    """What a run knows besides its model, optimizer and random numbers: the content of training.json."""

    global_step: int = 0  # finished steps
    best_global_step: int | None = None  # the step with the best result on held-out data
    best_loss: float | None = None  # that result: the smallest loss, or the smallest figure (`training.best_by`)
    compiled: bool = False  # whether the step is compiled; a resumed run does the same
    log: list[dict[str, float]] = field(default_factory=list)

    def compiles(self, wanted: bool) -> bool:
        """Return whether to compile the step: as wanted, or in a resumed run as the run before it did."""
        return wanted if self.global_step == 0 else self.compiled


def write_checkpoint(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, state: TrainingState, guard: Callable[[], None]
) -> None:
    """Write a checkpoint of the step in `state`, and delete old ones. If a write fails, raise a one-line OSError."""
    checkpoint = folder / f"checkpoint-{state.global_step}"
    require_no_links(checkpoint, folder)
    guard()
    remove_folder(checkpoint, folder)  # an incomplete one: its files must not mix with the new ones
    with writing_checkpoint(checkpoint, guard):
        model.save_pretrained(checkpoint, save_original_format=False)  # `load_weights` needs the names of the model
        moments = {  # by parameter name: `exp_avg/lm_head.weight`
            f"{kind}/{name}": tensor.detach().cpu().contiguous()
            for name, parameter in model.named_parameters()
            for kind, tensor in optimizer.state.get(parameter, {}).items()
        }
        safetensors.torch.save_file(moments, checkpoint / OPTIMIZER)
        safetensors.torch.save_file(_random_states(), checkpoint / RANDOM)
        write_atomically(checkpoint / LOOP_STATE, json.dumps(asdict(state)) + "\n")
        guard()
        write_checkpoint_manifest(checkpoint)
    guard()
    delete_old_checkpoints(folder, state.global_step, KEPT_CHECKPOINTS, state.best_global_step)


def read_checkpoint(checkpoint: Path, model: Any, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Load model and optimizer from a complete checkpoint, and return the state; `restore_random` is separate.

    Raise a one-line ValueError if a file cannot be read.
    """
    check_folder(checkpoint)
    with reading_checkpoint(checkpoint):
        state = TrainingState(**read_json(checkpoint / LOOP_STATE, limit=LARGE))
        is_log = isinstance(state.log, list) and all(isinstance(line, dict) for line in state.log)
        if not is_log or not isinstance(state.best_loss, float | None):
            raise ValueError(f"its {LOOP_STATE} has values of other types")
        load_weights(checkpoint, model)
        _load_moments(safetensors.torch.load_file(checkpoint / OPTIMIZER), model, optimizer)
    return state


def load_weights(checkpoint: Path, model: Any) -> None:
    """Load the weights of a checkpoint into the model; raise ValueError if a weight is missing or of another model."""
    loaded: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob("model*.safetensors")):
        loaded |= safetensors.torch.load_file(file)
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    state = model.state_dict()
    places = {state[name].data_ptr() for name in loaded if name in state}
    lost = [name for name in missing if state[name].data_ptr() not in places]  # a tied weight is saved under one name
    if lost or unexpected:
        raise ValueError(f"its weights are of another model: {(lost + unexpected)[0]} does not match")


def restore_random(checkpoint: Path) -> None:
    """Set all random number generators to their states in the checkpoint."""
    with reading_checkpoint(checkpoint):
        states = safetensors.torch.load_file(checkpoint / RANDOM)
        python, numpy = states["python"].tolist(), states["numpy"].tolist()
        has_python, of_python, has_numpy, of_numpy = states["normal"].tolist()  # the second number of a pair, if drawn
        random.setstate((python[0], tuple(python[1:]), of_python if has_python else None))
        words = np.array(numpy[:WORDS], dtype=np.uint32)
        np.random.set_state(("MT19937", words, numpy[WORDS], int(has_numpy), of_numpy))
        torch.set_rng_state(states["torch"])
        if torch.cuda.is_available() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


def _random_states() -> dict[str, Tensor]:
    version, words, normal = random.getstate()
    numpy: Any = np.random.get_state()
    states = {
        "python": torch.tensor([version, *words]),
        "numpy": torch.tensor([*numpy[1].tolist(), numpy[2]]),
        "normal": torch.tensor([normal is not None, normal or 0.0, *numpy[3:]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _load_moments(tensors: dict[str, Tensor], model: Any, optimizer: torch.optim.Optimizer) -> None:
    named = dict(model.named_parameters())
    kinds: dict[str, set[str]] = {}
    for key in tensors:
        kind, _, name = key.partition("/")
        kinds.setdefault(name, set()).add(kind)
    wrong = next((name for name, found in kinds.items() if name not in named or found != MOMENTS), None)
    if wrong is not None or not kinds:
        raise ValueError(f"its {OPTIMIZER} is of another model: {wrong or 'it is empty'} does not match")
    optimizer.state.clear()
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        parameter = named[name]
        if kind == "step":
            place = torch.zeros((), dtype=torch.float32, device=parameter.device)
        else:
            place = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
        if tensor.shape != place.shape:
            raise ValueError(f"its {OPTIMIZER} is of another model: {key} has shape {tuple(tensor.shape)}")
        optimizer.state[parameter][kind] = place.copy_(tensor)
