"""Run scripts sequentially, each in its own process that has imported torch and transformers, but not holdfast.

python fresh_processes.py SCRIPT...
"""

import os
import sys

import torch  # noqa: F401
from fork_ranks import run_in_a_fork
from transformers import LlamaForCausalLM, MixtralForCausalLM, OlmoeForCausalLM  # noqa: F401

if __name__ == "__main__":
    assert "holdfast" not in sys.modules
    failed = []
    for script in sys.argv[1:]:
        _, status = os.waitpid(run_in_a_fork(script), 0)
        if status:
            failed.append(script)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
