"""Rounds of three processes that run one comparison in one folder, one of them killed, for test_concurrent_comparisons.py.

python concurrent_comparisons.py ROUNDS SEED FOLDER RECIPE

Processes are forked from this one, which has imported what takes seconds. FOLDER/clean is of a process that ran alone.
Prints a line of JSON for each round: what each process ended with, and when it was started and killed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import transformers
from transformers import LlamaForCausalLM, Trainer  # noqa: F401

import holdfast.report
import holdfast.train.comparison
from holdfast_command import main

ROUTERS, SEEDS = "smoe,symphony+smooth", 2


def compare(folder: Path, recipe: str, said: Path) -> int:
    """Start `holdfast compare`; return its process number."""
    if process := os.fork():
        return process
    code = 1
    try:
        output = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        what = ["--recipe", recipe, "--routers", ROUTERS, "--seeds", str(SEEDS), "--no-match-compute"]
        code = main(["compare", *what, "--out", str(folder)])
        sys.stdout.flush()
    finally:
        os._exit(code)


def main_of_rounds(rounds: int, seed: int, folder: Path, recipe: str) -> None:
    begun = time.monotonic()
    alone = compare(folder / "clean", recipe, folder / "clean.txt")
    assert os.waitpid(alone, 0)[1] == 0, (folder / "clean.txt").read_text()
    usual = time.monotonic() - begun
    for number in range(rounds):
        source = random.Random(seed + number)
        starts = sorted(source.uniform(0, usual / 2) for _ in range(3))
        victim, life = source.randrange(3), source.uniform(0.05, 0.9) * usual
        ended = one_round(starts, victim, life, folder / f"round-{number}", recipe)
        print(json.dumps({"ended": ended, "victim": victim, "starts": starts, "life": life}), flush=True)


def one_round(starts: list[float], victim: int, life: float, folder: Path, recipe: str) -> list[int]:
    """Return the exit codes, negative for a signal."""
    begun, running, ended = time.monotonic(), dict[int, int](), dict[int, int]()
    waiting = list(enumerate(starts))
    kill_at = begun + starts[victim] + life
    while waiting or running:
        now = time.monotonic()
        if waiting and now >= begun + waiting[0][1]:
            which, _ = waiting.pop(0)
            running[compare(folder, recipe, folder.with_name(f"{folder.name}-{which}.txt"))] = which
        for process, which in list(running.items()):
            if which == victim and now >= kill_at:
                os.kill(process, signal.SIGKILL)
            if (status := os.waitpid(process, os.WNOHANG))[0]:
                ended[running.pop(process)] = os.waitstatus_to_exitcode(status[1])
        time.sleep(0.005)
    return [ended[which] for which in range(3)]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    assert holdfast.report and holdfast.train.comparison
    main_of_rounds(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
