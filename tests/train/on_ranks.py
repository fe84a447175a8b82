"""Training on this process's share of each batch; run by test_training.py.

torchrun on_ranks.py RECIPE FOLDER ROUTER...
"""

import os
import sys
from pathlib import Path

import torch

from holdfast.train import build_model, load_recipe, make_task
from holdfast.train.trainer_loop import own_process_group
from holdfast.train.training import train

if __name__ == "__main__":
    recipe, folder = load_recipe(sys.argv[1]), Path(sys.argv[2])
    task = make_task(recipe)
    with own_process_group():
        for router in sys.argv[3:]:
            model = build_model(task, router, {}, seed=0)
            train(model, task, folder / router, seed=0, k=recipe.sparse.k or 2)
            torch.save(model.eval().state_dict(), folder / f"{router}.{os.environ['RANK']}.pt")
