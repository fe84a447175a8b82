"""One thread a worker: the tests run side by side on few cores, and small products are faster that way."""

import os

import hypothesis
import torch

hypothesis.settings.register_profile("no clocks", deadline=None)  # a slow machine is not a failure
hypothesis.settings.load_profile("no clocks")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
