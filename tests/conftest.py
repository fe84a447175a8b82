"""One thread a worker: the tests run side by side on few cores, and small products are faster that way."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
