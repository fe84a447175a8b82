"""`import holdfast` imports no torch, and other libraries know Holdfast when they need to, whatever is imported first."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from changed_models import changed
from torch import Tensor, nn

import holdfast
from holdfast.hub.checkpoint import REGISTRIES
from holdfast.registration import WATCHED

START = """
import sys
folder = sys.argv[1]
def bare():
    assert not {"torch", "transformers", "numpy"} & {*sys.modules}
def opens(kind):
    assert "holdfast" in dict(kind.from_pretrained(folder).model.layers[0].mlp.gate.named_children())
"""
ORDERS = {
    "holdfast, then Auto": "import holdfast; bare(); from transformers import AutoModelForCausalLM as Auto; opens(Auto)",
    "an Auto class, then holdfast": "from transformers import AutoModelForCausalLM as kind; import holdfast; opens(kind)",
    "one of its modules": "import holdfast.errors; bare()\n"
    "from transformers import AutoModelForCausalLM as Auto; opens(Auto)",
    "the family's own class": "import holdfast; bare(); from transformers import MixtralForCausalLM as kind; opens(kind)",
    "a config": "import holdfast; bare(); from transformers import AutoConfig; config = AutoConfig.from_pretrained(folder)\n"
    "assert type(config).__module__.startswith('holdfast.')",
    "the Trainer": "import holdfast; bare(); from transformers.trainer import DEFAULT_CALLBACKS as known\n"
    "assert type(holdfast.trainer_callback()) in known",
    "an exported program": "import holdfast; bare(); import torch; torch.export.load(folder + '/program.pt2')",
    "an exported program, torch first": "import torch, holdfast; torch.export.load(folder + '/program.pt2')",
    "a pickle": "import holdfast; bare(); import pickle; pickle.load(open(folder + '/losses.pickle', 'rb'))",
}


class Copies(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return torch.ops.holdfast.copy_of(values) + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, an exported program with an operator of Holdfast, and a pickle: all of them need Holdfast."""
    where = tmp_path_factory.mktemp("saved")
    holdfast.save(changed("mixtral", "symphony"), where)
    torch.export.save(torch.export.export(Copies(), (torch.ones(3),)), where / "program.pt2")
    (where / "losses.pickle").write_bytes(pickle.dumps(holdfast.Losses(balance=0.1)))
    return where


@pytest.mark.parametrize("order", ORDERS)
def test_other_libraries_know_holdfast_whichever_is_imported_first(order: str, folder: Path) -> None:
    line = [sys.executable, "-c", START + ORDERS[order], str(folder)]
    run = subprocess.run(line, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_all_registries_are_watched() -> None:
    assert REGISTRIES.keys() < {*WATCHED}
