"""Measure how long commands take to answer, and what Holdfast adds to the import of torch.

CPU time, user and system, and the least of several fresh processes: other programs on the machine hardly change it.

python benchmarks/import_time.py
"""

import resource
import subprocess
import sys

from holdfast_command import COMMANDS

PROCESSES = 5
HELP = "import sys; from holdfast_command import main; sys.exit(main(sys.argv[1:]))"


def cpu_seconds(code: str, *arguments: str) -> float:
    """Return the least CPU time of several processes that run this code."""
    found = []
    for _ in range(PROCESSES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


def main() -> None:
    print(f"CPU seconds, the least of {PROCESSES} processes")
    print(f"{'python, nothing imported':<40}{cpu_seconds('pass'):.2f}")
    print(f"{'import holdfast':<40}{cpu_seconds('import holdfast'):.2f}")
    print(f"{'import torch':<40}{cpu_seconds('import torch'):.2f}")
    print(f"{'import torch, and all of holdfast':<40}{cpu_seconds('import torch, holdfast.public'):.2f}")
    for name in COMMANDS:
        print(f"{f'holdfast {name} --help':<40}{cpu_seconds(HELP, name, '--help'):.2f}")
    print(f"{'holdfast compare --router, a mistake':<40}{cpu_seconds(HELP, 'compare', '--router', 'smoe'):.2f}")


if __name__ == "__main__":
    main()
