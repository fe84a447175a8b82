"""Measure what `import holdfast` adds to `import torch`: the median of several fresh processes, as a share of torch's own.

python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys

CODE = """
import time
start = time.perf_counter(); import torch
middle = time.perf_counter(); import holdfast
print(middle - start, time.perf_counter() - middle)
"""


def main(processes: int = 7) -> None:
    pairs = []
    for _ in range(processes):
        out = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout
        pairs.append(tuple(float(seconds) for seconds in out.split()))
    torch_seconds, added = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"import torch {torch_seconds:.2f} s, import holdfast adds {added:.3f} s ({added / torch_seconds:.1%} of it)")


if __name__ == "__main__":
    main()
