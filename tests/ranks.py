"""Run scripts of the tests on several processes, with torchrun, or with `fork_ranks.py`, which imports only once."""

import os
import subprocess
import sys
from pathlib import Path

FORKED = Path(__file__).with_name("fork_ranks.py")
PATIENCE = 240  # seconds; a collective that not every process runs never returns


def on_ranks(script: Path, *arguments: str, processes: int = 2, patience: float = PATIENCE, torchrun: bool = False) -> str:
    """Run a script on several processes and return what it prints; it may import modules of its folder."""
    launch = [str(FORKED), str(processes)] if processes > 1 else []
    if torchrun:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    tests = script.parent.parent
    folders = [script.parent, tests, tests / "hub", tests.parent / "benchmarks"]
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Without a buffer a line and its end are written apart, and lines of two processes mix.
    buffered = {"PYTHONUNBUFFERED": ""}
    # The processes talk through gloo; a machine with one GPU has none for the second process.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **buffered}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, *launch, str(script), *arguments]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        printed, complained = run.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        run.terminate()  # not killed outright: it then ends its processes, which a signal to it alone does not reach
        try:
            printed, complained = run.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            run.kill()
            printed, complained = run.communicate()
        raise AssertionError(f"{script.name} was not done after {patience} s.\n{printed}\n{complained}") from None
    assert run.returncode == 0, f"{printed}\n{complained}"
    return printed
