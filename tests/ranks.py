"""Scripts of the tests run by several processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path


def on_ranks(script: Path, *arguments: str, processes: int = 2) -> str:
    """What a script prints, run by so many processes (one: without torchrun); it may import what lies beside it."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    here = os.pathsep.join([str(script.parent), str(script.parent.parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    command = [sys.executable, *launch, str(script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout
